"""transformers: a callback for ``Trainer``, which asks rank 0 alone for ``optimizer.state_dict()`` when it saves."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from transformers import TrainerCallback

from shardstep import ZeroRedundancyOptimizer, shard_ddp_gradients


class ShardstepCallback(TrainerCallback):
    """Collects the state of the optimizer on rank 0 before ``Trainer`` saves it.

    ``Trainer(..., callbacks=[ShardstepCallback()])``, on every rank, after callbacks that ask for a save themselves.

    Args:
        shard_gradients: also reduce gradients to their owners under the Trainer's DDP, as ``shard_ddp_gradients`` does.
    """

    def __init__(self, shard_gradients: bool = False) -> None:
        self._shard_gradients = shard_gradients

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Module | None = None, optimizer: Any = None, **others: Any
    ) -> None:
        """The model is wrapped and the optimizer loaded by now."""
        inner = _sharded(optimizer)
        if self._shard_gradients and args.world_size > 1:
            assert model is not None
            shard_ddp_gradients(model, inner)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        """Other callbacks have said by now whether this step is to be saved."""
        if control.should_save:
            _consolidate(args, optimizer)

    def on_epoch_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        if control.should_save:
            _consolidate(args, optimizer)

    def on_evaluate(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        """With ``save_strategy="best"`` what comes next may be a save, and nobody is told."""
        if args.save_strategy == "best" and optimizer is not None:
            _consolidate(args, optimizer)


def _sharded(optimizer: Any) -> ZeroRedundancyOptimizer:
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, ZeroRedundancyOptimizer):
        raise TypeError(
            "ShardstepCallback expects a Trainer with an optimizer of class shardstep.ZeroRedundancyOptimizer but got "
            f"a {type(inner).__qualname__}. Pass optimizer_cls_and_kwargs=(ZeroRedundancyOptimizer, {{...}}) to the "
            "Trainer, or drop the callback."
        )
    return inner


def _consolidate(args: Any, optimizer: Any) -> None:
    if not args.save_only_model:
        _sharded(optimizer).consolidate_state_dict(to=0)
