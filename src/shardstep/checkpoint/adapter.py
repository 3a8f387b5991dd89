"""Optimizers as checkpoints see them: who holds which piece of whose state, with whom to compare, how to load.

The sharded optimizer is one on every rank of its group; a plain ``torch.optim`` optimizer is alone and holds all.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardstep.comm import process_group
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import Group
from shardstep.comm.rank_groups import RankGroups, one_dimension
from shardstep.comm.streams import Mark
from shardstep.layout.specs import Layout
from shardstep.params import groups
from shardstep.params.builder import blank_state
from shardstep.params.local_optimizer import options_of
from shardstep.params.master_modes import can_be_master
from shardstep.params.pieces import whole_pieces
from shardstep.state.dicts import ShardedOptimizer, load_local, unwrapped
from shardstep.state.names import from_named, names_of
from shardstep.state.subclasses import classes_in, name_of

logger = logging.getLogger(__name__)

# The attribute of a plain optimizer in which its checkpoints keep what belongs to them.
_KEPT = "shardstep_checkpoint"


class OptimizerAdapter(Protocol):
    """One optimizer, on this rank."""

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""

    @property
    def local(self) -> Optimizer:
        """The optimizer that holds the state."""

    @property
    def held(self) -> Any: ...

    @property
    def ranks(self) -> RankGroups:
        """Who shares the state, and who holds the same."""

    @property
    def group(self) -> Group:
        """All ranks that save and load together."""

    @property
    def consensus(self) -> RankConsensus: ...

    @property
    def kept(self) -> dict[str, Any]:
        """What checkpoints keep with the optimizer.

        "pending" is the save in the background; "side" is how the ranks compare meanwhile.
        """

    @property
    def failure(self) -> str:
        """How the last step failed half-way; empty if it did not."""

    def finish_gathers(self) -> None:
        """Wait for the parameters: with lazy gathers some may be on their way."""

    def hold_state(self, copies: Sequence[Mark]) -> None:
        """Whatever changes the state, on the device, comes after these copies of it."""

    def load(self, form: dict[str, Any], model: Module | None, strict: bool) -> None:
        """Load a state dict by name."""


def adapter_of(optimizer: Any) -> OptimizerAdapter:
    """The adapter of an optimizer, also inside the wrappers of frameworks. TypeError for anything else."""
    optimizer = unwrapped(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        return ShardedAdapter(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer expects a ZeroRedundancyOptimizer or a torch.optim.Optimizer but got "
            f"{type(optimizer).__qualname__}. Pass the optimizer itself, not its state dict."
        )
    return PlainAdapter(optimizer)


class ShardedAdapter:
    """A ``ZeroRedundancyOptimizer``."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self.local = optimizer.optim
        self.held = optimizer.engine.sharded
        self.ranks = optimizer.engine.sharded.ranks
        self.group = self.ranks.everyone
        self.consensus = optimizer.engine.consensus
        self.kept = optimizer.saves

    @property
    def failure(self) -> str:
        return self.optimizer.engine.progress.failure

    def finish_gathers(self) -> None:
        self.optimizer.engine.wait_for_parameters()

    def hold_state(self, copies: Sequence[Mark]) -> None:
        progress = self.optimizer.engine.progress
        progress.copies.add(copies)
        if progress.is_captured:
            progress.copies.wait()

    def load(self, form: dict[str, Any], model: Module | None, strict: bool) -> None:
        self.optimizer.load_sharded_state_dict(form, model, strict)


class PlainAdapter:
    """An optimizer of torch or another package, which holds all state by itself."""

    failure = ""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = self.local = optimizer
        self.held = WholeParameters(optimizer)
        self.ranks = one_dimension(process_group.alone())
        self.group = self.ranks.everyone
        self.consensus = RankConsensus(self.group)

    @property
    def kept(self) -> dict[str, Any]:
        return vars(self.optimizer).setdefault(_KEPT, {})

    def finish_gathers(self) -> None:
        pass

    def hold_state(self, copies: Sequence[Mark]) -> None:
        for copy_made in copies:  # nobody tells us when it steps
            copy_made.wait()

    def load(self, form: dict[str, Any], model: Module | None, strict: bool) -> None:
        names = names_of(self.optimizer.param_groups, model)
        held: Any = self.held
        loadable = from_named(form, self.optimizer.param_groups, names, held, strict)
        self.held.take_masters(load_local(loadable, held, self.optimizer).masters)


class WholeParameters:
    """The parameters of a plain optimizer: every piece is whole, and here. Its own builder, too."""

    has_eager_state = False  # not needed: a plain optimizer has made its state already

    def __init__(self, optimizer: Optimizer) -> None:
        param_groups = optimizer.param_groups
        for param in (param for group in param_groups for param in group["params"]):
            if hasattr(param, "device_mesh"):
                raise TypeError(
                    f"checkpoint expects plain tensors but got a {type(optimizer).__qualname__} over DTensors, of "
                    "which this rank has a part. Use torch.distributed.checkpoint with get_optimizer_state_dict."
                )
        self._optimizer = optimizer
        found = groups.specs_of(param_groups, ["tensor"] * len(param_groups), [])
        self.layout = Layout(1, tuple(spec for spec, _ in found.values()))
        self.given: dict[int, Tensor] = {index: param for index, (_, param) in found.items()}
        index_of = {param: index for index, param in self.given.items()}
        self.indices = [[index_of[param] for param in group["params"]] for group in param_groups]
        self.pieces = whole_pieces(self.given)
        self.builder = self

    def group_owners(self) -> list[list[int]]:
        return [[0] for _ in self.indices]

    def given_options(self, position: int) -> dict[str, Any]:
        return options_of(self._optimizer.param_groups[position])

    def fresh_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """A copy of the user's without its state: the arguments that it was built with are not known."""
        twin = object.__new__(type(self._optimizer))
        left = ("state", "param_groups", _KEPT)
        kept = {key: value for key, value in vars(self._optimizer).items() if key not in left}
        vars(twin).update(copy.deepcopy(kept), state=defaultdict(dict), param_groups=list(param_groups))
        return twin

    def blank_state(self, index: int, param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return blank_state(self.fresh_optimizer, self.layout.spec_of[index], self.given[index], param_groups)

    def master_weights(self, only: int | None = None) -> dict[int, Tensor]:
        return {}  # its parameters are what it steps

    def keeps_master(self, index: int) -> bool:
        return False

    def take_masters(self, masters: Mapping[int, Tensor]) -> None:
        """Masters of a sharded optimizer were loaded: float32 parameters are what they were kept for."""
        lacking = [index for index in masters if not can_be_master(self.given[index].dtype)]
        with torch.no_grad():
            for index in masters.keys() - set(lacking):
                self.given[index].copy_(masters[index])
        if lacking:
            label = self.layout.spec_of[lacking[0]].label
            logger.warning(
                "checkpoint.load: the checkpoint has float32 masters, but %s is %s, so they are left out. Convert the "
                "model to float32 first, or use ZeroRedundancyOptimizer(master_weights=...).",
                label,
                self.layout.spec_of[lacking[0]].dtype,
            )

    def find_state_class(self, index: int, name: str) -> type | None:
        known = {name_of(kind): kind for kind in classes_in(list(self._optimizer.state.values()))}
        if name not in known:
            try:
                blank = self.blank_state(index, self._optimizer.param_groups)
            except Exception:  # it cannot step a blank: then no class is known
                return None
            known.update((name_of(kind), kind) for kind in classes_in(blank))
        return known.get(name)
