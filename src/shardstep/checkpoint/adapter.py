"""Optimizers as checkpoints see them: who holds which piece of whose state, with whom to agree, how to load.

The sharded optimizer is one on every rank of its group; a plain ``torch.optim`` optimizer is alone and holds all.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.nn import Module
from torch.optim import Optimizer

from shardstep.comm import collectives
from shardstep.comm.collectives import Group
from shardstep.comm.consensus import Board
from shardstep.layout.specs import Layout, Piece
from shardstep.params import groups
from shardstep.params.all_gather import Shard
from shardstep.params.local_optimizer import options_of
from shardstep.params.sharded_parameters import Placement
from shardstep.params.tensor_subclasses import classes_in, name_of
from shardstep.state import named, plain
from shardstep.state.names import names_of
from shardstep.state.state_dicts import ShardedState
from shardstep.state.status import Status
from shardstep.state.wrappers import unwrapped


class Holder(NamedTuple):
    """One optimizer, on this rank."""

    optimizer: Optimizer  # what the user has
    local: Optimizer  # what has the state
    placement: Placement
    group: Group
    board: Board
    load: Callable[[dict[str, Any], Module | None, bool], None]
    status: Status | None  # of a sharded optimizer

    def fail(self, call: str, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it failed."""
        self.board.fail(call, error)


class _Unsharded(Placement):
    """Where everything of a plain optimizer is: here."""

    def __init__(self, optimizer: Optimizer) -> None:
        param_groups = optimizer.param_groups
        for param in (param for group in param_groups for param in group["params"]):
            if hasattr(param, "device_mesh"):
                raise TypeError(
                    f"checkpoint expects plain tensors but got a {type(optimizer).__qualname__} over DTensors, of "
                    "which this rank has a part. Use torch.distributed.checkpoint with get_optimizer_state_dict."
                )
        found = groups.specs_of(param_groups, ["tensor"] * len(param_groups), [])
        self.layout = Layout(1, tuple(spec for spec, _ in found.values()))
        self.params = {index: param for index, (_, param) in found.items()}
        self.index_of = {param: index for index, param in self.params.items()}
        self.shard = Shard(0)
        self.shard.pieces = {index: Piece(index, 0, param.numel(), 0, 0, True) for index, param in self.params.items()}
        self.shard.tensors = dict(self.params)
        self.indices = [[self.index_of[param] for param in group["params"]] for group in param_groups]
        self._verdicts = []
        self._options = [options_of(group) for group in param_groups]
        self._state_classes = {name_of(kind): kind for kind in classes_in(list(optimizer.state.values()))}
        self._optimizer = optimizer
        self._optimizer_class, self._defaults = type(optimizer), dict(optimizer.defaults)  # type: ignore[assignment]

    def group_owners(self) -> list[list[int]]:
        return [[0] for _ in self.indices]

    def fresh_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """As configured as the user's: nobody knows with which arguments that was built."""
        twin = object.__new__(type(self._optimizer))
        kept = {key: value for key, value in vars(self._optimizer).items() if key not in ("state", "param_groups")}
        vars(twin).update(copy.deepcopy(kept), state=defaultdict(dict), param_groups=list(param_groups))
        return twin


def holder_of(optimizer: Any) -> Holder:
    """Through the wrappers of frameworks. TypeError for anything but an optimizer."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, ShardedState):
        return Holder(
            optimizer,
            optimizer.optim,
            optimizer._placed,
            optimizer._group,
            optimizer._board,
            optimizer.load_sharded_state_dict,
            optimizer._status,
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer expects a ZeroRedundancyOptimizer or a torch.optim.Optimizer but got "
            f"{type(optimizer).__qualname__}. Pass the optimizer itself, not its state dict."
        )
    placement = _Unsharded(optimizer)
    group = collectives.alone()

    def load(form: dict[str, Any], model: Module | None, strict: bool) -> None:
        names = names_of(optimizer.param_groups, model)
        parts = named.loadable(form, optimizer.param_groups, names, placement, strict)
        plain.load_pieces(*parts, placement, optimizer)

    return Holder(optimizer, optimizer, placement, group, Board(group), load, None)
