"""The files of a checkpoint: a manifest with the size and checksum of each, reading them, and the directories.

For programs without an optimizer, such as the command line: ``Checkpoint(directory)`` opens one for reading
(``entries``, ``paths``, ``skeleton``, ``read_into``), ``problems(directory)`` reads every byte of one, ``newest_first``
and ``explain_missing`` look into a directory of checkpoints, ``open_regular`` opens somebody else's file. (To write one
from plain state dicts: ``saving.save_alone``.) What is wrong with files is a ``CheckpointError`` that names the file.

Checksums are CRC-32 of whole files, computed while a file is written: they find damage and cost a tenth of what SHA-256
does. Forgery they do not find, and neither would a SHA-256 that whoever changes a file can change with it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardstep.checkpoint import metadata as dcp_metadata
from shardstep.checkpoint import old

MANIFEST, METADATA = "shardstep.json", ".metadata"
OPTIM, MODEL, EXTRA, STATE, GROUPS = "optim", "model", "extra", "state", "param_groups"
_VERSION = 2
_MOST_BYTES = 2**30  # of a manifest and of metadata: a thousand times those of a large checkpoint
_WINDOW = 2**20

Progress = Callable[[int], None]  # called with the bytes that were read or written


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used. The message names the file."""


# --- files ------------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> io.FileIO:
    """Open a file to read. CheckpointError for a pipe, a device, a directory: reading those may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"'{path}' is no regular file")
    return io.FileIO(descriptor)


def _read_small(path: Path) -> bytes:
    """The content of a manifest or of metadata."""
    with open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size > _MOST_BYTES:
            raise CheckpointError(f"'{path}' has more than {_MOST_BYTES} bytes, which none of a checkpoint has")
        return stream.readall()


class _Summed(io.FileIO):
    """A file that is written and summed up, below Python's buffer."""

    crc, size = 0, 0
    failure: OSError | None = None  # torch.save raises another error then
    progress: Progress | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, self.name)
            raise
        self.crc, self.size = zlib.crc32(memoryview(data)[:count], self.crc), self.size + count
        if self.progress is not None:
            self.progress(count)
        return count


