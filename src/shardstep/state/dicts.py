"""State dicts in torch's plain form: collecting, returning and loading them. The state half of the optimizer.

[Note: what state_dict returns]
Nothing tells state_dict who calls it: torch.save, DCP and frameworks all do. So it answers all of them alike, and
every rank gives the same kind of answer. After consolidate_state_dict one rank has everything and the others nothing;
otherwise each rank has its pieces. If one rank gave DCP the whole and another one a piece, DCP would find chunks that
overlap.

[Note: loading]
Whatever form it has, state is first turned into a ``Loadable``: this rank's pieces by parameter index, and the options
of each group. The local optimizer loads that by its own rules. Then the ranks compare; if one of them failed, all undo.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm import collectives
from shardstep.comm.codec import decode_options, encode_options, live_option, option_text
from shardstep.engine import Engine
from shardstep.params.local_optimizer import inner_optimizers, options_of
from shardstep.params.option_facts import option_facts
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.state import names
from shardstep.state.collect import collect, describe
from shardstep.state.names import Loadable, names_of
from shardstep.state.shards import MASTER, filled, is_sharded, local_part, sharded_states, unkeyed, with_masters
from shardstep.state.view import StateView


class StateDict(dict[str, Any]):
    """A state dict that lacks state of other ranks, or has blanks: not to be written to a file as it is.

    What is inside is plain. ``lacks`` says what is missing and what to do; pickling raises it. Without it the dict
    is pickled as the empty form: no rank has state yet.
    """

    lacks = ""
    is_elsewhere = False  # other ranks have all of it

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self.lacks:
            raise RuntimeError(self.lacks)
        entries = {key: filled(entry) for key, entry in self["state"].items()}
        state = {key: entry for key, entry in entries.items() if entry}
        # An OrderedDict, because torch.load(weights_only=True) makes no other dict by its class.
        return OrderedDict, (), None, None, iter({**self, "state": state}.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDict:
        return self._twin({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def __copy__(self) -> StateDict:
        return self._twin(self)

    copy = __copy__  # type: ignore[assignment]

    def _twin(self, items: Mapping[str, Any]) -> StateDict:
        twin = StateDict(items)
        twin.lacks, twin.is_elsewhere = self.lacks, self.is_elsewhere
        return twin


# To another process of this rank, as dcp.async_save with AsyncCheckpointerType.PROCESS sends it. (See StateShard.)
ForkingPickler.register(StateDict, lambda state_dict: (dict, (dict(state_dict),)))


class ShardedOptimizer(Optimizer):
    """An optimizer whose state is spread over the ranks. ``ZeroRedundancyOptimizer`` is one that also steps.

    Methods set no attributes: Lightning's and Fabric's wrappers are of our class, and would keep them for themselves.
    What changes is in ``engine.progress``, which the wrapper and the optimizer inside share.
    """

    optim: Optimizer  # the local optimizer
    rank: int
    world_size: int
    engine: Engine
    saves: dict[str, Any]  # what shardstep.checkpoint keeps about this optimizer; no part of the API
    _view: StateView

    def consolidate_state_dict(self, to: int = 0, *, chunk_mb: float = 16) -> None:
        """Collect the full state on the CPU of rank ``to``, where ``state_dict`` returns it until the next change.

        Collective: call on every rank of the group. Other ranks that collected the same state before keep it. No rank
        holds more than two chunks of ``chunk_mb`` MiB besides its state and, on rank ``to``, the result.
        """
        sharded, call = self.engine.sharded, "consolidate_state_dict"
        self.engine.check_not_broken(call)
        with self.engine.consensus.reporting(call):
            if not isinstance(to, int) or not 0 <= to < self.world_size:
                raise ValueError(
                    f"to expects a rank of the process group, from 0 to {self.world_size - 1}, but got {to!r}. "
                    "Leave it out for 0."
                )
            if not isinstance(chunk_mb, (int, float)) or not chunk_mb > 0:
                raise ValueError(f"chunk_mb expects a size above 0 in MiB but got {chunk_mb!r}. Leave it out for 16.")
            described = describe(sharded.pieces, sharded.layout, with_masters(sharded, self.optim.state))
        self.engine.consensus.check_equal(call, [("argument", {"to": str(to), "chunk_mb": str(chunk_mb)})])
        with self.engine.consensus.reporting(call):
            states = self._collect(described, to, max(int(chunk_mb * 2**20), 1))
            self._bring_options(to)
        self.engine.consensus.check_equal(call, [("outcome", {"done": "True"})])
        if self.rank == to:
            states.update(unkeyed(self.optim.state))
        self.engine.progress.consolidated(to, states)

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
        state_dict = self._plain_form()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _plain_form(self) -> dict[str, Any]:
        """See [Note: what state_dict returns]."""
        sharded, progress = self.engine.sharded, self.engine.progress
        groups = _numbered_groups(self.param_groups)
        if self.rank in progress.consolidated_to:
            states = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in progress.states.items()}
            return {"state": states, "param_groups": groups}
        if progress.consolidated_to:
            form = StateDict(state={index: {} for index in sharded.params}, param_groups=groups)
            form.lacks, form.is_elsewhere = _elsewhere(progress.consolidated_to), True
            return form
        progress.copies.wait()  # the caller may load into it
        entries = sharded_states(sharded, self.optim, shards=self.world_size > 1)
        states = {index: entries.get(index, {}) for index in sharded.params}
        form = StateDict(state={**states, **unkeyed(self.optim.state)}, param_groups=groups)
        if progress.has_state and self.world_size > 1:
            form.lacks = _not_collected(progress.recipient)
        return form

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict in torch's plain form, from this class or the plain optimizer, saved at any world size.

        Collective: call on every rank of the group, with the same full dict, which is not changed. Each rank takes
        copies of its pieces. If it fails on a rank it fails on all, and nothing is changed anywhere.
        """

        def read() -> tuple[Loadable, list[tuple[str, dict[str, str]]]]:
            given = copy.copy(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, given)
                given = given if changed is None else changed
            _check_form(given, self.param_groups)
            return _from_plain(given, self.engine.sharded, self.optim), _facts_of(given)

        self._load("load_state_dict", read)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def sharded_state_dict(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        """The state by parameter name, in pieces, for ``torch.distributed.checkpoint``: to save, or to load into.

        ``{"state": {name: {...}}, "param_groups": [...]}``; its tensors are ``StateShard``s over this rank's memory, in
        the shape of the whole. Not collective. A parameter without state gets a place to load into, of which only a
        mark is saved. After ``dcp.load`` give the dict to ``load_sharded_state_dict``. A checkpoint that lacks masters
        which this optimizer keeps needs ``DefaultLoadPlanner(allow_partial_load=True)``.

        Args:
            model: whose names to use; without it those that the optimizer was built with, or positions.
        """
        known = names_of(self.param_groups, model)
        self.engine.progress.copies.wait()  # the caller may load into it
        return names.named_form(self.param_groups, known, self.engine.sharded, self.optim)

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

        def read() -> tuple[Loadable, list[tuple[str, dict[str, str]]]]:
            known = names_of(self.param_groups, model)
            loadable = names.from_named(state_dict, self.param_groups, known, self.engine.sharded, strict)
            return loadable, option_facts(loadable.options)

        self._load("load_sharded_state_dict", read)

    def _load(self, call: str, read: Callable[[], tuple[Loadable, list[tuple[str, dict[str, str]]]]]) -> None:
        """See [Note: loading]. ``read`` returns what to load, and facts that must be the same on every rank."""
        engine, sharded = self.engine, self.engine.sharded
        engine.check_not_broken(call)
        engine.progress.copies.wait()
        with engine.consensus.reporting(call):
            loadable, facts = read()
            loaded = load_local(loadable, sharded, self.optim)
        try:
            engine.consensus.check_equal(call, facts)
        except BaseException:
            loaded.undo()
            raise
        sharded.masters.complete_options(self.optim.param_groups)
        _adopt_options(loadable.options, self.param_groups, self.optim.param_groups)
        found = [loaded.found]  # one rank may own nothing of what the others have
        rows = collectives.all_gather_ints(sharded.group, found) if self.world_size > 1 else [found]
        engine.progress.changed(has_state=any(row[0] for row in rows))
        engine.load_masters(loaded.masters, loaded.alone)

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
        return self._collect(described, to=None).get(index, {})

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
        find_class = sharded.find_state_class
        return collect(sharded.group, sharded.layout, described, to=to, chunk_bytes=chunk_bytes, find_class=find_class)

    def _bring_options(self, to: int) -> None:
        """Bring the options of a group to a recipient without a piece of it: some optimizers write into them."""
        sharded = self.engine.sharded
        for position, owners in enumerate(sharded.group_owners()):
            if not owners or to in owners:
                continue
            options = options_of(self.optim.param_groups[position]) if self.rank == owners[0] else {}
            received = collectives.move_json(sharded.group, encode_options(options), owners[0], to)
            if self.rank == to:
                # What users gave is the same on every rank.
                users = self.defaults.keys() | sharded.builder.given_options(position)
                found = {key: value for key, value in decode_options(received).items() if key not in users}
                notes = sharded.builder.notes
                self.optim.param_groups[position].update(found)
                self.param_groups[position].update((key, found[key]) for key in found if key not in notes)

    @property
    def state(self) -> StateView:  # type: ignore[override]
        """The local optimizer's state, keyed by the user's parameters. Reads and writes go through.

        Every parameter has an entry on every rank, empty where this rank owns nothing of it. Of a cut parameter the
        entry is the state of this rank's piece; ``full_state`` gives the whole.
        """
        return self._view

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        view: StateView | None = getattr(self, "_view", None)
        if view is None:  # torch's constructor, before there is a local optimizer
            return
        view.clear()
        for key, entry in value.items():
            if entry:
                view[key] = entry

    @property
    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def _numbered_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with indices for parameters, counted over all groups; a parameter listed twice has its first."""
    numbers: dict[int, int] = {}
    packed, start = [], 0
    for group in param_groups:
        for position, param in enumerate(group["params"], start):
            numbers.setdefault(id(param), position)
        start += len(group["params"])
        packed.append({**group, "params": [numbers[id(param)] for param in group["params"]]})
    return packed


# --- loading --------------------------------------------------------------------------------------------------------


def _check_form(state_dict: Any, param_groups: Sequence[dict[str, Any]]) -> None:
    """Check that it is a full state dict for these groups."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"load_state_dict expects a dict but got {_text(state_dict)}. {_REMEDY}")
    if isinstance(state_dict, StateDict) and state_dict.is_elsewhere:
        raise ValueError(f"load_state_dict expects the full state on every rank. {state_dict.lacks}")
    if OLD_MARK in state_dict:
        raise ValueError(
            "load_state_dict expects the full state, but this dict was taken on a rank that did not receive it. "
            f"Load the one of rank {state_dict[OLD_MARK]}, to which the state was consolidated."
        )
    try:
        saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        states, saved_ids = (
            dict(state_dict["state"]),
            [i for group in state_dict["param_groups"] for i in group["params"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"load_state_dict expects a dict with 'state' and 'param_groups' but got {_text(dict(state_dict))}. It "
            "expects a dict under 'state'. Under 'param_groups' it expects a list of dicts with the key 'params'. "
            f"{_REMEDY}"
        ) from error
    sizes = [len(group["params"]) for group in param_groups]
    if len(sizes) != len(saved_sizes):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: expects {len(sizes)} but got "
            f"{len(saved_sizes)}. Build the optimizer with the same groups as the one that was saved."
        )
    for position, (size, saved_size) in enumerate(zip(sizes, saved_sizes, strict=True)):
        if size != saved_size:
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{position} expects {size} parameters but got {saved_size}. Build the optimizer with the same groups "
                "as the one that was saved."
            )
    wrong = [index for index in saved_ids if not isinstance(states.get(index, {}), Mapping)]
    if wrong:
        raise ValueError(
            f"load_state_dict expects a dict as the state of parameter {wrong[0]} but got {_text(states[wrong[0]])}. "
            f"{_REMEDY}"
        )


_REMEDY = "Pass what state_dict() returned."
OLD_MARK = "shardstep_full_state_at_rank"  # in dicts that 0.2 returned on ranks without the full state


def _text(value: Any) -> str:
    return f"a {type(value).__qualname__} ({str(value)[:60]})"


def _from_plain(state_dict: Mapping[str, Any], held: ShardedParameters, optimizer: Optimizer) -> Loadable:
    """This rank's pieces of a state dict in torch's plain form."""
    states, saved_groups = state_dict["state"], state_dict["param_groups"]
    saved_ids = [saved_id for group in saved_groups for saved_id in group["params"]]
    entries = {}
    for index, piece in held.pieces.pieces.items():
        entry, spec = filled(states.get(saved_ids[index])), held.layout.spec_of[index]
        if entry:
            entries[index] = local_part(entry, spec, piece, partial(held.find_state_class, index), "of the loaded dict")
        elif entry is not None and held.given[index].requires_grad and held.blank_state(index, optimizer.param_groups):
            raise ValueError(_EMPTY.format(spec.label))
    others = {key: value for key, value in states.items() if key not in set(saved_ids)}
    return Loadable(entries, others, [{k: v for k, v in group.items() if k != "params"} for group in saved_groups])


_EMPTY = (
    "load_state_dict expects the state of {}, but its entry is empty, although the optimizer makes state for it. Was "
    "the dict consolidated to another rank, or given to set_optimizer_state_dict in flattened form before the first "
    "step? Use the dict of the rank that has the state; or a dict that is not flattened; or shardstep.checkpoint."
)


class Loaded(NamedTuple):
    """What was loaded into a local optimizer."""

    undo: Callable[[], None]
    found: bool  # whether there was any state for this rank
    masters: dict[int, Tensor]  # that came with it, of this rank's pieces
    alone: set[int]  # parameters whose master came with no other state


def load_local(loadable: Loadable, held: ShardedParameters, optimizer: Optimizer) -> Loaded:
    """Load this rank's pieces into the local optimizer, by its own rules. The masters are left to the caller.

    If it raises, the optimizer is as it was.
    """
    entries, masters, alone = dict(loadable.entries), dict[int, Tensor](), set[int]()
    for index in [index for index, entry in entries.items() if isinstance(entry, Mapping) and MASTER in entry]:
        rest = dict(entries.pop(index))
        masters[index] = rest.pop(MASTER)
        _check_master(masters[index], held, index)
        if rest:
            entries[index] = rest
        else:
            alone.add(index)
    before = optimizer.state, optimizer.param_groups
    attributes = dict(vars(optimizer))

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.state, optimizer.param_groups = before

    try:
        optimizer.load_state_dict(_numbered(entries, loadable, held, optimizer))
        _complete(optimizer, held)
    except BaseException:
        undo()
        raise
    return Loaded(undo, bool(loadable.entries or loadable.others), masters, alone)


def _numbered(
    entries: Mapping[int, Any], loadable: Loadable, held: ShardedParameters, optimizer: Optimizer
) -> dict[str, Any]:
    """The dict as the local optimizer would have saved it: its pieces of the state, numbered in its order."""
    state: dict[Any, Any] = copy.deepcopy(loadable.others)
    groups, number, start = [], 0, 0
    for group, saved, indices in zip(optimizer.param_groups, loadable.options, held.indices, strict=True):
        form = {key: live_option(value, group.get(key)) for key, value in options_of(saved).items()}
        if "param_names" in saved:
            form["param_names"] = [saved["param_names"][index - start] for index in indices]
        elif "param_names" in group:
            form["param_names"] = list(group["param_names"])
        groups.append({**form, "params": list(range(number, number + len(indices)))})
        state.update((number + i, entries[index]) for i, index in enumerate(indices) if entries.get(index))
        number += len(indices)
        start += len(saved.get("param_names", ()))
    return {"state": state, "param_groups": groups}


def _check_master(master: Any, held: ShardedParameters, index: int) -> None:
    spec, piece = held.layout.spec_of[index], held.pieces.pieces[index]
    if not isinstance(master, Tensor) or master.numel() != piece.numel:
        got = f"shape {tuple(master.shape)}" if isinstance(master, Tensor) else f"a {type(master).__qualname__}"
        raise ValueError(
            f"the {MASTER} of {spec.label} expects a tensor of the parameter's shape {spec.shape} but got {got}. Take "
            "it out of the dict: then it begins as the parameter."
        )


def _complete(optimizer: Optimizer, held: ShardedParameters) -> None:
    """A parameter without state in the dict starts as in a new optimizer (Adagrad makes state when it is built)."""
    missing = [tensor for tensor in held.pieces.tensors.values() if not optimizer.state.get(tensor)]
    if missing and held.builder.has_eager_state:
        fresh = held.builder.fresh_optimizer(optimizer.param_groups)
        for tensor in missing:
            optimizer.state[tensor] = fresh.state[tensor]


def _adopt_options(
    saved_groups: Sequence[Mapping[str, Any]],
    param_groups: Sequence[dict[str, Any]],
    local_groups: Sequence[dict[str, Any]],
) -> None:
    """Set options (and names, if saved) as loaded. As in torch, an option that was not saved is removed."""
    for group, saved, local in zip(param_groups, saved_groups, local_groups, strict=True):
        params, given = group["params"], saved.get("param_names", group.get("param_names"))
        group.clear()
        group.update(options_of(local), params=params)
        if given is not None:
            group["param_names"] = list(given)


def _facts_of(state_dict: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """What must be the same on every rank that loads: it is the same checkpoint, as far as its plain values show."""
    facts = option_facts(state_dict["param_groups"])
    for key, entry in state_dict["state"].items():
        if isinstance(entry, dict) and not is_sharded(entry):
            facts.append((f"state of parameter {key}", {name: _summary(value) for name, value in entry.items()}))
    return facts


def _summary(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.dim() else f"{value.item()}"
    return option_text(value)


# --- what a dict lacks ----------------------------------------------------------------------------------------------


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


# --- wrappers -------------------------------------------------------------------------------------------------------

# Wrappers that keep no state of their own and have the optimizer inside as ``.optimizer``. By name: none of these
# packages is imported here.
_WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer")
_PACKAGES = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric")


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a framework's wrapper. TypeError, which names the wrapper, if that is not known.

    A wrapper that is mistaken for the optimizer would lose state silently.
    """
    while any(k.__name__ in _WRAPPERS and k.__module__.split(".")[0] in _PACKAGES for k in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, ShardedOptimizer):
        for name, inner in inner_optimizers(optimizer):
            raise TypeError(
                f"optimizer expects the optimizer itself but got a {type(optimizer).__qualname__}, which has a "
                f"{type(inner).__qualname__} inside (.{name}). Pass that one, if the wrapper has no state of its own."
            )
    return optimizer
