"""What ranks write of an optimizer, a model and anything else, and the places that they read a checkpoint into.

Everything goes by the names of parameters. Of each thing that several ranks have, DCP lets one of them write it.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardstep.checkpoint.files import EXTRA, GROUPS, MODEL, OPTIM, STATE, Checkpoint, CheckpointError, put
from shardstep.comm.codec import live_option, plain_option
from shardstep.comm.process_group import Group
from shardstep.layout.shares import Share
from shardstep.params.builder import blank_state
from shardstep.params.dtensors import plain_tensor
from shardstep.params.groups import specs_of
from shardstep.params.master_modes import can_be_master
from shardstep.params.masters import ROUNDING
from shardstep.params.memory_order import empty_in_order, order_of
from shardstep.state import names as named
from shardstep.state.dicts import ShardedOptimizer
from shardstep.state.dicts import unwrapped as unwrapped_optimizer
from shardstep.state.names import Differences, clean, names_of, positions_of, saved_names, unwrapped
from shardstep.state.shards import MASTER, StateShard, filled, shard_of_range, shard_of_whole
from shardstep.state.subclasses import classes_in, closed, name_of, opened

logger = logging.getLogger(__name__)

KEPT = "shardstep_checkpoint"  # the attribute of a plain optimizer in which its saves keep what belongs to them
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}  # written into groups


def optimizers_in(given: Any) -> dict[str, Optimizer]:
    """The optimizers that were passed, by what they are called in a checkpoint: one alone is called nothing."""
    if isinstance(given, Mapping):
        chosen = {str(key): optimizer for key, optimizer in given.items()}
    elif isinstance(given, (list, tuple)):
        chosen = {str(position): optimizer for position, optimizer in enumerate(given)}
    else:
        chosen = {"": given}
    chosen = {key: unwrapped_optimizer(optimizer) for key, optimizer in chosen.items()}
    for optimizer in chosen.values():
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer expects a ZeroRedundancyOptimizer or a torch.optim.Optimizer but got "
                f"{type(optimizer).__qualname__}. Pass the optimizer itself, not its state dict."
            )
    if not chosen:
        raise TypeError(f"optimizer expects one optimizer or several but got an empty {type(given).__qualname__}.")
    if any("." in key for key in chosen):
        raise ValueError(f"the names of optimizers in a dict must have no dots, but they are {list(chosen)}.")
    return chosen


def root_of(key: str) -> tuple[str, ...]:
    """Where the optimizer of that name is in a checkpoint."""
    return (OPTIM, key) if key else (OPTIM,)


# --- what is saved ----------------------------------------------------------------------------------------------------


class Opaque:
    """A value that is saved as it is. (DCP looks into dicts and lists: keys become texts, empty ones vanish.)"""

    def __init__(self, key: str, value: Any) -> None:
        buffer = io.BytesIO()
        # What is saved must not ask for a device where it is loaded.
        torch.save(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value), buffer)
        self.data = buffer.getvalue()
        try:
            torch.load(io.BytesIO(self.data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise TypeError(
                f"{key} is a {type(value).__qualname__}, which cannot be loaded without running code. Save its "
                "plain data: numbers, strings, lists, dicts and tensors."
            ) from error


def _plain(key: str, value: Any) -> Any:
    """A tree in which DCP looks only into dicts with texts as keys, and lists, that hold tensors."""
    if isinstance(value, Tensor):
        return value.detach()
    if _holds_tensors(value):
        if isinstance(value, list):
            return [_plain(f"{key}.{position}", item) for position, item in enumerate(value)]
        if all(isinstance(part, str) for part in value):
            return {part: _plain(f"{key}.{part}", item) for part, item in value.items()}
    return Opaque(key, tree_map_only(StateShard, _whole_tensor, value))


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(isinstance(item, Tensor) or _holds_tensors(item) for item in items)


def _whole_tensor(shard: StateShard) -> Tensor:
    if shard.local.shape != shard.shape:
        raise TypeError(
            "the state of a cut parameter is in a dict whose keys are no texts, and cannot be divided. Build the "
            "optimizer with shard='tensor'."
        )
    return shard.local.detach()


def optimizer_form(optimizer: Optimizer, model: Module | None, group: Group) -> dict[str, Any]:
    """What this rank writes of an optimizer."""
    names = names_of(optimizer.param_groups, model)
    if isinstance(optimizer, ShardedOptimizer):
        form = optimizer.sharded_state_dict(model)
        # A group is written by ranks that have a piece of it: into an empty one some optimizers write nothing.
        sharded = optimizer.engine.sharded
        writes = [sharded.ranks.shard.rank in (owners or [0]) for owners in sharded.group_owners()]
    elif group.rank == 0:
        form = _named_whole(optimizer, names)
        writes = [True] * len(optimizer.param_groups)
    else:
        return {}  # a plain optimizer is the same on every rank
    known = set(names.values())
    entries = {name: filled(entry) for name, entry in form[STATE].items() if name in known or group.rank == 0}
    state = {name: _plain(name, entry) for name, entry in entries.items() if entry not in (None, {})}
    groups = [
        {key: _plain(key, plain_option(value)) for key, value in options.items()} if mine else {}
        for options, mine in zip(form[GROUPS], writes, strict=True)
    ]
    return {STATE: state, GROUPS: groups}


def _named_whole(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The state of a plain optimizer by name."""
    for param in names:
        if hasattr(param, "device_mesh"):
            raise TypeError(
                f"checkpoint expects plain tensors but got a {type(optimizer).__qualname__} over DTensors, of which "
                "this rank has a part. Use torch.distributed.checkpoint with get_optimizer_state_dict."
            )
    state = {names.get(key, str(key)): opened(entry) for key, entry in optimizer.state.items()}
    return {STATE: state, GROUPS: named.named_groups(optimizer.param_groups, names)}