class CheckedFileSystem(FileSystem):
    """DCP's access to files: sums up what is written, and reads regular files only."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.written: dict[str, FileSum] = {}
        self._progress = progress  # of what is written

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        if mode != "wb":
            with io.BufferedReader(open_regular(path)) as stream:
                yield stream
            return
        summed = _Summed(path, "wb")
        summed.progress = self._progress
        try:
            with io.BufferedWriter(summed, _WINDOW) as stream:
                yield stream
        except (OSError, RuntimeError):
            if summed.failure is not None:
                raise summed.failure from None
            raise
        self.written[path.name] = FileSum(summed.size, f"{summed.crc:08x}")


class FileSum(NamedTuple):
    """What a file is expected to be."""

    size: int  # -1: not known
    crc32: str  # in hexadecimal; empty: ``old`` says what is
    old: Any = None


def problem_in_file(path: Path, expected: FileSum, progress: Progress | None = None) -> str:
    """What is wrong with a file, of which every byte is read; empty if nothing is."""
    try:
        with open_regular(path) as stream:
            if os.fstat(stream.fileno()).st_size != expected.size >= 0:
                return (
                    f"'{path}' has {os.fstat(stream.fileno()).st_size} bytes, not the {expected.size} that were saved"
                )
            if expected.old is not None:
                return "" if old.is_sound(stream, expected.old, progress) else f"'{path}' is damaged"
            crc, window = 0, memoryview(bytearray(_WINDOW))
            while count := stream.readinto(window):
                crc = zlib.crc32(window[:count], crc)
                if progress is not None:
                    progress(count)
    except (CheckpointError, OSError) as error:
        return str(error)
    return "" if f"{crc:08x}" == expected.crc32 else f"'{path}' is damaged: its checksum differs from the manifest's"


# --- the manifest -----------------------------------------------------------------------------------------------------


class Manifest(NamedTuple):
    """What a checkpoint directory holds, and of which parameters."""

    sequence: int  # the newest checkpoint of a directory has the highest
    files: dict[str, FileSum]
    parameters: dict[str, tuple[int, ...]]  # of the optimizer: name -> shape
    orders: dict[str, list[int]]  # of tensors whose dimensions are stored in another order, by key


def _digest(content: dict[str, Any]) -> str:
    """Of the manifest itself, without this line."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(directory: Path, manifest: Manifest) -> None:
    content = {
        "version": _VERSION,
        "sequence": manifest.sequence,
        "parameters": manifest.parameters,
        "orders": manifest.orders,
        "files": {name: {"bytes": file.size, "crc32": file.crc32} for name, file in manifest.files.items()},
    }
    with open(directory / MANIFEST, "wb") as stream:
        stream.write(json.dumps({**content, "sha256": _digest(content)}).encode())
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, None if it has none. CheckpointError if it cannot be read."""
    path = directory / MANIFEST
    if not os.path.lexists(path):
        return None
    data = _read_small(path)
    try:
        content = json.loads(data)
        if content.pop("sha256") != _digest(content):
            raise ValueError("its own checksum differs")
        if content["version"] not in (1, _VERSION):
            raise ValueError(f"it has version {content['version']}, and {_VERSION} is the last one known")
        if content["version"] == 1:
            files = {name: FileSum(*rest) for name, rest in old.files_in(content, METADATA).items()}
        else:
            files = {name: FileSum(int(row["bytes"]), str(row["crc32"])) for name, row in content["files"].items()}
        for name in files:
            if not dcp_metadata.is_plain_name(name):
                raise ValueError(f"it speaks of a file outside the directory: {name[:100]!r}")
        parameters = {str(name): tuple(map(int, shape)) for name, shape in content["parameters"].items()}
        orders = {str(key): [int(dim) for dim in order] for key, order in content.get("orders", {}).items()}
        return Manifest(int(content["sequence"]), files, parameters, orders)
    except Exception as error:  # of somebody else's file anything can be wrong
        raise CheckpointError(f"'{path}' cannot be read as a manifest of shardstep: {error!r:.300}") from error


def _problems_of_sizes(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with a directory as far as names and sizes tell."""
    for name, file in manifest.files.items():
        path = directory / name
        if not path.is_file():
            yield f"'{path}' is missing" if not path.exists() else f"'{path}' is no regular file"
        elif path.stat().st_size != file.size >= 0:
            yield f"'{path}' has {path.stat().st_size} bytes, not the {file.size} that were saved"


# --- reading ----------------------------------------------------------------------------------------------------------


