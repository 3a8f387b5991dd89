"""Gradients that we reduce inside DDP's hook, and of which a rank keeps its share (``reduce_scatter_hook``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from shardstep.comm.consensus import RankConsensus
from shardstep.grads.attendance import Attendance
from shardstep.grads.ddp_buckets import HookState, ParameterUsage
from shardstep.grads.ddp_scheduler import DdpScheduler
from shardstep.grads.reduced_gradients import ReducedGradients
from shardstep.grads.settings import ReduceSettings
from shardstep.params.sharded_parameters import ShardedParameters


class Feed(Protocol):
    """Who hands over DDP's buckets (``ddp_feed.py``)."""

    def check_params(self, params: Sequence[Tensor]) -> None:
        """ValueError if these are no parameters of the DDP module, or another optimizer has them."""

    def forget_buckets(self) -> None:
        """Parameters were added."""

    def tensors(self) -> list[Tensor]:
        """The memory of DDP's buckets."""


class DdpReducedGradients(ReducedGradients):
    """Sharded gradients under DDP. The step is made by ``step``, or with a stepping hook in backward."""

    reduces_in_ddp = True
    _scheduler: DdpScheduler  # type: ignore[assignment]

    def __init__(
        self,
        sharded: ShardedParameters,
        consensus: RankConsensus,
        attendance: Attendance,
        usage: ParameterUsage | None = None,
        hook: HookState = HookState.NONE,
    ) -> None:
        """Collective. ``hook``: of the step in backward; ``usage``: finds out for it which parameters are used."""
        settings = ReduceSettings(find_unused=usage is not None)
        super().__init__(sharded, consensus, settings, attendance, broadcasts=False)
        self._usage = usage
        self._hook = hook
        self._scheduler.steps_in_backward = hook is not HookState.NONE
        self.feed: Feed | None = None

    def _make_scheduler(self) -> DdpScheduler:
        return DdpScheduler(self._sharded, self._shards, self._reducer, self._settings, self._attendance)

    # --- for DDP's hook -------------------------------------------------------------------------------------------

    def begin(self, has_inputs: bool) -> None:
        """Collective. DDP hands over its first bucket; ``has_inputs``: of a backward of this rank."""
        if not self._sharded.lies_as_placed():
            raise RuntimeError(
                "reduce_scatter_hook expects parameters that lie in memory as they did when DDP was built, but a "
                "memory format was changed. Wrap the model in DDP again."
            )
        if has_inputs:
            self._scheduler.begin()
        else:
            with self._consensus.reporting("reduce_scatter_hook"):
                self._scheduler.begin_without_inputs()

    def take(self, gradients: Iterable[tuple[int, Tensor]], has_inputs: bool) -> None:
        """Collective. DDP has the gradients of these parameters, of this rank alone."""
        if has_inputs:
            self._scheduler.take((index, gradient if self._is_used(index) else None) for index, gradient in gradients)
        else:
            self._scheduler.take_nothing(index for index, _ in gradients)

    def _is_used(self, index: int) -> bool:
        # (Without a step in backward nobody has to know before DDP does: see ``expose_deferred``.)
        return self._usage is None or self._usage.is_used_here(index)

    def take_last(self) -> None:
        """Collective. That was DDP's last bucket."""
        self._scheduler.take_last()

    def begin_forward(self) -> None:
        """DDP has rebuilt its buckets, if it wanted to: what it has put on the parameters is of no use."""
        self._shards.restore_displaced()

    def end_backward(self) -> None:
        """DDP is done with the gradients on the parameters."""
        self._shards.expose_deferred()

    @property
    def divisor(self) -> int:
        """By which sums of this round are divided."""
        return self._scheduler.divisor or self._sharded.group.world_size

    # --- for a step in backward -----------------------------------------------------------------------------------

    @property
    def steps_in_backward(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.CALLED

    @property
    def may_step_in_backward(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.MADE

    def called(self) -> None:
        """DDP has called the stepping hook."""
        if self._hook is HookState.NONE:
            raise AssertionError("a hook that was not made cannot be called")
        self._hook = HookState.CALLED

    def reduced(self) -> Sequence[int]:
        """The buckets that were reduced in this backward, in order. The same on every rank."""
        return self._scheduler.reduced()

    def bind_reduced(self, positions: Iterable[int]) -> None:
        """Give the pieces of buckets that were reduced their gradients, while others are under way."""
        for position in positions:
            self._shards.bind(position)

    def check_complete(self) -> None:
        """RuntimeError if DDP has not handed over a gradient. (It raises when the last bucket comes.)"""

    def stepped(self) -> None:
        super().stepped()
        if self._usage is not None:
            self._usage.forget()

    # --- for the user ---------------------------------------------------------------------------------------------

    def extend(self) -> None:
        super().extend()
        if self._usage is not None:
            self._usage.extend()
        if self.feed is not None:
            self.feed.forget_buckets()

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        raise RuntimeError("no_sync expects an optimizer with shard_gradients=True. Under DDP use no_sync of DDP.")

    def clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        if self._hook is not HookState.NONE:
            raise RuntimeError(
                "clip_grad_norm_ expects gradients that were not used yet, but with a stepping hook the step is made "
                "during backward. Use shardstep.shard_ddp_gradients without a stepping hook to clip."
            )
        return super().clip(params, max_norm, order, error_if_nonfinite)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(self.feed.tensors() if self.feed is not None else [])]

    def check_params(self, params: Iterable[Any]) -> None:
        if self.feed is not None:
            self.feed.check_params(list(params))

    def check_copyable(self) -> None:
        raise RuntimeError(
            "a copy expects an optimizer that takes gradients from its parameters, but this one takes them from DDP's "
            "hook. Copy its state dict instead."
        )