def model_form(model: Module, group: Group) -> dict[str, Any]:
    """This rank's share of the model: of all parameters an equal range of elements; rank 0 has the rest.

    (Parameters are the same on every rank. Buffers may differ: rank 0's count, as in DistributedDataParallel.)
    """
    entries = {clean(key): value for key, value in unwrapped(model).state_dict(keep_vars=True).items()}
    params = {key: plain_tensor(value).detach() for key, value in entries.items() if isinstance(value, Parameter)}
    share = Share(sum(param.numel() for param in params.values()), group.rank, group.world_size)
    form: dict[str, Any] = {}
    start = 0
    for key, param in params.items():
        mine = share.within(start, start + param.numel())
        if not param.is_contiguous() or param.numel() == 0:
            if share.has_start(start):
                form[key] = shard_of_whole(param)
        elif mine.start < mine.stop:
            form[key] = shard_of_range(tuple(param.shape), mine.start, mine.stop, param.view(-1)[mine])
        start += param.numel()
    if group.rank == 0:
        form.update((key, _plain(key, value)) for key, value in entries.items() if key not in params)
    return form


def whole_form(optimizers: Mapping[str, Optimizer], model: Module | None, extra: Any, group: Group) -> dict[str, Any]:
    """Everything that this rank writes."""
    parts = {key: optimizer_form(optimizer, model, group) for key, optimizer in optimizers.items()}
    form: dict[str, Any] = {OPTIM: parts.get("", parts)}
    if model is not None:
        form[MODEL] = model_form(model, group)
    if extra is not None and group.rank == 0:
        form[EXTRA] = {key: _plain(f"{EXTRA}.{key}", value) for key, value in extra.items()}
    return form


def take_states(form: dict[str, Any]) -> list[dict[str, Any]]:
    """Take the state of every optimizer out of a form: new dicts, over the same tensors."""
    form[OPTIM] = dict(form[OPTIM])
    places = [form[OPTIM]] if GROUPS in form[OPTIM] else list(form[OPTIM].values())
    return [place.pop(STATE, {}) for place in places]


