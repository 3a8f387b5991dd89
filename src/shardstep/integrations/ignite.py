"""Ignite: an object for ``Checkpoint``, which collects the state of torch's own sharded optimizer only."""

from __future__ import annotations

from typing import Any

from shardstep import ZeroRedundancyOptimizer


class Consolidated:
    """An optimizer as ``ignite.handlers.Checkpoint`` saves and loads it: ``{"optimizer": Consolidated(optimizer)}``.

    The file holds torch's plain form, which the optimizer itself loads, too.

    Args:
        optimizer: the sharded optimizer.
        save_on_rank: what ``Checkpoint`` was given as such.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, save_on_rank: int = 0) -> None:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                "Consolidated expects an optimizer of class shardstep.ZeroRedundancyOptimizer but got a "
                f"{type(optimizer).__qualname__}. Pass others to Checkpoint as they are."
            )
        self.optimizer, self.save_on_rank = optimizer, save_on_rank

    def state_dict(self) -> dict[str, Any]:
        """The whole state on ``save_on_rank``, and nothing elsewhere.

        Collective: call on every rank of the group, as ``Checkpoint`` does.
        """
        self.optimizer.consolidate_state_dict(to=self.save_on_rank)
        return self.optimizer.state_dict() if self.optimizer.rank == self.save_on_rank else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective: call on every rank of the group."""
        self.optimizer.load_state_dict(state_dict)
