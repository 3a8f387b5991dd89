"""Loading a checkpoint: each rank reads what it needs of it, and nothing is changed until all ranks have read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn import Module

from shardstep import manifest as manifests
from shardstep import sharded_form
from shardstep.file_reader import Reader, SafeLoadPlanner
from shardstep.holders import Holder
from shardstep.layout import ParamSpec, Piece
from shardstep.manifest import CheckpointError
from shardstep.naming import clean, names_of, positions_of, unwrapped
from shardstep.sharded_form import Differences
from shardstep.state_shard import shard_of_range, shard_of_whole

CALL = "checkpoint.load"
OPTIM, MODEL, EXTRA = "optim", "model", "extra"


class Checkpoint:
    """A checkpoint directory that is open for reading."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reader = Reader(directory)
        self.metadata: Metadata = self.reader.read_metadata()
        self.entries = self.metadata.state_dict_metadata
        self.paths = self.metadata.planner_data or {fqn: (fqn,) for fqn in self.entries}

    def skeleton(self, *root: str) -> dict[str, Any]:
        """The part of the tree under ``root``, with tensors to read into and None for everything else."""
        tree: dict[str, Any] = {}
        for fqn, entry in self.entries.items():
            path = self.paths[fqn]
            if path[: len(root)] == root:
                is_tensor = isinstance(entry, TensorStorageMetadata)
                put(tree, path, torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None)
        return tree

    def read_into(self, form: dict[str, Any]) -> None:
        """Fill a tree of tensors (or shards, or None for what is no tensor) with what is under the same keys."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP wonders that each rank reads for itself
            try:
                dcp.load(form, storage_reader=self.reader, planner=SafeLoadPlanner(), no_dist=True)
            except CheckpointException as wrapped:
                error = next(iter(wrapped.failures.values()))[0]
                if isinstance(error, CheckpointError):
                    raise error from None
                raise CheckpointError(f"{self.directory} cannot be read: {error}") from error

    def groups(self) -> list[dict[str, Any]]:
        """The saved parameter groups."""
        form = self.skeleton(OPTIM, "param_groups")
        found = form.get(OPTIM, {}).get("param_groups")
        if not isinstance(found, list):
            raise CheckpointError(
                f"{self.directory} expects an optimizer under the key {OPTIM!r}, with param_groups, but has "
                f"{sorted({str(path[0]) for path in self.paths.values()})}. (A flattened optimizer state dict "
                "is read by torch's set_optimizer_state_dict.)"
            )
        self.read_into(form)
        return form[OPTIM]["param_groups"]

    def shape_in_model(self, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter of the model that was saved with the optimizer, if one was."""
        entry = self.entries.get(f"{MODEL}.{name}")
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def states(self) -> dict[str, dict[tuple[Any, ...], Any]]:
        """The saved state: by parameter, then by the path below it, DCP's description."""
        found: dict[str, dict[tuple[Any, ...], Any]] = {}
        for fqn, entry in self.entries.items():
            path = self.paths[fqn]
            if path[:2] == (OPTIM, "state") and len(path) > 2:
                found.setdefault(path[2], {})[path[3:]] = entry
        return found


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set ``tree[path[0]][path[1]]...``, making dicts and lists on the way."""
    for part, following in pairwise(path):
        new: Any = [] if isinstance(following, int) else {}
        tree = _extended(tree, part) if isinstance(tree, list) else tree
        if isinstance(tree, list):
            if tree[part] is None:
                tree[part] = new
            tree = tree[part]
        else:
            tree = tree.setdefault(part, new)
    if isinstance(tree, list):
        _extended(tree, path[-1])
    tree[path[-1]] = value


def _extended(items: list[Any], position: int) -> list[Any]:
    items.extend([None] * (position + 1 - len(items)))
    return items


class Loading:
    """One load, on this rank."""

    def __init__(self, directory: Path, holder: Holder, model: Module | None, strict: bool) -> None:
        self._directory, self._holder, self._model, self._strict = directory, holder, model, strict

    def run(self) -> dict[str, Any]:
        """Read, agree, change; return what was saved as ``extra``."""
        with self._told():
            checkpoint = Checkpoint(self._directory)
            form = self._targets(checkpoint)
            checkpoint.read_into(form)
        self._agree(checkpoint)
        self._holder.load(self._renamed(form[OPTIM]), self._model, self._strict)
        if self._model is not None and MODEL in form:
            self._load_model(form[MODEL])
        return form.get(EXTRA) or {}

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._holder.fail(CALL, error)
            raise

    def _agree(self, checkpoint: Checkpoint) -> None:
        """That all ranks have read, and the same checkpoint."""
        digest = manifests.digest_of(checkpoint.directory / manifests.METADATA_NAME)
        try:
            self._holder.board.agree(CALL, [("checkpoint", {"directory": self._directory.name, "metadata": digest})])
        except RuntimeError as error:
            if "CheckpointError" in str(error):  # it is damaged where another rank reads it
                raise CheckpointError(str(error)) from error
            raise

    def _targets(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Places for everything that this rank needs. ValueError if the checkpoint does not fit and ``strict``."""
        groups = checkpoint.groups()
        names = self._names(groups)
        missing, unexpected = sharded_form.compare_names(groups, names.values())
        differences = Differences(missing, unexpected, [])
        form = {OPTIM: {"state": self._state_targets(checkpoint, groups, names, differences), "param_groups": groups}}
        form.update(checkpoint.skeleton(EXTRA))
        if self._model is not None and any(path[0] == MODEL for path in checkpoint.paths.values()):
            form[MODEL] = _model_targets(checkpoint, self._model, differences)
        if differences:
            told = f"{self._directory} does not match: {differences}."
            if self._strict:
                raise ValueError(f"{told} {sharded_form.REMEDY}")
            warnings.warn(f"{told} What does not match starts empty, or is left out.", stacklevel=5)
        return form

    def _names(self, groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
        """What the checkpoint calls the parameters.

        If it was made from a plain state dict, which knows no names, that is their position.
        """
        param_groups = self._holder.optimizer.param_groups
        names = names_of(param_groups, self._model)
        saved = [str(name) for group in groups for name in group["params"]]
        if saved == [str(i) for i in range(len(names))] and [len(g["params"]) for g in groups] == [
            len(group["params"]) for group in param_groups
        ]:
            return positions_of(param_groups)
        sharded_form.check_named_alike(groups, list(names.values()))
        return names

    def _renamed(self, form: dict[str, Any]) -> dict[str, Any]:
        """The form with the optimizer's names for parameters."""
        param_groups = self._holder.optimizer.param_groups
        names, called = names_of(param_groups, self._model), self._names(form["param_groups"])
        new = {called[param]: name for param, name in names.items()}
        groups = [
            {**group, "params": [new.get(name, name) for name in group["params"]]} for group in form["param_groups"]
        ]
        return {"state": {new.get(n, n): value for n, value in form["state"].items()}, "param_groups": groups}

    def _state_targets(
        self,
        checkpoint: Checkpoint,
        groups: Sequence[Mapping[str, Any]],
        names: Mapping[Tensor, str],
        differences: Differences,
    ) -> dict[str, Any]:
        placement, saved = self._holder.placement, checkpoint.states()
        manifest = checkpoint.reader.manifest
        shapes = manifest.parameters if manifest is not None else {}
        state: dict[str, Any] = {}
        for index, param in placement.params.items():
            name, spec = names[param], placement.layout.spec_of[index]
            entries = saved.get(name, {})
            was = shapes.get(name) or checkpoint.shape_in_model(name) or _shape_of_moments(entries, len(spec.shape))
            if was is not None and was != spec.shape:
                differences.misshapen.append(f"{name} (saved for {was}, is {spec.shape})")
                continue
            if name not in saved:
                continue
            piece = placement.shard.pieces.get(index)
            state[name] = {}
            if piece is not None:
                for path, entry in entries.items():
                    like = placement.shard.tensors[index]
                    put(state[name], path, _target(entry, like, spec, piece, differences, name))
        known = {*names.values(), *shapes, *(name for group in groups for name in group["params"])}
        for name in saved.keys() - known:  # state that belongs to no parameter
            found = checkpoint.skeleton(OPTIM, "state", name)
            state[name] = found[OPTIM]["state"][name]
        return state

    def _load_model(self, entries: dict[str, Any]) -> None:
        assert self._model is not None
        model = unwrapped(self._model)
        keys = {clean(key): key for key in model.state_dict()}
        model.load_state_dict({keys[name]: value for name, value in entries.items()}, strict=self._strict)


def _shape_of_moments(entries: Mapping[Any, Any], dims: int) -> tuple[int, ...] | None:
    """The shape of a parameter as its state tells: two moments of one shape have it, a lone tensor may not."""
    sizes = [tuple(entry.size) for entry in entries.values() if isinstance(entry, TensorStorageMetadata)]
    sizes = [size for size in sizes if len(size) == dims > 0]
    return sizes[0] if len(sizes) > 1 and len(set(sizes)) == 1 else None


def _target(entry: Any, like: Tensor, spec: ParamSpec, piece: Piece, differences: Differences, name: str) -> Any:
    """Where to read one state tensor to: new memory, of the size of this rank's piece."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype, size = entry.properties.dtype, tuple(entry.size)
    if not size:
        return shard_of_whole(torch.empty((), dtype=dtype))
    if piece.whole:
        same = size == tuple(like.shape)
        return shard_of_whole(
            torch.empty_like(like, dtype=dtype, requires_grad=False)
            if same
            else torch.empty(size, dtype=dtype, device=like.device)
        )
    if size != spec.shape:
        differences.misshapen.append(
            f"{name} (its state has shape {list(size)}, which cannot be cut with the parameter of shape "
            f"{list(spec.shape)}: build the optimizer with shard='tensor')"
        )
        return None
    local = torch.empty(piece.numel, dtype=dtype, device=like.device)
    return shard_of_range(spec.shape, piece.start, piece.stop, local)


def _model_targets(checkpoint: Checkpoint, model: Module, differences: Differences) -> dict[str, Any]:
    """Copies of the model's tensors to read into: the model itself is changed only when everything is there."""
    saved = {
        ".".join(map(str, checkpoint.paths[fqn][1:])): entry
        for fqn, entry in checkpoint.entries.items()
        if checkpoint.paths[fqn][0] == MODEL
    }
    targets: dict[str, Any] = {}
    mine = {clean(key): value for key, value in unwrapped(model).state_dict().items()}
    for name, value in mine.items():
        entry = saved.get(name)
        if entry is None:
            differences.missing.append(f"{name} of the model")
            continue
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if isinstance(value, Tensor) and size != tuple(value.shape):
            differences.misshapen.append(f"{name} of the model (saved as {size}, is {tuple(value.shape)})")
        else:
            targets[name] = torch.empty_like(value) if isinstance(value, Tensor) else None
    differences.unexpected.extend(f"{name} of the model" for name in saved if name not in mine)
    return targets
