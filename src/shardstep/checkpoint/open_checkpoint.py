"""A checkpoint directory that is open for reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardstep.checkpoint.keys import GROUPS, MODEL, OPTIM, STATE
from shardstep.checkpoint.storage import dcp_calls
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.checkpoint.storage.reader import Reader, SafeLoadPlanner, put

# Not damage: these go on to the user as they are.
_NO_DAMAGE = (CheckpointError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)


class Checkpoint:
    """What a checkpoint directory holds, and reading any part of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reader = Reader(directory)
        self.metadata: Metadata = self.reader.read_metadata()
        self.entries = self.metadata.state_dict_metadata
        self.paths = self.metadata.planner_data or {fqn: (fqn,) for fqn in self.entries}

    def digest(self) -> str:
        """The same on all ranks that read the same checkpoint."""
        return manifests.digest_of(self.directory / manifests.METADATA_NAME)

    def tensor_at(self, fqn: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of the tensor under a key; None for any other value."""
        entry = self.entries[fqn]
        return (tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None

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
        try:
            dcp_calls.load(form, self.reader, planner or SafeLoadPlanner())
        except CheckpointException as wrapped:
            error = dcp_calls.inner_error(wrapped)
            if isinstance(error, _NO_DAMAGE):
                raise error from None
            raise CheckpointError(f"{self.directory} cannot be read: {error}") from error

    def groups(self) -> list[dict[str, Any]]:
        """The saved parameter groups."""
        form = self.skeleton(OPTIM, GROUPS)
        found = form.get(OPTIM, {}).get(GROUPS)
        if not isinstance(found, list):
            raise CheckpointError(
                f"{self.directory} expects an optimizer under the key {OPTIM!r}, with {GROUPS}, but has "
                f"{sorted({str(path[0]) for path in self.paths.values()})}. (A flattened optimizer state dict "
                "is read by torch's set_optimizer_state_dict.)"
            )
        self.read_into(form)
        return form[OPTIM][GROUPS]

    def states(self) -> dict[str, dict[tuple[Any, ...], Any]]:
        """The saved state: by parameter, then by the path below it, DCP's description."""
        found: dict[str, dict[tuple[Any, ...], Any]] = {}
        for fqn, entry in self.entries.items():
            path = self.paths[fqn]
            if path[:2] == (OPTIM, STATE) and len(path) > 2:
                found.setdefault(path[2], {})[path[3:]] = entry
        return found

    @property
    def has_model(self) -> bool:
        return any(path[0] == MODEL for path in self.paths.values())

    def model_entries(self) -> dict[str, Any]:
        """The saved model: by name, DCP's description; None for a value that is a tree, which has several."""
        found: dict[str, Any] = {}
        for fqn, entry in self.entries.items():
            root, *path = map(str, self.paths[fqn])
            if root == MODEL:
                found[path[0] if path else ""] = entry if len(path) == 1 else None
        return found

    def parameter_names(self) -> list[str]:
        """The names of the optimizer's parameters, if the manifest has them."""
        return list(self.reader.manifest.parameters) if self.reader.manifest is not None else []

    def shape_of_parameter(self, name: str) -> tuple[int, ...] | None:
        """The shape that a parameter had when it was saved: as the manifest says, or the model saved with it."""
        manifest = self.reader.manifest
        if manifest is not None and name in manifest.parameters:
            return manifest.parameters[name]
        entry = self.entries.get(f"{MODEL}.{name}")
        return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None

    def order_of(self, *path: Any) -> list[int] | None:
        """In which order the dimensions of a state tensor lay in memory, if that was not their own."""
        manifest = self.reader.manifest
        orders = (manifest.orders if manifest is not None else None) or {}
        return orders.get(".".join(map(str, (OPTIM, STATE, *path))))
