"""The update of a step on this rank: masters are opened, the local optimizer steps, masters are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from shardstep.params.local_optimizer import step_subset
from shardstep.params.sharded_parameters import ShardedParameters


class LocalUpdate:
    """Updates this rank's pieces: of one bucket, or of all."""

    def __init__(self, sharded: ShardedParameters, optimizer: Optimizer) -> None:
        self._sharded, self._optimizer = sharded, optimizer

    def prepare(self, whole: bool) -> None:
        """A step begins; ``whole``: it updates all buckets at once."""
        self._sharded.masters.arrange(self._sharded.plan.active_buckets, whole)

    def bucket(self, step: Callable[[], Any], position: int) -> None:
        """Step this rank's pieces of one bucket. ``step``: the optimizer's, see ``unhooked_step``."""
        subset = self._sharded.plan.subsets[position]
        if subset:
            with self._around([position]), step_subset(self._optimizer, subset):
                step()

    def whole(self, update: Callable[[], Any]) -> Any:
        """Do what changes this rank's pieces of all buckets at once."""
        with self._around(self._sharded.plan.active_buckets):
            return update()

    def switch(self, change: Callable[[], Any]) -> Any:
        """Like ``whole``, but it is no step."""
        result = self.whole(change)
        self._sharded.masters.changed(self._sharded.plan.active_buckets)  # also what is frozen
        return result

    def take_gradients(self) -> None:
        """In the middle of an update of all buckets a closure has made new gradients."""
        self._sharded.masters.take_gradients(self._sharded.plan.active_buckets)

    def publish(self) -> None:
        """Bring the parameters up to date with what the local optimizer has stepped so far, if that is masters."""
        self._sharded.masters.close(self._sharded.plan.active_buckets, self._optimizer.param_groups)

    def end(self) -> None:
        """All buckets were updated."""
        self._sharded.masters.count_step(self._optimizer.param_groups)

    @contextmanager
    def _around(self, positions: Sequence[int]) -> Iterator[None]:
        masters = self._sharded.masters
        masters.open(positions)
        try:
            yield
        finally:  # after an exception, too: masters are as far as the state is, and the parameters follow
            masters.close(positions, self._optimizer.param_groups)
