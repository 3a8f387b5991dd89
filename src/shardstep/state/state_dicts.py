"""The state half of ZeroRedundancyOptimizer: collecting it, state dicts, and loading them.

[Note: what state_dict returns]
Nothing tells state_dict who calls it: torch.save, DCP and frameworks all do. So it answers all of them alike, and
every rank gives the same kind of answer. After consolidate_state_dict one rank has everything and the others nothing;
otherwise each rank has its pieces. If one rank gave DCP the whole and another one a piece, DCP would find chunks that
overlap.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm import collectives
from shardstep.comm.codec import decode_options, encode_options
from shardstep.comm.consensus import RankConsensus
from shardstep.params.local_optimizer import options_of
from shardstep.params.progress import Progress
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.state import named, plain
from shardstep.state.collect import collect, describe
from shardstep.state.master_weights import with_masters
from shardstep.state.names import names_of
from shardstep.state.status import Status
from shardstep.state.view import StateView


class Core(Protocol):
    """The engine, as far as the state needs it."""

    sharded: ShardedParameters
    consensus: RankConsensus
    progress: Progress

    def wait_for_parameters(self) -> None: ...

    def check_not_broken(self, call: str) -> None: ...

    def load_masters(self, masters: Mapping[int, Tensor], alone: Collection[int]) -> None: ...


class ShardedOptimizer(Optimizer):
    """An optimizer whose state lies on many ranks. ``ZeroRedundancyOptimizer`` is one that also steps."""

    optim: Optimizer  # the local optimizer
    rank: int
    world_size: int
    engine: Core
    _status: Status  # everything that changes: methods set no attributes, see status.py

    def consolidate_state_dict(self, to: int = 0, *, chunk_mb: float = 16) -> None:
        """Collect the full state on the CPU of rank ``to``, where ``state_dict`` returns it until the next change.

        Collective: call on every rank of the group. Other ranks that collected the same state before keep it. No rank
        holds more than two chunks of ``chunk_mb`` MiB besides its state and, on rank ``to``, the result.
        """
        sharded = self.engine.sharded
        self.engine.check_not_broken("consolidate_state_dict")
        with self.engine.consensus.reporting("consolidate_state_dict"):
            if not isinstance(to, int) or not 0 <= to < self.world_size:
                raise ValueError(
                    f"to expects a rank of the process group, from 0 to {self.world_size - 1}, but got {to!r}. "
                    "Leave it out for 0."
                )
            if not isinstance(chunk_mb, (int, float)) or not chunk_mb > 0:
                raise ValueError(f"chunk_mb expects a size above 0 in MiB but got {chunk_mb!r}. Leave it out for 16.")
            described = describe(sharded.pieces, sharded.layout, with_masters(sharded, self.optim.state))
        self.engine.consensus.check_equal(
            "consolidate_state_dict", [("argument", {"to": str(to), "chunk_mb": str(chunk_mb)})]
        )
        chunk = max(int(chunk_mb * 2**20), 1)
        with self.engine.consensus.reporting("consolidate_state_dict"):
            states = self._collect(described, to, chunk)
            self._bring_options(to)
        self.engine.consensus.check_equal("consolidate_state_dict", [("outcome", {"done": "True"})])
        if self.rank == to:
            states.update((key, value) for key, value in self.optim.state.items() if not isinstance(key, Tensor))
        self._status.collected(to, states)

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The state in torch's plain form: ``{"state": {0: {...}}, "param_groups": [...]}``.

        Not collective. After ``consolidate_state_dict(to)``, until the next change, rank ``to`` gets the whole state,
        loadable by the plain optimizer and at any number of ranks, and the other ranks empty entries. Otherwise every
        rank gets its own pieces, as ``StateShard``s: for ``torch.distributed.checkpoint``, or to load them back here.
        A dict that lacks other ranks' state refuses to be pickled, so that no file is written by mistake.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._form()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict in torch's plain form, from this class or the plain optimizer, saved at any world size.

        Collective: call on every rank of the group, with the same full dict, which is not changed. Each rank takes
        copies of its pieces. If it fails on a rank it fails on all, and nothing is changed anywhere.
        """
        self.engine.check_not_broken("load_state_dict")
        self.engine.progress.copies.wait()
        with self.engine.consensus.reporting("load_state_dict"):
            state_dict = copy.copy(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, state_dict)
                state_dict = state_dict if changed is None else changed
            loaded = plain.load_local(state_dict, self.param_groups, self.engine.sharded, self.optim)
        try:
            self.engine.consensus.check_equal("load_state_dict", plain.facts_of(state_dict))
        except BaseException:
            loaded.undo()
            raise
        self.engine.sharded.masters.complete_options(self.optim.param_groups)
        plain.load_options(state_dict["param_groups"], self.param_groups, self.optim.param_groups)
        self._status.changed(has_state=self._anywhere(loaded.found))
        self.engine.load_masters(*loaded.masters)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _form(self) -> dict[str, Any]:
        """See [Note: what state_dict returns]."""
        sharded, status = self.engine.sharded, self._status
        if status.snapshot is not None and self.rank in status.snapshot.to:
            return plain.plain_form(self.param_groups, status.snapshot.states)
        if status.snapshot is not None:
            form = plain.StateDict(plain.plain_form(self.param_groups, {index: {} for index in sharded.params}))
            form.lacks, form.is_elsewhere = _elsewhere(status.snapshot.to), True
            return form
        self.engine.progress.copies.wait()  # the caller may load into it
        entries = named.sharded_states(sharded, self.optim, blanks=True, shards=self.world_size > 1)
        states: dict[Any, Any] = {index: entries.get(index, {}) for index in sharded.params}
        states.update((key, value) for key, value in self.optim.state.items() if not isinstance(key, Tensor))
        form = plain.StateDict(plain.plain_form(self.param_groups, states))
        if status.has_state and self.world_size > 1:
            form.lacks = _not_collected(status.recipient)
        return form

    def sharded_state_dict(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """The state by parameter name, in pieces, for ``torch.distributed.checkpoint``: to save, or to load into.

        ``{"state": {name: {...}}, "param_groups": [...]}``; its tensors are ``StateShard``s over this rank's memory, in
        the shape of the whole. Not collective. A parameter without state gets a place to load into, of which only a
        mark is saved. After ``dcp.load`` give the dict to ``load_sharded_state_dict``. A checkpoint that lacks masters
        which this optimizer keeps needs ``DefaultLoadPlanner(allow_partial_load=True)``.

        Args:
            model: whose names to use; without it those that the optimizer was built with, or positions.
        """
        names = names_of(self.param_groups, model)
        self.engine.progress.copies.wait()  # the caller may load into it
        return named.named_form(self.param_groups, names, self.engine.sharded, self.optim, blanks=True)

    def load_sharded_state_dict(
        self, state_dict: dict[str, Any], model: torch.nn.Module | None = None, strict: bool = True
    ) -> None:
        """Load what ``sharded_state_dict`` returned and ``dcp.load`` filled, or the same form with whole tensors.

        Collective: call on every rank of the group. State follows the parameters' names. If it fails on a rank it fails
        on all, and nothing is changed anywhere.

        Args:
            model: whose names to use; as in ``sharded_state_dict``.
            strict: ValueError if the names differ. Otherwise what is missing starts empty and the rest is ignored.
        """
        call = "load_sharded_state_dict"
        self.engine.check_not_broken(call)
        self.engine.progress.copies.wait()
        with self.engine.consensus.reporting(call):
            names = names_of(self.param_groups, model)
            parts = named.loadable(state_dict, self.param_groups, names, self.engine.sharded, strict)
            loaded = plain.load_pieces(*parts, self.engine.sharded, self.optim)
        try:
            self.engine.consensus.check_equal(call, plain.facts_of({"param_groups": parts.options, "state": {}}))
        except BaseException:
            loaded.undo()
            raise
        self.engine.sharded.masters.complete_options(self.optim.param_groups)
        plain.load_options(parts.options, self.param_groups, self.optim.param_groups)
        self._status.changed(has_state=self._anywhere(loaded.found))
        self.engine.load_masters(*loaded.masters)

    def _anywhere(self, found: bool) -> bool:
        """Whether any rank has found state: one may own nothing of what the others have. Collective."""
        if self.world_size == 1:
            return found
        return any(row[0] for row in collectives.all_gather_ints(self.engine.sharded.group, [found]))

    def full_state(self, param: Tensor) -> dict[str, Any]:
        """One parameter's full state, on the CPU of every rank.

        Collective: call on every rank of the group, with the same parameter.
        """
        sharded = self.engine.sharded
        self.engine.check_not_broken("full_state")
        index = self._index_of(param, "full_state")
        with self.engine.consensus.reporting("full_state"):
            state = with_masters(sharded, self.optim.state, only=index)
            described = describe(sharded.pieces, sharded.layout, state, only=index)
        self.engine.consensus.check_equal("full_state", [("argument", {"param": sharded.layout.spec_of[index].label})])
        states = self._collect(described, to=None)
        return states.get(index, {})

    def _index_of(self, param: Any, call: str) -> int:
        with self.engine.consensus.reporting(call):
            index = self.engine.sharded.index_of.get(param) if isinstance(param, Tensor) else None
            if index is None:
                found = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
                raise ValueError(
                    f"{call} expects a parameter of this optimizer but got {found} that is in none of its groups. "
                    "Pass one of model.parameters()."
                )
            return index

    def _collect(self, described: Any, to: int | None, chunk_bytes: int = 2**24) -> dict[Any, Any]:
        sharded = self.engine.sharded
        return collect(
            self.engine.sharded.group,
            sharded.layout,
            described,
            to=to,
            chunk_bytes=chunk_bytes,
            find_class=sharded.find_state_class,
        )

    def _bring_options(self, to: int | None) -> None:
        """Bring a group's options to ranks without a piece of it: some optimizers write nothing into an empty group."""
        for position, owners in enumerate(self.engine.sharded.group_owners()):
            lacks = len(owners) < self.world_size if to is None else to not in owners
            if not owners or not lacks:
                continue
            options = {} if self.rank != owners[0] else options_of(self.optim.param_groups[position])
            received = collectives.move_json(self.engine.sharded.group, encode_options(options), owners[0], to)
            if received is not None and self.rank not in owners:
                # What users gave is the same on every rank.
                users = self.defaults.keys() | self.engine.sharded.builder.given_options(position)
                found = {key: value for key, value in decode_options(received).items() if key not in users}
                self.optim.param_groups[position].update(found)
                self.param_groups[position].update(
                    (key, value) for key, value in found.items() if key not in self.engine.sharded.builder.notes
                )

    @property
    def state(self) -> StateView:  # type: ignore[override]
        """The local optimizer's state, keyed by the user's parameters. Reads and writes go through.

        Every parameter has an entry on every rank, empty where this rank owns nothing of it. Of a cut parameter the
        entry is the state of this rank's piece; ``full_state`` gives the whole.
        """
        assert self._status.view is not None
        return self._status.view

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        status: Status | None = getattr(self, "_status", None)
        view = status.view if status is not None else None
        if view is None:  # torch's constructor, before there is a local optimizer
            return
        view.clear()
        for key, entry in value.items():
            if entry:
                view[key] = entry

    # --- inside ---------------------------------------------------------------------------------------------------

    def _set_up_state(self) -> None:
        """Called when the optimizer is built or copied, after it has its engine."""
        self._status = Status(self.engine.progress)
        self._expose_state()

    def _expose_state(self) -> None:
        sharded = self.engine.sharded
        owned = {sharded.given[index]: tensor for index, tensor in sharded.pieces.tensors.items()}
        self._status.view = StateView(self._all_params, owned, self.optim, self.engine.progress)

    @property
    def saves(self) -> dict[str, Any]:
        """What ``shardstep.checkpoint`` keeps about this optimizer; no part of the API."""
        return self._status.saves

    @property
    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def _elsewhere(ranks: Sequence[int]) -> str:
    have = " and ".join(f"rank {rank}" for rank in ranks)
    return (
        f"This state dict did not receive the state, which was consolidated to {have}. Use the dict that state_dict() "
        f"returns there: save it on {have} only, and load that one on every rank."
    )


def _not_collected(recipient: int) -> str:
    """Why this dict is not to be written to a file, and what to do instead."""
    lines = [
        "A state dict with this rank's pieces only cannot be pickled: the file would lack the other ranks' state. "
        f"Call optimizer.consolidate_state_dict(to={recipient}) on every rank first, and save on rank {recipient}, "
        "which alone gets the whole state. Or save without collecting it: shardstep.checkpoint.save."
    ]
    if "accelerate" in sys.modules:
        lines.append("Accelerate: shardstep.integrations.accelerate.consolidate_when_saving(accelerator, optimizer).")
    if "transformers" in sys.modules:
        lines.append("Trainer: trainer.add_callback(shardstep.integrations.transformers.ShardstepCallback()).")
    return " ".join(lines)