class Reader(dcp.FileSystemReader):
    """DCP's reader, without its pickles: nothing of a checkpoint directory can run code.

    ``load`` uses it. It is public for those who call DCP themselves and read what somebody else gave them.

    Args:
        path: the checkpoint directory.

    Examples:
        ```python
        dcp.load(form, storage_reader=checkpoint.Reader(directory), planner=checkpoint.SafeLoadPlanner())
        ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = CheckedFileSystem()
        self.manifest: Manifest | None = None  # there after read_metadata, if the directory has one
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id is not None:
            self._metadata = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, read once. CheckpointError names the file that is missing or wrong."""
        if self._metadata is None:
            self._metadata = self._read_metadata(Path(self.path))
        return self._metadata

    def _read_metadata(self, directory: Path) -> Metadata:
        path = directory / METADATA
        if not directory.is_dir():
            what = "is no directory" if directory.exists() else "does not exist"
            raise CheckpointError(f"'{directory}' {what}. Pass the directory of a checkpoint.")
        if not is_checkpoint(directory):
            raise CheckpointError(explain_missing(directory))
        self.manifest = read_manifest(directory)
        expected = self.manifest.files.get(METADATA) if self.manifest is not None else None
        if self.manifest is not None:
            for problem in _problems_of_sizes(directory, self.manifest):
                raise CheckpointError(problem)
        if expected is not None and (problem := problem_in_file(path, expected)):
            raise CheckpointError(problem)
        try:
            metadata = dcp_metadata.read(_read_small(path))
        except dcp_metadata.MetadataError as error:
            raise CheckpointError(f"'{path}' cannot be read as the metadata of a DCP checkpoint: {error}") from error
        self._check_places(metadata, directory)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _check_places(self, metadata: Metadata, directory: Path) -> None:
        """Every item has bytes of its own in a file that is there: else little could claim to be much."""
        used: dict[str, int] = {}
        for info in metadata.storage_data.values():
            used[info.relative_path] = max(used.get(info.relative_path, 0), info.offset + info.length)
        lengths = dict.fromkeys(used, 0)
        for info in metadata.storage_data.values():
            lengths[info.relative_path] += info.length
        for name, most in used.items():
            path = directory / name
            if self.manifest is not None and name not in self.manifest.files:
                raise CheckpointError(f"'{directory / METADATA}' speaks of {name!r}, which the manifest does not know")
            if not path.is_file():
                raise CheckpointError(f"'{path}' is missing, or no regular file")
            if max(most, lengths[name]) > path.stat().st_size:
                raise CheckpointError(f"'{path}' is shorter than what it should hold. It is truncated.")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except (CheckpointError, MemoryError, torch.OutOfMemoryError):  # lack of memory is not damage
            raise
        except Exception as error:  # torch.load raises anything for what it did not write
            names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
            raise CheckpointError(
                f"'{Path(self.path) / names[0]}'{' or another file of it' if len(names) > 1 else ''} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error

    def damaged_items(self, keys: Collection[str], progress: Progress | None = None) -> Iterator[str]:
        """What is wrong with some items, according to the checksums that their own archives have."""
        storage = self.read_metadata().storage_data.items()
        infos = [info for index, info in storage if index.fqn in keys]
        for info in sorted(infos, key=lambda info: (info.relative_path, info.offset)):
            path = Path(self.path) / info.relative_path
            try:
                with io.BufferedReader(open_regular(path)) as stream:
                    stream.seek(info.offset)
                    damaged = zipfile.ZipFile(io.BytesIO(stream.read(info.length))).testzip()
            except Exception as error:  # zipfile raises anything for what is no archive
                damaged = f"{type(error).__name__}: {error}"
            if damaged is not None:
                end = info.offset + info.length
                yield f"'{path}' is damaged between bytes {info.offset} and {end} ({damaged})"
            if progress is not None:
                progress(info.length)


class SafeLoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, without its pickles: what is no tensor is read with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key, found = read_item.dest_index.fqn, torch.load(value, map_location="cpu", weights_only=True)
        if self.flatten_state_dict:
            put(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set ``tree[path[0]][path[1]]...``, making dicts and lists on the way."""
    for position, part in enumerate(path):
        if isinstance(tree, list):
            tree.extend([None] * (part + 1 - len(tree)))
        if position == len(path) - 1:
            tree[part] = value
        elif (tree[part] if isinstance(tree, list) else tree.get(part)) is None:
            tree[part] = [] if isinstance(path[position + 1], int) else {}
        tree = tree[part]


class Checkpoint:
    """A checkpoint directory that is open for reading."""

    def __init__(self, directory: Path, reader: type[Reader] = Reader) -> None:
        self.directory = directory
        self.reader = reader(directory)
        self.metadata = self.reader.read_metadata()
        self.manifest = self.reader.manifest
        self.entries = self.metadata.state_dict_metadata  # by key, DCP's description
        self.paths = self.metadata.planner_data or {key: (key,) for key in self.entries}
        self.orders = self.manifest.orders if self.manifest is not None else {}

    def digest(self) -> str:
        """The same on all ranks that read the same checkpoint."""
        return hashlib.sha256(_read_small(self.directory / METADATA)).hexdigest()

    def model_entries(self) -> dict[str, Any]:
        """The saved model: by name, DCP's description; None for a value that is a tree, which has several."""
        found: dict[str, Any] = {}
        for key, entry in self.entries.items():
            root, *path = map(str, self.paths[key])
            if root == MODEL:
                found[path[0] if path else ""] = entry if len(path) == 1 else None
        return found

    def skeleton(self, *root: str) -> dict[str, Any]:
        """The part of the tree under ``root``, with tensors to read into and None for everything else."""
        tree: dict[str, Any] = {}
        for key, entry in self.entries.items():
            path = self.paths[key]
            if path[: len(root)] == root:
                is_tensor = isinstance(entry, TensorStorageMetadata)
                put(tree, path, torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None)
        return tree

    def read_into(self, form: dict[str, Any], planner: LoadPlanner | None = None) -> None:
        """Fill a tree of tensors (or shards, or None for what is no tensor) with what is under the same keys."""
        if not form:
            return
        planner = planner or SafeLoadPlanner()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
                if torch.__version__ >= "2.7":
                    dcp.load(form, storage_reader=self.reader, planner=planner, no_dist=True)
                else:  # in torch 2.6 only the function below takes no_dist
                    state_dict_loader._load_state_dict(form, self.reader, no_dist=True, planner=planner)
        except CheckpointException as wrapped:
            error = inner_error(wrapped)
            if isinstance(error, (CheckpointError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)):
                raise error from None
            raise CheckpointError(f"'{self.directory}' cannot be read: {error}") from error

    def problems(self, share: int = 0, shares: int = 1, progress: Progress | None = None) -> Iterator[str]:
        """What is wrong with its files, of which every byte is read. ``share``: with the files of one of the shares."""
        if self.manifest is None:
            yield from self.reader.damaged_items(set(sorted(self.entries)[share::shares]), progress)
            return
        for name, file in sorted(self.manifest.files.items())[share::shares]:
            if problem := problem_in_file(self.directory / name, file, progress):
                yield problem


def inner_error(error: BaseException) -> BaseException:
    """The error inside the exception that DCP wraps around it."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def problems(directory: Path, progress: Progress | None = None) -> list[str]:
    """What is wrong with a checkpoint: every byte of it is read."""
    try:
        return list(Checkpoint(directory).problems(progress=progress))
    except CheckpointError as error:
        return [str(error)]


# --- directories ------------------------------------------------------------------------------------------------------

# Endings of names that nobody takes for a checkpoint: being written; the one before, until the new one has its name;
# being deleted. (0.2 also left files that end in ".claim".)
_SAVING, _REPLACED, _DELETED, _CLAIM = ".saving", ".replaced", ".deleted", ".claim"
_FORGOTTEN = 24 * 3600.0  # seconds after which another save's leftovers count as abandoned
_IDLE = 600.0  # the same, for what was to become the checkpoint that is saved now
_ATTEMPTS = 20  # to give a checkpoint a name that another job is giving to its own


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory has any part of a checkpoint: one that lacks another part is damaged."""
    return any(name in (METADATA, MANIFEST) or name.endswith(".distcp") for name in os.listdir(directory))


class Found(NamedTuple):
    """A checkpoint in a directory of checkpoints."""

    path: Path
    manifest: Manifest | None  # None: DCP wrote it, or the manifest is lost
    problem: str = ""  # why it cannot be used, as far as names, sizes and the manifest tell


def newest_first(parent: Path) -> list[Found]:
    """All checkpoints in ``parent``, the newest first, damaged or not. Links count for nothing.

    Their numbers say which is newer. One that has none (DCP wrote it) counts as newer than those with a number that
    were written before it.
    """
    found = [_look_at(path) for path in sorted(parent.iterdir())] if parent.is_dir() else []
    known = [one for one in found if one is not None]
    numbered = [(one.manifest.sequence, _written_at(one.path)) for one in known if one.manifest is not None]

    def age(one: Found) -> tuple[float, float]:
        at = _written_at(one.path)
        if one.manifest is not None:
            return one.manifest.sequence, at
        return max((number for number, written in numbered if written <= at), default=0) + 0.5, at

    return sorted(known, key=age, reverse=True)


def _look_at(path: Path) -> Found | None:
    if path.is_symlink() or not path.is_dir() or path.name.endswith((_SAVING, _DELETED)):
        return None
    if path.name.endswith(_REPLACED) and _named_again(path).exists():
        return None  # one that was being replaced when the power went counts as long as the new one is not there
    try:
        if not is_checkpoint(path):
            return None
        manifest = read_manifest(path)
    except (CheckpointError, OSError) as error:
        return Found(path, None, str(error))
    wrong = _problems_of_sizes(path, manifest) if manifest is not None else iter(())
    return Found(path, manifest, next(wrong, ""))


def _named_again(replaced: Path) -> Path:
    return replaced.with_name(replaced.name[1:].removesuffix(_REPLACED))


def _written_at(directory: Path) -> float:
    with suppress(OSError):
        return (directory / METADATA).stat().st_mtime
    return 0.0


def explain_missing(directory: Path) -> str:
    """What to say of a directory that was taken for a checkpoint."""
    with suppress(OSError):
        for one in newest_first(directory):
            return f"'{directory}' is a directory of checkpoints. Pass one of them; the newest is '{one.path}'"
    return f"'{directory}' holds no checkpoint (no {METADATA}). Check the path."


def aside_of(directory: Path, token: str) -> Path:
    """Where a checkpoint is written before it gets its name: beside it, so that a rename is enough.

    ``token``: of this save. Another job may save under the same name at the same time: each is whole, the last stays.
    """
    return _sibling(directory, f".{token}{_SAVING}")


def prepare(directory: Path, aside: Path) -> None:
    """Make the directory beside. What an interrupted save left there is deleted, once nothing is written to it."""
    if directory.is_symlink() or (directory.exists() and not _is_replaceable(directory)):
        raise FileExistsError(
            "directory expects a new path, an empty directory or a checkpoint, which is replaced, but "
            f"'{directory}' is something else. Choose another."
        )
    leftover = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]+\{_SAVING}")
    for path in directory.parent.iterdir() if directory.parent.is_dir() else ():
        if leftover.fullmatch(path.name):
            _delete_if_older(path, _IDLE)
    there = next(parent for parent in aside.parents if parent.exists())
    aside.mkdir(parents=True)
    for parent in aside.parents:  # a new directory survives a power failure if its parent was flushed
        _flush(parent)
        if parent == there:
            break


def _is_replaceable(directory: Path) -> bool:
    return directory.is_dir() and ((directory / METADATA).exists() or not any(directory.iterdir()))


def next_sequence(parent: Path) -> int:
    """A number higher than that of every checkpoint in ``parent``."""
    found = (one.manifest for one in newest_first(parent))
    return max((manifest.sequence for manifest in found if manifest is not None), default=0) + 1


def commit(aside: Path, directory: Path) -> None:
    """Give a complete checkpoint its name. From then on it survives a power failure.

    At every moment there is a complete one: the old one under its name, or the old one set aside, or the new one.
    """
    replaced = _sibling(directory, _REPLACED)
    _flush(aside)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if directory.exists():
                _delete(replaced)
                os.rename(directory, replaced)
            os.rename(aside, directory)
            break
        except OSError:  # another job has moved what was there, or given the name to its own
            if attempt == _ATTEMPTS or not aside.exists():
                raise
    _flush(directory.parent)
    with suppress(OSError):  # the new checkpoint is complete, even if the old one cannot be deleted
        _delete(replaced)


def discard(aside: Path) -> None:
    """Delete what was written aside, after a failure."""
    with suppress(OSError):
        _delete(aside)


def prune(parent: Path, keep: int, but: Path) -> None:
    """Delete all complete checkpoints in ``parent`` but the newest ``keep``, and what interrupted saves left.

    Only what shardstep has saved is counted and deleted: a directory without a manifest is somebody else's.
    """
    with suppress(OSError):  # what cannot be deleted now can be deleted next time
        complete = [one.path for one in newest_first(parent) if one.manifest is not None and not one.problem]
        for path in complete[keep:]:
            if path != but:
                _delete(path)
        for path in parent.glob(f".*{_DELETED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in parent.glob(f".*{_REPLACED}"):
            if _named_again(path).exists() and not path.is_symlink():
                _delete(path)
        for path in [*parent.glob(f".*{_SAVING}"), *parent.glob(f".*{_CLAIM}")]:
            _delete_if_older(path, _FORGOTTEN)


def _sibling(directory: Path, ending: str) -> Path:
    return directory.with_name(f".{directory.name}{ending}")


def _delete(directory: Path) -> None:
    """Delete a directory, if it is there. It loses its name first: half a checkpoint must not look like a whole one."""
    if directory.exists() and not directory.is_symlink():
        doomed = _sibling(directory, f".{secrets.token_hex(4)}{_DELETED}")
        os.rename(directory, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # a later prune deletes what is in use now


def _delete_if_older(path: Path, seconds: float) -> None:
    """Delete what an interrupted save left: a younger one may belong to a save that is going on."""
    with suppress(FileNotFoundError):  # another job has given it its name, or deleted it
        written = max((inner.stat().st_mtime for inner in path.iterdir()), default=0.0) if path.is_dir() else 0.0
        if time.time() - max(written, path.stat().st_mtime) > seconds:
            _delete(path) if path.is_dir() else path.unlink(missing_ok=True)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