def put_states(form: dict[str, Any], states: Sequence[dict[str, Any]]) -> None:
    places = [form[OPTIM]] if GROUPS in form[OPTIM] else list(form[OPTIM].values())
    for place, state in zip(places, states, strict=True):
        place[STATE] = state


def shapes_of(optimizers: Mapping[str, Optimizer], model: Module | None) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters, by their place below ``optim`` in the checkpoint."""
    return {
        ".".join((*root_of(key)[1:], name)): tuple(param.shape)
        for key, optimizer in optimizers.items()
        for param, name in names_of(optimizer.param_groups, model).items()
    }


def orders_in(value: Any, *path: str) -> Iterator[tuple[str, list[int]]]:
    """Tensors of a form whose dimensions are stored in another order, by key: what is loaded gets the same one."""
    if isinstance(value, (Mapping, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from orders_in(item, *path, str(key))
    elif isinstance(value, Tensor):
        local = value.local if isinstance(value, StateShard) else value
        order = order_of(local) if local.shape == value.shape else None
        if order is not None:
            yield ".".join(path), order


# --- what is read -----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What this rank holds of a parameter: elements ``start`` to ``stop``, in a tensor ``like``. None: nothing."""

    shape: tuple[int, ...]
    start: int
    stop: int
    like: Tensor | None
    keeps_master: bool

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == torch.Size(self.shape).numel()

    def place(self, size: Sequence[int], dtype: torch.dtype, order: Sequence[int] | None = None) -> StateShard:
        """New memory for this rank's part of a tensor of that size."""
        assert self.like is not None
        device = self.like.device
        if not len(size):
            return shard_of_whole(torch.empty((), dtype=dtype))
        if not self.is_whole:
            local = torch.empty(self.stop - self.start, dtype=dtype, device=device)
            return shard_of_range(self.shape, self.start, self.stop, local)
        if tuple(size) == tuple(self.like.shape) and not self.like.is_contiguous():
            return shard_of_whole(torch.empty_like(self.like, dtype=dtype, requires_grad=False))
        if order is not None and sorted(order) == list(range(len(size))):
            return shard_of_whole(empty_in_order(size, order, dtype, device))
        return shard_of_whole(torch.empty(tuple(size), dtype=dtype, device=device))


def _held_by(optimizer: Optimizer) -> dict[Tensor, Held]:
    if not isinstance(optimizer, ShardedOptimizer):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return {param: Held(tuple(param.shape), 0, param.numel(), param, False) for param in params}
    sharded = optimizer.engine.sharded
    held = {}
    for index, param in sharded.given.items():
        shape, piece = sharded.layout.spec_of[index].shape, sharded.pieces.pieces.get(index)
        if piece is None:
            held[param] = Held(shape, 0, 0, None, False)
        else:
            tensor, keeps = sharded.pieces.tensors[index], sharded.keeps_master(index)
            held[param] = Held(shape, piece.start, piece.stop, tensor, keeps)
    return held


