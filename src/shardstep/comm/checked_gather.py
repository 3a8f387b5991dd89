"""Reading something of all ranks' gradients: a norm, a flag for infs. Every rank has to ask, for the same.

A rank that asks alone waits for the others until the process group gives up; then the error says who did not ask. If
the others ask for something else at that moment, their answers would be mixed up; so on the CPU every answer comes with
what it is for. (On an accelerator the host would have to wait for that.)
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import Group


class CheckedGather:
    """Where the ranks of one optimizer read what they hold together."""

    def __init__(self, group: Group, consensus: RankConsensus) -> None:
        self._group, self._consensus = group, consensus

    @property
    def rank(self) -> int:
        return self._group.rank

    def gather(self, what: str, value: Tensor) -> Tensor:
        """Collective: call on every rank of the group, with the same ``what``. Everybody's ``value`` (0-dim), by rank.

        RuntimeError, which names the ranks that did not ask, if some did not.
        """
        if self._group.world_size == 1:
            return value.view(1)
        if value.device.type != "cpu":
            return self._gather(what, value.view(1)).view(-1)
        purpose = torch.tensor(zlib.crc32(what.encode()), dtype=torch.float64)
        rows = self._gather(what, torch.stack([purpose, value.double()]))
        if (rows[:, 0] != purpose).any():
            self._consensus.check_equal("reading a sharded gradient", [("call", {"read": what})])
        return rows[:, 1].to(value.dtype)

    def gather_rows(self, what: str, row: Tensor) -> Tensor:
        """Like ``gather``, but with several values each: everybody's ``row`` (1D), stacked by rank."""
        if self._group.world_size == 1:
            return row.unsqueeze(0)
        if row.device.type == "cpu":  # rows of different lengths must not meet: gloo ends the process
            self.gather(what, row.new_zeros(()))
        return self._gather(what, row)

    def _gather(self, what: str, row: Tensor) -> Tensor:
        try:
            return collectives.all_gather_rows(self._group, row)
        except RuntimeError as error:
            raise RuntimeError(self._consensus.explain_absence(what, error)) from error
