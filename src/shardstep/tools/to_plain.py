"""A checkpoint directory to one plain file, a window of the data at a time."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves, tree_map_only

from shardstep.checkpoint import keys
from shardstep.checkpoint.keys import GROUPS, OPTIM, STATE
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.checkpoint.storage import dcp_versions
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.checkpoint.storage.reader import put
from shardstep.checkpoint.storage.torch_file import WINDOW_BYTES, bytes_in, memory_of, patch_checksums
from shardstep.comm.codec import is_live_only
from shardstep.state import subclasses
from shardstep.tools.float32_model import masters_for, wide_dtype
from shardstep.tools.windows import windows_of

Progress = Callable[[int], None]  # called with bytes done


class Source(NamedTuple):
    """A tensor of the checkpoint, and how it is written."""

    fqn: str  # under which key it is
    dtype: torch.dtype
    key: str  # of what is written: two may be read from one, if they are tied


def to_plain(directory: Path, target: Path, key: str, progress: Progress, *, master: bool = False) -> str:
    """Write one plain state dict, as ``torch.save(optimizer.state_dict(), target)`` would, without holding it.

    A skeleton of the file is written first, with holes for the tensors; then they are filled in, part by part. No more
    than a window of the data is in memory.

    Args:
        key: under which it lies. An optimizer gets torch's plain form, with positions for names; anything else is
            written as it was saved. ValueError if there is nothing, or an optimizer only deeper.
        master: it is a model: write it in float32, from the masters that the optimizer's state has.

    Returns:
        A note for the user, if there is something to know.
    """
    checkpoint = Checkpoint(directory)
    root = _root_in(checkpoint, key)
    tree, sources = _plain_tree(checkpoint, root, masters_for(checkpoint, root) if master else None)
    form = _numbered(tree, directory) if root in keys.optimizer_roots(checkpoint.paths.values()) else tree
    beside = target.with_name(f".{target.name}.converting")
    try:
        with open(beside, "wb") as stream, torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(form, stream)
        with open(beside, "r+b") as stream:
            checksums = _fill_all(checkpoint, form, sources, stream, progress)
            os.fsync(stream.fileno())
        patch_checksums(beside, checksums)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    if any(path[-1] == subclasses.MARK for path in checkpoint.paths.values() if path[: len(root)] == root):
        return (
            f"{directory} holds state of tensor subclasses (quantized state, say), which needs their classes. {target} "
            "has the plain tensors that it consists of: ZeroRedundancyOptimizer.load_state_dict takes them. A plain "
            "optimizer loads the directory itself: shardstep.checkpoint.load."
        )
    return ""


def _root_in(checkpoint: Checkpoint, key: str) -> keys.Path:
    """Where the thing is that ``key`` asks for."""
    directory, paths = checkpoint.directory, list(checkpoint.paths.values())
    root, optimizers = keys.root_of(paths, key), keys.optimizer_roots(paths)
    if root in optimizers:
        return root
    if root is not None and keys.is_flattened_optimizer(paths, root):
        raise ValueError(
            f"{directory} has a flattened optimizer state dict under {key!r}, which does not tell the order of its "
            "parameters. Load it with torch's set_optimizer_state_dict and save it without "
            "flatten_optimizer_state_dict."
        )
    inside = [found for found in optimizers if root is not None and found[: len(root)] == root]
    if key == OPTIM or inside:
        what, others = "optimizer", inside or optimizers
    elif root is not None:
        return root
    else:
        what, others = key, keys.deeper(paths, key)
    if others:
        raise ValueError(f"{directory} has {keys.hint(what, others)}")
    there = sorted({str(path[0]) for path in paths})
    raise ValueError(
        f"{directory} expects something to convert under {key!r} but has the keys {there}. Pass one with --key."
    )


def _plain_tree(
    checkpoint: Checkpoint, root: keys.Path, masters: Mapping[str, str] | None
) -> tuple[Any, dict[int, Source]]:
    """What is under ``root``, with tensors that have no memory, and where those are, by their identity.

    Tensors inside of values (a tuple, say) are there: they were read with them. ``masters``: what is read instead of
    what, for a model in float32.
    """
    inside = {fqn: entry for fqn, entry in checkpoint.entries.items() if checkpoint.paths[fqn][: len(root)] == root}
    values: dict[str, Any] = {
        fqn: None for fqn, entry in inside.items() if not isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.read_into(values)
    tree: dict[str, Any] = {}
    sources: dict[int, Source] = {}
    mode = FakeTensorMode()
    for fqn, entry in inside.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype if masters is None else wide_dtype(entry.properties.dtype)
            with mode:
                leaf = torch.empty(entry.size, dtype=dtype)
            sources[id(leaf)] = Source((masters or {}).get(fqn, fqn), dtype, fqn)
        else:  # each tensor with memory of its own: it gets a place of its own
            leaf = tree_map_only(Tensor, lambda tensor: tensor.clone().contiguous(), values[fqn])
        put(tree, checkpoint.paths[fqn][len(root) :], leaf)
    return tree, sources


def _numbered(form: dict[str, Any], directory: Path) -> dict[str, Any]:
    """An optimizer's form with positions for names: torch's plain form."""
    groups = form[GROUPS]
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise CheckpointError(f"{directory} expects parameter groups with the key 'params', but one has none.")
    for key, value in (option for group in groups for option in group.items() if is_live_only(option[1])):
        raise ValueError(
            f"{directory} has the option {key!r} as {value.split(':', 1)[1]!r}, which is no plain data (a member of an "
            "enumeration, a function, a class) and cannot stand in a plain file. Load the directory itself: "
            "shardstep.checkpoint.load."
        )
    names = dict.fromkeys(name for group in groups for name in group["params"])
    numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    states = form.get(STATE, {})
    ordered = sorted(states, key=lambda name: numbers.get(name, len(numbers)))
    return {
        STATE: {numbers.get(name, name): states[name] for name in ordered},
        GROUPS: [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }


def _tensors_in(form: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(form) if isinstance(leaf, Tensor)]


def _fill_all(
    checkpoint: Checkpoint, form: Any, sources: Mapping[int, Source], stream: BinaryIO, progress: Progress
) -> dict[int, int]:
    """Copy the tensors of ``form`` to their places in its file; return the checksums of their bytes by place."""
    places: dict[Source, int] = {}
    checksums: dict[int, int] = {}
    for leaf, place in zip(_tensors_in(form), dcp_versions.places_in(stream.name), strict=True):
        if id(leaf) in sources:
            places[sources[id(leaf)]] = place
        else:
            checksums[place] = zlib.crc32(memory_of(leaf))
            _write_at(stream.fileno(), memory_of(leaf), place)
    for batch in _batches(checkpoint, list(places)):
        checksums.update(_fill(checkpoint, batch, stream.fileno(), places, progress))
    return checksums


def _batches(checkpoint: Checkpoint, sources: list[Source]) -> Iterator[list[Source]]:
    """Tensors that are read together: small ones as many as fit into a window, a large one alone."""
    batch: list[Source] = []
    filled = 0
    for source in sources:
        size = _size_of(checkpoint, source.fqn)
        if batch and filled + size > WINDOW_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(source)
        filled += size
    if batch:
        yield batch


def _size_of(checkpoint: Checkpoint, key: str) -> int:
    entry = checkpoint.entries[key]
    assert isinstance(entry, TensorStorageMetadata)
    return bytes_in(tuple(entry.size), entry.properties.dtype)


def _fill(
    checkpoint: Checkpoint, batch: list[Source], descriptor: int, places: dict[Source, int], progress: Progress
) -> dict[int, int]:
    """Copy tensors to their places in a file; return the checksums of their bytes by place."""
    if len(batch) == 1:
        return {places[batch[0]]: _fill_by_windows(checkpoint, batch[0], descriptor, places[batch[0]], progress)}
    form: dict[str, Any] = {}
    for source in batch:
        entry = checkpoint.entries[source.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        form[source.fqn] = torch.empty(entry.size, dtype=entry.properties.dtype)
    checkpoint.read_into(form)
    checksums = {}
    for source in batch:
        memory = memory_of(form[source.fqn].to(source.dtype))
        checksums[places[source]] = zlib.crc32(memory)
        _write_at(descriptor, memory, places[source])
        progress(len(memory))
    return checksums


def _fill_by_windows(checkpoint: Checkpoint, source: Source, descriptor: int, place: int, progress: Progress) -> int:
    checksum = 0
    for window in windows_of(checkpoint, source.fqn):
        memory = memory_of(window.to(source.dtype))
        checksum = zlib.crc32(memory, checksum)
        _write_at(descriptor, memory, place)
        place += len(memory)
        progress(len(memory))
    return checksum


def _write_at(descriptor: int, memory: memoryview, place: int) -> None:
    while len(memory):
        count = os.pwrite(descriptor, memory, place)
        memory, place = memory[count:], place + count
