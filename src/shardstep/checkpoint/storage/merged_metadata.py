"""What every rank wrote, put together: DCP's metadata of the whole checkpoint. Travels as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardstep.checkpoint.storage import dcp_versions
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import FileList
from shardstep.checkpoint.storage.writer import Written
from shardstep.comm.codec import dtype_name, dtype_of


def to_json(written: Written) -> dict[str, Any]:
    """What one rank wrote."""
    entries: dict[str, Any] = {}
    for result in written.results:
        fqn, info = result.index.fqn, result.storage_data
        entry = written.metadata.state_dict_metadata[fqn]
        if isinstance(entry, BytesStorageMetadata):
            entries[fqn] = {"at": [info.offset, info.length]}
            continue
        described = entries.setdefault(
            fqn, {"dtype": dtype_name(entry.properties.dtype), "size": list(entry.size), "chunks": []}
        )
        sizes = {tuple(chunk.offsets): list(chunk.sizes) for chunk in entry.chunks}
        offsets = tuple(result.index.offset or ())
        described["chunks"].append([list(offsets), sizes[offsets], info.offset, info.length])
    paths = written.metadata.planner_data or {}
    return {
        "file": written.name,
        "list": manifests.to_json(written.file),
        "entries": entries,
        "paths": {fqn: _with_position(path) for fqn, path in paths.items() if fqn in entries},
    }


def _with_position(path: Sequence[Any]) -> list[Any]:
    """Parameter groups are a list, and a rank writes some of it, by position. DCP turns the position into a text."""
    root, of_groups, *rest = [*path, "", ""]
    if (root, of_groups) == ("optim", "param_groups") and rest[0] != "":
        return [root, of_groups, int(rest[0]), *path[3:]]
    return list(path)


def joined(reports: Sequence[dict[str, Any]], directory: Path) -> tuple[Metadata, dict[str, FileList]]:
    """The metadata of everything, and the files. RuntimeError if a tensor is not written whole."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for part in reports:
        paths.update((fqn, tuple(path)) for fqn, path in part["paths"].items())
        for fqn, entry in part["entries"].items():
            if "at" in entry:
                entries[fqn] = BytesStorageMetadata()
                storage[MetadataIndex(fqn)] = _StorageInfo(part["file"], *entry["at"])
                continue
            known = entries.setdefault(
                fqn,
                TensorStorageMetadata(TensorProperties(dtype=dtype_of(entry["dtype"])), torch.Size(entry["size"]), []),
            )
            for offsets, sizes, at, length in entry["chunks"]:
                known.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                index = MetadataIndex(fqn, offsets, len(known.chunks) - 1)
                storage[index] = _StorageInfo(part["file"], at, length)
    _check_whole(entries)
    metadata = dcp_versions.metadata_of(entries, paths, storage, directory)
    return metadata, {part["file"]: manifests.from_json(part["list"]) for part in reports}


def _check_whole(entries: dict[str, Any]) -> None:
    for fqn, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            written = sum(prod(chunk.sizes) for chunk in entry.chunks)
            if written != prod(entry.size) or (not entry.size and len(entry.chunks) != 1):
                raise RuntimeError(
                    f"{fqn} expects all of its {prod(entry.size)} elements on some rank, but the ranks hold {written}. "
                    "The parameter's gradient was missing on some ranks only: make gradients alike before step()."
                )
