"""Are the parameters bit-equal on all ranks? A checksum per parameter, compared across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.byte_views import bytes_of
from shardstep.comm.process_group import Group
from shardstep.layout.specs import Layout

_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(group: Group, layout: Layout, params: Mapping[int, Tensor]) -> None:
    """Collective: call on every rank of the group. RuntimeError on every rank if a parameter differs somewhere."""
    indices = sorted(params)
    rows = collectives.all_gather_rows(group, _checksums([params[index] for index in indices])).tolist()
    for position, index in enumerate(indices):
        by_value: dict[int, list[int]] = {}
        for rank, row in enumerate(rows):
            by_value.setdefault(row[position], []).append(rank)
        if len(by_value) > 1:
            sides = " and ".join(_names(group, ranks) for ranks in by_value.values())
            raise RuntimeError(
                "check_replicas expects every parameter to be bit-equal on all ranks, but "
                f"{layout.spec_of[index].label} of shape {layout.spec_of[index].shape} differs between {sides}. "
                "Something changed it on some ranks "
                "only: an in-place edit, a load on one rank, or gradients that were not reduced."
            )


def _names(group: Group, ranks: list[int]) -> str:
    return group.names_of(ranks) if group.names else f"ranks {ranks}"


def _checksums(params: Sequence[Tensor]) -> Tensor:
    """Of every parameter, in order: on their device, or on the first one's. Nothing is read on the host."""
    if not params:
        return torch.zeros(0, dtype=torch.int64)
    by_device: dict[torch.device, list[int]] = {}
    for place, param in enumerate(params):
        by_device.setdefault(param.device, []).append(place)
    home = max(by_device, key=lambda device: (device.type != "cpu", -(device.index or 0)))
    parts = [torch.stack([_checksum(params[place]) for place in places]) for places in by_device.values()]
    order = torch.tensor([place for places in by_device.values() for place in places])
    together = torch.cat([part.to(home, non_blocking=True) for part in parts])
    return together[torch.argsort(order).to(home, non_blocking=True)]


def _checksum(param: Tensor) -> Tensor:
    """A 0-dim int64 that depends on every bit and its place, computed where the parameter is."""
    flat = bytes_of(param.contiguous())
    width = next(size for size in (8, 4, 2, 1) if flat.numel() % size == 0)
    if flat.storage_offset() % width:  # a view at an odd place in a larger buffer
        flat = flat.clone()
    words = flat.view(_INTEGERS[width])
    total = torch.zeros((), dtype=torch.int64, device=param.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=param.device)
        # An odd factor per place loses no bit; the shift lets the high bits reach the low ones.
        mixed = (part ^ (part >> 29)) * (places * 0x9E3779B97F4A7C1 + 1).mul_(2).add_(1)
        total += (mixed ^ (mixed >> 32)).sum()
    return total