class OptimizerPlaces:
    """Places for one optimizer's part of a checkpoint, and in what that does not fit."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        key: str,
        optimizer: Optimizer,
        model: Module | None,
        differences: Differences,
        strict: bool,
    ) -> None:
        self._checkpoint, self._root, self._optimizer, self._strict = checkpoint, root_of(key), optimizer, strict
        self._names = names_of(optimizer.param_groups, model)
        self._saved: dict[str, dict[tuple[Any, ...], Any]] = {}  # by parameter and path, DCP's description
        depth = len(self._root) + 1
        for fqn, entry in checkpoint.entries.items():
            path = checkpoint.paths[fqn]
            if path[:depth] == (*self._root, STATE) and len(path) > depth:
                self._saved.setdefault(path[depth], {})[path[depth + 1 :]] = entry
        prefix = "".join(f"{part}." for part in self._root[1:])
        known = checkpoint.manifest.parameters if checkpoint.manifest is not None else {}
        self._shapes = {name.removeprefix(prefix): known[name] for name in known if name.startswith(prefix)}
        self.groups = self._read_groups()
        self._check_options()
        self.called = self._called()
        # Raises, before anything is read, if options that differ would have to become one group's.
        named.options_by_name(self.groups, named.named_groups(optimizer.param_groups, self.called), strict)
        missing, unexpected = named.compare_names(self.groups, self.called.values())
        differences.missing.extend(missing)
        differences.unexpected.extend(unexpected)
        self.state = self._places_for_state(differences)
        self.masters = self._places_for_masters()

    def add_to(self, form: dict[str, Any]) -> None:
        """Add the places to a tree that is read into."""
        put(form, (*self._root, STATE), self.state)

    def form_of_masters(self) -> dict[str, Any]:
        """Those for masters that are read from the model."""
        return {MODEL: {there: place for there, (_, place) in self.masters.items()}} if self.masters else {}

    def _read_groups(self) -> list[dict[str, Any]]:
        form = self._checkpoint.skeleton(*self._root, GROUPS)
        found: Any = form
        for part in (*self._root, GROUPS):
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, list):
            kept = sorted({".".join(map(str, path[:2])) for path in self._checkpoint.paths.values()})
            raise CheckpointError(
                f"{self._checkpoint.directory} has no optimizer under {'.'.join(self._root)!r}, with {GROUPS}; it has "
                f"{', '.join(kept[:20])}. (A flattened optimizer state dict is read by torch's "
                "set_optimizer_state_dict; several optimizers are loaded as they were saved, in a list or dict.)"
            )
        self._checkpoint.read_into(form)
        return [group if isinstance(group, dict) and "params" in group else {"params": []} for group in found]

    def _check_options(self) -> None:
        """ValueError if the options are those of another class, and ``strict``.

        One side may have options that the other lacks: torch adds some. Both do if the classes differ.
        """
        saved = {key for group in self.groups for key in group} - {"params"}
        mine = {key for group in self._optimizer.param_groups for key in group}
        missing = sorted(set(self._optimizer.defaults) - saved)
        foreign = sorted(saved - mine - _OF_SCHEDULERS - set(ROUNDING))
        if saved and missing and foreign and self._strict:
            raise ValueError(
                f"{self._checkpoint.directory} was saved by an optimizer with the options {', '.join(foreign)}, which "
                f"this one does not have; the checkpoint lacks {', '.join(missing)}. Was another class saved? "
                "checkpoint.load_model loads the model alone."
            )

    def _called(self) -> dict[Tensor, str]:
        """What the checkpoint calls the parameters.

        If it was made from a plain state dict, which knows no names, that is their position.
        """
        param_groups = self._optimizer.param_groups
        saved = [str(name) for group in self.groups for name in group["params"]]
        found = saved_names(self._names.values(), saved)
        called = {param: found.get(name, name) for param, name in self._names.items()}
        if set(saved) == set(called.values()):
            return called
        counts, mine = ([len(group["params"]) for group in of] for of in (self.groups, param_groups))
        if counts == mine and saved == [str(position) for position in range(len(self._names))]:
            return positions_of(param_groups)
        named.check_named_alike(self.groups, list(self._names.values()))
        return called

    def _places_for_state(self, differences: Differences) -> dict[str, Any]:
        """By the names that the checkpoint has. Also for state that belongs to no parameter."""
        state: dict[str, Any] = {}
        for param, held in _held_by(self._optimizer).items():
            name = self.called[param]
            saved = self._shape_of(name, len(held.shape))
            if saved is not None and saved != held.shape:
                differences.misshapen.append(f"{name} (saved for {saved}, is {held.shape})")
            elif held.like is not None and name in self._saved:
                self._add_places(state, name, held, differences)
        known = {*self.called.values(), *self._shapes}
        known.update(name for group in self.groups for name in group["params"])
        for name in self._saved.keys() - known:
            tree: Any = self._checkpoint.skeleton(*self._root, STATE, name)
            for part in (*self._root, STATE):
                tree = tree[part]
            state[name] = tree[name]
        return state

    def _add_places(self, state: dict[str, Any], name: str, held: Held, differences: Differences) -> None:
        entries = self._saved[name]
        uncut = [size for size in map(_size_of, entries.values()) if size and not (held.is_whole or size == held.shape)]
        if uncut:  # a part of a state is no state
            differences.misshapen.extend(
                f"{name} (its state has shape {list(size)}, which cannot be cut with the parameter of shape "
                f"{list(held.shape)}: build the optimizer with shard='tensor')"
                for size in uncut
            )
            return
        for path, entry in entries.items():  # (with keys that are no texts the state is one value, the path is empty)
            order = self._checkpoint.orders.get(".".join(map(str, (*self._root, STATE, name, *path))))
            size = _size_of(entry)
            put(state, (name, *path), None if size is None else held.place(size, entry.properties.dtype, order))

    def _shape_of(self, name: str, dimensions: int) -> tuple[int, ...] | None:
        """The shape that a parameter had when it was saved, as far as the checkpoint says."""
        if name in self._shapes:
            return self._shapes[name]
        if (size := _size_of(self._checkpoint.entries.get(f"{MODEL}.{name}"))) is not None:
            return size
        # Two moments of one shape have the parameter's; a lone tensor may not.
        sizes = [size for size in map(_size_of, self._saved.get(name, {}).values()) if size and len(size) == dimensions]
        return sizes[0] if len(sizes) > 1 and len(set(sizes)) == 1 else None

    def _places_for_masters(self) -> dict[str, tuple[str, StateShard]]:
        """Where a parameter has no master, and its model was saved in float32, the master is read from there.

        Also of parameters without state: they were not stepped yet, or the optimizer's class makes none.
        """
        places: dict[str, tuple[str, StateShard]] = {}
        entries = self._checkpoint.model_entries()
        wide = {name for name, entry in entries.items() if _size_of(entry) and entry.properties.dtype == torch.float32}
        found = saved_names(self.called.values(), wide)
        for param, held in _held_by(self._optimizer).items():
            name = self.called[param]
            entry, there = self.state.get(name, {}), found.get(name)
            lacks = held.keeps_master and there is not None and isinstance(entry, dict) and MASTER not in entry
            if lacks and _size_of(entries[there]) == held.shape:
                places[there] = name, held.place(held.shape, torch.float32)
        return places

    def load(self, model: Module | None) -> None:
        """Load what was read. Collective for a sharded optimizer; if that fails, nothing is changed."""
        for name, master in self.masters.values():
            self.state.setdefault(name, {})[MASTER] = master
        new = {self.called[param]: name for param, name in self._names.items()}
        groups = [{**group, "params": [new.get(one, one) for one in group["params"]]} for group in self.groups]
        form = {STATE: {new.get(name, name): entry for name, entry in self.state.items()}, GROUPS: groups}
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.load_sharded_state_dict(form, model, self._strict)
        else:
            _load_whole(self._optimizer, form, self._names, self._strict)


def _size_of(entry: Any) -> tuple[int, ...] | None:
    """The size of a saved tensor; None for any other value."""
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _load_whole(optimizer: Optimizer, form: Mapping[str, Any], names: Mapping[Tensor, str], strict: bool) -> None:
    """Load a form into a plain optimizer, through its own ``load_state_dict``."""
    options = named.options_by_name(form[GROUPS], named.named_groups(optimizer.param_groups, names), strict)
    numbers = {param: number for number, param in enumerate(names)}
    state, masters = {key: entry for key, entry in form[STATE].items() if key not in names.values()}, {}
    for param, number in numbers.items():
        entry = tree_map_only(StateShard, lambda shard: shard.local, filled(form[STATE].get(names[param])))
        if isinstance(entry, dict) and MASTER in entry:
            masters[param] = entry.pop(MASTER)
        if entry:
            state[number] = closed(entry, partial(_find_class, optimizer, param), names[param])
    groups = []
    for group, chosen in zip(optimizer.param_groups, options, strict=True):
        live = {key: live_option(value, group.get(key)) for key, value in chosen.items()}
        kept = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({**live, **kept, "params": [numbers[param] for param in group["params"]]})
    optimizer.load_state_dict({STATE: state, GROUPS: groups})
    # float32 parameters are what the masters of a sharded optimizer were kept for.
    lacking = [names[param] for param in masters if not can_be_master(param.dtype)]
    with torch.no_grad():
        for param, master in masters.items():
            if can_be_master(param.dtype):
                param.copy_(master)
    if lacking:
        logger.warning(
            "checkpoint.load: the checkpoint has float32 masters, but %s is not float32, so they are left out. Convert "
            "the model to float32 first, or use ZeroRedundancyOptimizer(master_weights=...).",
            lacking[0],
        )


def _find_class(optimizer: Optimizer, param: Tensor, name: str) -> type | None:
    """The tensor subclass of that name that a plain optimizer makes as state."""
    known = {name_of(kind): kind for kind in classes_in(list(optimizer.state.values()))}
    if name not in known:
        groups = optimizer.param_groups
        spec = next(spec for spec, given in specs_of(groups, ["tensor"] * len(groups), []).values() if given is param)

        def twin(param_groups: Sequence[dict[str, Any]]) -> Optimizer:  # what it was built with is not known
            made = object.__new__(type(optimizer))
            kept = {key: value for key, value in vars(optimizer).items() if key not in (STATE, GROUPS, KEPT)}
            vars(made).update(copy.deepcopy(kept), state=defaultdict(dict), param_groups=list(param_groups))
            return made

        try:
            known.update((name_of(kind), kind) for kind in classes_in(blank_state(twin, spec, param, groups)))
        except Exception:  # it cannot step a blank: then no class is known
            return None
    return known.get(name)


class ModelPlaces:
    """The model's own memory, by the names that the checkpoint has, and in what that does not fit."""

    def __init__(self, checkpoint: Checkpoint, model: Module, differences: Differences, strict: bool) -> None:
        self._model, self._strict, self._checkpoint = unwrapped(model), strict, checkpoint
        self._now = self._model.state_dict(keep_vars=True)
        keys = {clean(key): key for key in self._now}
        saved = checkpoint.model_entries()
        found = saved_names(keys, saved)
        self.form: dict[str, Any] = {}
        self._keys = {there: keys[name] for name, there in found.items()}
        for name, key in keys.items():
            value, there = self._now[key], found.get(name)
            if there is None:
                differences.missing.append(f"{name} of the model")
            elif not isinstance(value, Tensor):
                self.form[there] = checkpoint.skeleton(MODEL, there)[MODEL][there]
            elif _size_of(saved[there]) == tuple(value.shape):
                if any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)):
                    raise RuntimeError(f"{name} cannot be loaded: its elements share memory. Give it its own (clone).")
                self.form[there] = plain_tensor(value).detach()
            else:
                differences.misshapen.append(
                    f"{name} of the model (saved as {_size_of(saved[there])}, is {tuple(value.shape)})"
                )
        used = set(found.values())
        differences.unexpected.extend(f"{name} of the model" for name in saved if name not in used)

    def load(self) -> None:
        """Give the model what was read: its tensors have it already; its hooks and extra state follow."""
        read = {self._keys[there]: value for there, value in self.form.items()}
        chosen = {key: self._now[key] if isinstance(self._now[key], Tensor) else value for key, value in read.items()}
        self._model.load_state_dict(chosen, strict=self._strict)


def settle(differences: Differences, directory: Path, strict: bool, stacklevel: int) -> None:
    """ValueError if the checkpoint does not fit and ``strict``, else a warning."""
    if not differences:
        return
    message = f"{directory} does not match: {differences}."
    if strict:
        raise ValueError(f"{message} {named.REMEDY}")
    warnings.warn(f"{message} What does not match starts empty, or is left out.", stacklevel=stacklevel)
