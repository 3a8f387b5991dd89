"""Places to read a checkpoint into: new memory for what this rank needs, and in what the checkpoint does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn import Module

from shardstep.checkpoint.keys import MODEL, OPTIM, STATE
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.checkpoint.storage.reader import put
from shardstep.layout.specs import ParamSpec, Piece
from shardstep.params.dtensors import plain_tensor
from shardstep.params.memory_order import empty_in_order
from shardstep.state import names as named
from shardstep.state.names import Differences, clean, saved_names, unwrapped
from shardstep.state.shards import StateShard, shard_of_range, shard_of_whole


class StateTargets:
    """Places for the state of this rank's pieces."""

    def __init__(self, checkpoint: Checkpoint, held: Any, differences: Differences) -> None:
        self._checkpoint, self._held = checkpoint, held
        self._saved = checkpoint.states()
        self._misshapen = differences.misshapen  # what does not fit is added to it

    def by_name(self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> dict[str, Any]:
        """The places by the names of parameters. Also those of state that belongs to no parameter.

        Args:
            groups: as they were saved.
            names: what the checkpoint calls the parameters.
        """
        state: dict[str, Any] = {}
        for index, param in self._held.given.items():
            name = names[param]
            if self._has_shape(name, self._held.layout.spec_of[index]) and name in self._saved:
                state[name] = self._of_parameter(index, name)
        known = {*names.values(), *self._checkpoint.parameter_names()}
        known.update(name for group in groups for name in group["params"])
        for name in self._saved.keys() - known:
            state[name] = self._checkpoint.skeleton(OPTIM, STATE, name)[OPTIM][STATE][name]
        return state

    def _has_shape(self, name: str, spec: ParamSpec) -> bool:
        """Whether the parameter had its shape when it was saved, as far as the checkpoint says."""
        saved = self._checkpoint.shape_of_parameter(name)
        if saved is None:
            saved = _shape_of_moments(self._saved.get(name, {}), len(spec.shape))
        if saved is None or saved == spec.shape:
            return True
        self._misshapen.append(f"{name} (saved for {saved}, is {spec.shape})")
        return False

    def _of_parameter(self, index: int, name: str) -> Any:
        spec, piece = self._held.layout.spec_of[index], self._held.pieces.pieces.get(index)
        entries = self._saved[name]
        if piece is None:
            return {}
        uncut = [size for size in map(_size_of, entries.values()) if not _fits(size, spec, piece)]
        if uncut:  # a part of a state is no state
            self._misshapen.extend(_cannot_be_cut(name, size, spec) for size in uncut)
            return {}
        # (With keys that are no texts the state of a parameter is one value: then the path is empty.)
        tree: dict[str, Any] = {name: {}}
        for path, entry in entries.items():
            order = self._checkpoint.order_of(name, *path)
            put(tree, (name, *path), _target(entry, self._held.pieces.tensors[index], spec, piece, order))
        return tree[name]


def _size_of(entry: Any) -> tuple[int, ...] | None:
    """The size of a saved tensor; None for any other value."""
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _fits(size: tuple[int, ...] | None, spec: ParamSpec, piece: Piece) -> bool:
    """Whether a state tensor is whole on this rank, or can be cut with its parameter."""
    return not size or piece.whole or size == spec.shape


def _cannot_be_cut(name: str, size: Any, spec: ParamSpec) -> str:
    return (
        f"{name} (its state has shape {list(size)}, which cannot be cut with the parameter of shape "
        f"{list(spec.shape)}: build the optimizer with shard='tensor')"
    )


def _shape_of_moments(entries: Mapping[Any, Any], dims: int) -> tuple[int, ...] | None:
    """The shape of a parameter as its state tells: two moments of one shape have it, a lone tensor may not."""
    sizes = [size for size in map(_size_of, entries.values()) if size is not None and len(size) == dims > 0]
    return sizes[0] if len(sizes) > 1 and len(set(sizes)) == 1 else None


def _target(entry: Any, like: Tensor, spec: ParamSpec, piece: Piece, order: list[int] | None) -> StateShard | None:
    """Where to read one state tensor to: new memory, of the size of this rank's piece. None for any other value."""
    size = _size_of(entry)
    if size is None:
        return None
    dtype = entry.properties.dtype
    if not size:
        return shard_of_whole(torch.empty((), dtype=dtype))
    if not piece.whole:
        local = torch.empty(piece.numel, dtype=dtype, device=like.device)
        return shard_of_range(spec.shape, piece.start, piece.stop, local)
    if size == tuple(like.shape) and not like.is_contiguous():  # in the order of its parameter
        return shard_of_whole(torch.empty_like(like, dtype=dtype, requires_grad=False))
    if order is not None and sorted(order) == list(range(len(size))):
        return shard_of_whole(empty_in_order(size, order, dtype, like.device))
    return shard_of_whole(torch.empty(size, dtype=dtype, device=like.device))


def settle(differences: Differences, directory: Path, strict: bool, stacklevel: int) -> None:
    """ValueError if the checkpoint does not fit and ``strict``, else a warning."""
    if not differences:
        return
    message = f"{directory} does not match: {differences}."
    if strict:
        raise ValueError(f"{message} {named.REMEDY}")
    warnings.warn(f"{message} What does not match starts empty, or is left out.", stacklevel=stacklevel)


def model_targets(checkpoint: Checkpoint, model: Module, differences: Differences) -> dict[str, Any]:
    """Tensors like the model's, on the host: the model is changed only when everything has been read.

    Under the names that the checkpoint has for them (``saved_names``).
    """
    saved = checkpoint.model_entries()
    mine = {clean(key): plain_tensor(value) for key, value in unwrapped(model).state_dict().items()}
    found = saved_names(mine, saved)
    targets: dict[str, Any] = {}
    for name, value in mine.items():
        there = found.get(name)
        if there is None:
            differences.missing.append(f"{name} of the model")
        elif not isinstance(value, Tensor):
            targets[there] = checkpoint.skeleton(MODEL, there)[MODEL][there]
        elif _size_of(saved[there]) == tuple(value.shape):
            targets[there] = torch.empty_like(value, device="cpu")
        else:
            size = _size_of(saved[there])
            differences.misshapen.append(f"{name} of the model (saved as {size}, is {tuple(value.shape)})")
    used = set(found.values())
    differences.unexpected.extend(f"{name} of the model" for name in saved if name not in used)
    return targets
