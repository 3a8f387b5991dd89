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
        return self.gather_rows(what, value.view(1)).reshape(-1)

    def gather_rows(self, what: str, row: Tensor) -> Tensor:
        """Like ``gather``, but with several values each: everybody's ``row`` (1D), stacked by rank."""
        if self._group.world_size == 1:
            return row.unsqueeze(0)
        checked = row.device.type == "cpu"
        purpose = torch.tensor([float(zlib.crc32(what.encode()))], dtype=torch.float64)
        try:
            rows = collectives.all_gather_rows(self._group, torch.cat([purpose, row.double()]) if checked else row)
        except RuntimeError as error:
            raise RuntimeError(self._consensus.explain_absence(what, error)) from error
        if not checked:
            return rows
        if (rows[:, 0] != purpose).any():
            self._consensus.check_equal("reading a sharded gradient", [("call", {"read": what})])
        return rows[:, 1:].to(row.dtype)
