"""Load a checkpoint: each rank reads what it needs of it, and nothing is changed until all ranks have read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn import Module

from shardstep.checkpoint.adapter import OptimizerAdapter
from shardstep.checkpoint.storage import dcp_versions
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.checkpoint.storage.reader import Reader, SafeLoadPlanner, put
from shardstep.checkpoint.storage.writer import NO_DIST_WARNING
from shardstep.layout.specs import ParamSpec, Piece
from shardstep.params.memory_order import empty_in_order
from shardstep.state import named
from shardstep.state.named import Differences
from shardstep.state.names import clean, names_of, positions_of, unwrapped
from shardstep.state.shard import shard_of_range, shard_of_whole

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

    def read_into(self, form: dict[str, Any], planner: SafeLoadPlanner | None = None) -> None:
        """Fill a tree of tensors (or shards, or None for what is no tensor) with what is under the same keys."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_DIST_WARNING)
            try:
                dcp_versions.load(form, self.reader, planner or SafeLoadPlanner())
            except CheckpointException as wrapped:
                error = next(iter(wrapped.failures.values()))[0]
                if isinstance(error, (CheckpointError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)):
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


class LoadJob:
    """One load, on this rank."""

    def __init__(self, directory: Path, adapted: OptimizerAdapter, model: Module | None, strict: bool) -> None:
        self._directory, self._adapted, self._model, self._strict = directory, adapted, model, strict

    def run(self) -> dict[str, Any]:
        """Read, agree, change; return what was saved as ``extra``."""
        with self._reporting():
            checkpoint = Checkpoint(self._directory)
            form = self._targets(checkpoint)
            checkpoint.read_into(form)
            digest = manifests.digest_of(checkpoint.directory / manifests.METADATA_NAME)
        self._agree(digest)
        with self._reporting():
            undo = self._load_model(form[MODEL]) if self._model is not None and MODEL in form else _nothing
        try:
            self._adapted.load(self._renamed(form[OPTIM]), self._model, self._strict)
        except BaseException:
            undo()
            raise
        return form.get(EXTRA) or {}

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._adapted.consensus.report_failure(CALL, error)
            raise

    def _agree(self, digest: str) -> None:
        """That all ranks have read, and the same checkpoint."""
        try:
            self._adapted.consensus.check_equal(
                CALL, [("checkpoint", {"directory": self._directory.name, "metadata": digest})]
            )
        except RuntimeError as error:
            if "CheckpointError" in str(error):  # it is damaged where another rank reads it
                raise CheckpointError(str(error)) from error
            raise

    def _targets(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Places for everything that this rank needs. ValueError if the checkpoint does not fit and ``strict``."""
        groups = checkpoint.groups()
        names = self._names(groups)
        missing, unexpected = named.compare_names(groups, names.values())
        differences = Differences(missing, unexpected, [])
        form = {OPTIM: {"state": self._state_targets(checkpoint, groups, names, differences), "param_groups": groups}}
        form.update(checkpoint.skeleton(EXTRA))
        if self._model is not None and any(path[0] == MODEL for path in checkpoint.paths.values()):
            form[MODEL] = _model_targets(checkpoint, self._model, differences)
        elif self._model is not None:
            warnings.warn(f"{self._directory} holds no model: the model is not changed.", stacklevel=5)
        if differences:
            message = f"{self._directory} does not match: {differences}."
            if self._strict:
                raise ValueError(f"{message} {named.REMEDY}")
            warnings.warn(f"{message} What does not match starts empty, or is left out.", stacklevel=5)
        return form

    def _names(self, groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
        """What the checkpoint calls the parameters.

        If it was made from a plain state dict, which knows no names, that is their position.
        """
        param_groups = self._adapted.optimizer.param_groups
        names = names_of(param_groups, self._model)
        saved = [str(name) for group in groups for name in group["params"]]
        if set(saved) == set(names.values()):
            return names
        if saved == [str(i) for i in range(len(names))] and [len(g["params"]) for g in groups] == [
            len(group["params"]) for group in param_groups
        ]:
            return positions_of(param_groups)
        named.check_named_alike(groups, list(names.values()))
        return names

    def _renamed(self, form: dict[str, Any]) -> dict[str, Any]:
        """The form with the optimizer's names for parameters."""
        param_groups = self._adapted.optimizer.param_groups
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
        held, saved = self._adapted.held, checkpoint.states()
        manifest = checkpoint.reader.manifest
        shapes = manifest.parameters if manifest is not None else {}
        orders = (manifest.orders if manifest is not None else None) or {}
        state: dict[str, Any] = {}
        for index, param in held.params.items():
            name, spec = names[param], held.layout.spec_of[index]
            entries = saved.get(name, {})
            known = (shapes.get(name), checkpoint.shape_in_model(name), _shape_of_moments(entries, len(spec.shape)))
            was = next((shape for shape in known if shape is not None), None)
            if was is not None and was != spec.shape:
                differences.misshapen.append(f"{name} (saved for {was}, is {spec.shape})")
                continue
            if name not in saved:
                continue
            piece = held.pieces.pieces.get(index)
            state[name] = {}
            if piece is not None:
                misshapen = len(differences.misshapen)
                for path, entry in entries.items():
                    like = held.pieces.tensors[index]
                    # With keys that are no texts the state of a parameter is one value.
                    order = orders.get(".".join(map(str, (OPTIM, "state", name, *path))))
                    put(state, (name, *path), _target(entry, like, spec, piece, differences, name, order))
                if len(differences.misshapen) > misshapen:  # a part of a state is no state
                    state[name] = {}
        of_parameters = {*names.values(), *shapes, *(name for group in groups for name in group["params"])}
        for name in saved.keys() - of_parameters:  # state that belongs to no parameter
            found = checkpoint.skeleton(OPTIM, "state", name)
            state[name] = found[OPTIM]["state"][name]
        return state

    def _load_model(self, entries: dict[str, Any]) -> Callable[[], None]:
        """Load the model. Return a function that undoes it; if it raises, it is undone.

        What is in memory and what was read change places, tensor by tensor, so that nothing is there three times; then
        the model's own ``load_state_dict`` takes what is in place, for its hooks and extra state.
        """
        assert self._model is not None
        model = unwrapped(self._model)
        now = model.state_dict()
        keys = {clean(key): key for key in now}
        pairs = [(now[keys[name]], value) for name, value in entries.items() if isinstance(value, Tensor)]
        others = {keys[name]: value for name, value in entries.items() if not isinstance(value, Tensor)}
        before = {key: copy.deepcopy(now[key]) for key in others}

        def take(values: dict[str, Any]) -> None:
            chosen = {keys[name]: now[keys[name]] for name in entries}
            model.load_state_dict({**chosen, **values}, strict=self._strict)

        def undo() -> None:
            for tensor, value in reversed(pairs):  # (a tensor with two names is there twice)
                _swap(tensor, value)
            take(before)

        for tensor, value in pairs:
            _swap(tensor, value)
        try:
            take(others)
        except BaseException:
            undo()
            raise
        return undo


def _nothing() -> None:
    pass


@torch.no_grad()
def _swap(one: Tensor, other: Tensor) -> None:
    before = one.detach().to(other.device, copy=True)
    one.copy_(other)
    other.copy_(before)


def _shape_of_moments(entries: Mapping[Any, Any], dims: int) -> tuple[int, ...] | None:
    """The shape of a parameter as its state tells: two moments of one shape have it, a lone tensor may not."""
    sizes = [tuple(entry.size) for entry in entries.values() if isinstance(entry, TensorStorageMetadata)]
    sizes = [size for size in sizes if len(size) == dims > 0]
    return sizes[0] if len(sizes) > 1 and len(set(sizes)) == 1 else None


def _target(
    entry: Any,
    like: Tensor,
    spec: ParamSpec,
    piece: Piece,
    differences: Differences,
    name: str,
    order: list[int] | None,
) -> Any:
    """Where to read one state tensor to: new memory, of the size of this rank's piece."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype, size = entry.properties.dtype, tuple(entry.size)
    if not size:
        return shard_of_whole(torch.empty((), dtype=dtype))
    if piece.whole:
        if size == tuple(like.shape) and not like.is_contiguous():  # in the order of its parameter
            return shard_of_whole(torch.empty_like(like, dtype=dtype, requires_grad=False))
        if order is not None and sorted(order) == list(range(len(size))):
            return shard_of_whole(empty_in_order(size, order, dtype, like.device))
        return shard_of_whole(torch.empty(size, dtype=dtype, device=like.device))
    if size != spec.shape:
        differences.misshapen.append(
            f"{name} (its state has shape {list(size)}, which cannot be cut with the parameter of shape "
            f"{list(spec.shape)}: build the optimizer with shard='tensor')"
        )
        return None
    local = torch.empty(piece.numel, dtype=dtype, device=like.device)
    return shard_of_range(spec.shape, piece.start, piece.stop, local)


def _model_targets(checkpoint: Checkpoint, model: Module, differences: Differences) -> dict[str, Any]:
    """Tensors like the model's, on the host, to read into: the model is changed only when everything is there."""
    saved: dict[str, Any] = {}
    for fqn, entry in checkpoint.entries.items():
        root, *path = map(str, checkpoint.paths[fqn])
        if root == MODEL:  # (a value that is a tree has several entries)
            saved[path[0] if path else ""] = entry if len(path) == 1 else None
    targets: dict[str, Any] = {}
    mine = {clean(key): value for key, value in unwrapped(model).state_dict().items()}
    for name, value in mine.items():
        if name not in saved:
            differences.missing.append(f"{name} of the model")
            continue
        if not isinstance(value, Tensor):
            targets[name] = checkpoint.skeleton(MODEL, name)[MODEL][name]
            continue
        entry = saved[name]
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if size != tuple(value.shape):
            differences.misshapen.append(f"{name} of the model (saved as {size}, is {tuple(value.shape)})")
        else:
            targets[name] = torch.empty_like(value, device="cpu")
    differences.unexpected.extend(f"{name} of the model" for name in saved if name not in mine)
    return targets
