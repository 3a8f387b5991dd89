"""Which parameters any rank has used, where nothing is reported with a bucket: told once per round, and read later.

At the end of a round every rank sends a flag per parameter, on the gradients' device and beside everything else. The
host looks at what arrived when gradients are asked for (the step, clipping): the only time that it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.collectives import Handle
from shardstep.comm.process_group import Group
from shardstep.grads.native import Native


class _Flags(NamedTuple):
    """Of one round, under way."""

    indices: list[int]  # of the parameters
    mine: Tensor  # on the host, where they are copied from
    handle: Handle
    rows: Tensor  # by rank and parameter
    native: Native  # on whose stream they arrive


class UsageExchange:
    """The rounds of one optimizer whose flags were not read yet."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._round: list[tuple[int, bool]] = []  # of the round that is being sent: parameter, whether it was used here
        self._under_way: list[_Flags] = []

    def begin_round(self) -> None:
        self._round = []

    def add(self, indices: Sequence[int], here: Sequence[bool]) -> None:
        """A bucket is sent."""
        self._round.extend(zip(indices, here, strict=True))

    def end_round(self, native: Native, device: torch.device) -> None:
        """Collective. All buckets were sent: tell the other ranks, on ``device``, without waiting for them."""
        if not self._round:
            return
        indices, here = map(list, zip(*self._round, strict=True))
        self._round = []
        mine = torch.tensor(here, dtype=torch.uint8, pin_memory=native.enqueues)
        handle = Handle((), mine.unsqueeze(0))
        if self._group.world_size > 1:
            with native.on_stream():
                handle = collectives.gather_rows(self._group, mine.to(device, non_blocking=True))
                if native.enqueues:
                    handle.wait()
        assert handle.memory is not None, "it is gathered somewhere"
        self._under_way.append(_Flags(indices, mine, handle, handle.memory, native))

    def forget(self) -> None:
        """What was told is of no use any more."""
        self._under_way.clear()

    def read(self) -> set[int]:
        """The parameters that any rank has used since the last call. The host waits for what is under way."""
        used: set[int] = set()
        for flags in self._under_way:
            if not flags.native.enqueues:
                flags.handle.wait()
            with flags.native.on_stream():
                rows = flags.rows.cpu()
            anywhere = rows.amax(0).tolist()
            used.update(index for index, there in zip(flags.indices, anywhere, strict=True) if there)
        self._under_way.clear()
        return used
