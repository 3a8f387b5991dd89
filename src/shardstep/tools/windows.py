"""A saved tensor, read a window at a time: no more than that is in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.checkpoint.storage.torch_file import WINDOW_BYTES
from shardstep.state.shards import shard_of_range, shard_of_whole

_GLANCE = 1024  # elements


def windows_of(checkpoint: Checkpoint, fqn: str, first: int | None = None) -> Iterator[Tensor]:
    """The elements in their order, in flat windows of one buffer. ``first``: so many in the first one."""
    found = checkpoint.tensor_at(fqn)
    assert found is not None
    shape, dtype = found
    count, most = math.prod(shape), max(WINDOW_BYTES // dtype.itemsize, 1)
    buffer = torch.empty(min(most, count), dtype=dtype)
    start = 0
    while start < count:
        stop = min(start + (first if start == 0 and first else most), count)
        window = buffer[: stop - start]
        whole = start == 0 and stop == count
        shard = shard_of_whole(window.view(shape)) if whole else shard_of_range(shape, start, stop, window)
        checkpoint.read_into({fqn: shard})
        yield window
        start = stop


def have_equal_bits(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Whether two saved 16-bit tensors have the same shape, dtype and bits. If not, a glance at both is enough."""
    if checkpoint.tensor_at(one) != checkpoint.tensor_at(other):
        return False
    pairs = zip(windows_of(checkpoint, one, _GLANCE), windows_of(checkpoint, other, _GLANCE), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def is_constant(checkpoint: Checkpoint, fqn: str) -> bool:
    """Whether a saved 16-bit tensor is one number, or many of the same. If not, a glance is enough."""
    first: Tensor | None = None
    for window in windows_of(checkpoint, fqn, _GLANCE):
        bits = window.view(torch.int16)
        first = bits[0].clone() if first is None else first
        if (bits != first).any():
            return False
    return True
