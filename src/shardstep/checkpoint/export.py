"""A checkpoint's model, or any other part of it, as one file: safetensors, or what ``torch.load`` reads.

Files are mapped into memory. Tensors are read into a file without a name beside the one to be written, and from there
into that one, which gets its name when it is complete. So the process holds none of them.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardstep.checkpoint.files import (
    MODEL,
    STATE,
    Checkpoint,
    CheckpointError,
    Progress,
    Reader,
    SafeLoadPlanner,
    open_regular,
)
from shardstep.state.names import clean, saved_names
from shardstep.state.shards import MASTER

Place = tuple[Any, ...]  # where something is in a tree: keys of dicts and positions in lists

_NARROW = (torch.bfloat16, torch.float16)
_LARGE = 2**24  # bytes of an item from which on it is mapped


def export_model(directory: str | os.PathLike[str], file: str | os.PathLike[str], *, master: bool = False) -> None:
    """Write the model of a checkpoint to a file of safetensors, as ``from_pretrained`` of transformers reads it.

    Not collective, and needs no process group. Needs the package safetensors. The checkpoint is verified first.

    Args:
        directory: of one checkpoint.
        file: an existing one is replaced.
        master: write the float32 masters that ``master_weights`` has kept, and all else in 16 bits as float32.
    """
    checkpoint = Checkpoint(Path(os.path.abspath(directory)), MappedReader)
    left_out = write_safetensors(checkpoint, (MODEL,), Path(os.path.abspath(file)), master=master)
    if left_out:
        warnings.warn(f"{file} lacks what is not a tensor: {', '.join(left_out)}", stacklevel=2)


def write_safetensors(
    checkpoint: Checkpoint, root: Place, file: Path, *, master: bool = False, progress: Progress | None = None
) -> list[str]:
    """Write the tensors under ``root``, by their names below it. Returns the names of what is not a tensor."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        text = "writing safetensors needs the package safetensors: pip install 'shardstep[safetensors]'"
        raise ImportError(text) from error
    with replacing(file) as beside:
        beside.touch()
        mode = beside.stat().st_mode
        found = read_part(checkpoint, root, file, master=master, progress=progress)
        values = {clean(".".join(map(str, place))): value for place, value in found.items()}
        if all(name.startswith("module.") for name in values):  # it was saved as DistributedDataParallel has it
            values = {name.removeprefix("module."): value for name, value in values.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if not tensors:
            raise ValueError(f"'{checkpoint.directory}' has no model under {'.'.join(map(str, root))!r}")
        try:
            save_file(tensors, beside, metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else error from error
        beside.chmod(mode)  # safetensors may have made the file anew, for its owner only
    return [name for name in values if name not in tensors]


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name beside a file to write to. What is written gets the file's name if all goes well, and is deleted if not.

    (A save with ``keep`` deletes what a killed process leaves.)
    """
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}.saving")
    try:
        with naming(file):
            yield beside
            with open(beside, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """What fails on the disk names what was to be written, not the hidden names beside it."""
    try:
        yield
    except OSError as error:
        if error.strerror and (error.filename is None or f".{target.name}." in str(error.filename)):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


# --- reading ----------------------------------------------------------------------------------------------------------


def on_disk(kinds: Sequence[tuple[Sequence[int], torch.dtype]], beside: Path) -> list[Tensor]:
    """Tensors whose memory is a file without a name: as large as the disk, and none of the process's own memory."""
    starts = [0]
    for shape, dtype in kinds:
        starts.append(starts[-1] + -(-prod(shape) * dtype.itemsize // 64) * 64)
    with tempfile.TemporaryFile(dir=beside.parent, prefix=f".{beside.name}.") as file:
        os.posix_fallocate(file.fileno(), 0, starts[-1] + 1)  # a disk that is full later would kill the process
        mapped = mmap.mmap(file.fileno(), 0)
    return [
        torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=start).view(tuple(shape))
        if prod(shape)
        else torch.empty(tuple(shape), dtype=dtype)
        for (shape, dtype), start in zip(kinds, starts, strict=False)
    ]


def read_part(
    checkpoint: Checkpoint, root: Place, beside: Path, *, master: bool = False, progress: Progress | None = None
) -> dict[Place, Any]:
    """Everything under ``root``, by its place below it. CheckpointError if any file of the checkpoint is damaged.

    ``beside``: which file the memory of tensors is beside. ``master``: it is a model, wanted in float32.
    """
    for problem in checkpoint.problems(progress=progress):
        raise CheckpointError(problem)
    inside = {key: path for key, path in checkpoint.paths.items() if path[: len(root)] == root}
    kinds = {
        key: (entry.size, torch.float32 if master and entry.properties.dtype in _NARROW else entry.properties.dtype)
        for key, entry in checkpoint.entries.items()
        if key in inside and isinstance(entry, TensorStorageMetadata)
    }
    masters = _masters_under(checkpoint, root, beside) if master else {}
    tensors = dict(zip(kinds, on_disk(list(kinds.values()), beside), strict=True))
    form: dict[str, Any] = {key: None for key in inside if key in checkpoint.entries and key not in kinds}
    for key, tensor in tensors.items():
        form.setdefault(masters.get(key, key), tensor)
    checkpoint.read_into(form, _CountingPlanner(progress))
    for key, tensor in tensors.items():
        source = form[masters.get(key, key)]
        if source is not tensor:  # the same parameter under another name
            tensor.copy_(source)
    return {inside[key][len(root) :]: tensors.get(key, form.get(key)) for key in inside if key in checkpoint.entries}


class _CountingPlanner(SafeLoadPlanner):
    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if self._progress is not None:
            self._progress(tensor.nbytes)


class MappedReader(Reader):
    """Copies large tensors out of mapped files. (``torch.load`` would hold each of them in memory.)"""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        rest = []
        for item in plan.items:
            is_large = item.type == LoadItemType.TENSOR and self.storage_data[item.storage_index].length >= _LARGE
            if is_large and torch.__version__ >= "2.7":  # torch 2.6 does not skip the data
                self._copy(item, planner)
            else:
                rest.append(item)
        return super().read_data(replace(plan, items=rest), planner)

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        path = Path(self.path) / info.relative_path
        with open_regular(path) as stream:
            with torch.serialization.skip_data():
                like = torch.load(self._slice_file(stream, info), map_location="cpu", weights_only=True)
            archive: Any = torch._C.PyTorchFileReader(self._slice_file(stream, info))
            start = archive.get_record_offset("data/0")
            if start + like.untyped_storage().nbytes() > info.length:
                raise CheckpointError(f"'{path}' is damaged: a tensor is larger than what is stored of it")
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        count = like.untyped_storage().nbytes() // like.dtype.itemsize
        flat = torch.frombuffer(mapped, dtype=like.dtype, count=count, offset=info.offset + start)
        tensor = flat.as_strided(like.shape, like.stride(), like.storage_offset())
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths).view(target.shape))
        planner.commit_tensor(item, target)


# --- masters ----------------------------------------------------------------------------------------------------------


def masters_in(checkpoint: Checkpoint) -> dict[str, str]:
    """The float32 masters in a checkpoint: the names of parameters, and the keys of their masters."""
    flattened = re.compile(rf"{STATE}\.(.+)\.{MASTER}")  # as torch's flatten_optimizer_state_dict calls them
    found: dict[str, str] = {}
    for key in checkpoint.entries:
        path = checkpoint.paths[key]
        if path[-1] == MASTER and path[-3:-2] == (STATE,):
            found[str(path[-2])] = key
        elif match := flattened.fullmatch(str(path[-1])):
            found[match[1]] = key
    return found


def _masters_under(checkpoint: Checkpoint, root: Place, beside: Path) -> dict[str, str]:
    """The keys of the tensors of the model under ``root`` that have a master, and the keys of those."""
    entries, masters = checkpoint.entries, masters_in(checkpoint)
    inside = {key: path[len(root) :] for key, path in checkpoint.paths.items() if path[: len(root)] == root}
    model = {".".join(map(str, path)): key for key, path in inside.items() if key in entries}
    found = {model[name]: masters[there] for name, there in saved_names(model, masters).items()}
    where = f"'{checkpoint.directory}'"
    if not found:
        raise ValueError(f"{where} has no float32 masters of the model under {'.'.join(map(str, root))!r}")
    for key, there in found.items():
        sizes = [tuple(getattr(entries[one], "size", ())) for one in (key, there)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{where}: {there} has the shape {sizes[1]}, and its parameter {key} has {sizes[0]}")
    return found | _masters_of_ties(checkpoint, model, found, beside)


def _masters_of_ties(
    checkpoint: Checkpoint, model: Mapping[str, str], found: Mapping[str, str], beside: Path
) -> dict[str, str]:
    """Masters of tied parameters: the optimizer knows one of their names, the model all. They have the same bits.

    That proves nothing for a tensor of one number: the weights of all norms that did not change have the same bits.
    (Anything else with the same bits may have the same master: it rounds to them.)
    """

    def kind(key: str) -> Any:
        entry = checkpoint.entries[key]
        return (entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else (None, None)

    known = checkpoint.manifest.parameters if checkpoint.manifest is not None else {}
    ties = {}
    for name, key in model.items():
        twins = [other for other in found if kind(other) == kind(key)]
        if key in found or name in known or kind(key)[1] not in _NARROW or not twins:
            continue
        form = dict(zip([key, *twins], on_disk([kind(key)] * (len(twins) + 1), beside), strict=True))
        checkpoint.read_into(form)
        bits = {one: tensor.view(torch.int16) for one, tensor in form.items()}
        if bits[key].numel() and bits[key].min() != bits[key].max():
            ties.update((key, found[twin]) for twin in twins if torch.equal(bits[twin], bits[key]))
    return ties
