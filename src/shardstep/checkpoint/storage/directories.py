"""Checkpoint directories: written aside, renamed when complete, found again, and deleted when there are too many.

A directory under its own name is complete. What is being written has a name that nobody takes for a checkpoint.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import Author, CheckpointError, Manifest

# Endings of names that nobody takes for a checkpoint: being written; the one before, until the new one has its name;
# being deleted.
_SAVING, _REPLACED, _DELETED = ".saving", ".replaced", ".deleted"
CLAIM = ".claim"  # and of a file that says who is saving, see claims.py
_FORGOTTEN = 24 * 3600.0  # seconds after which another save's leftovers count as abandoned
_IDLE = 600.0  # the same, for what was to become the checkpoint that is saved now
_ATTEMPTS = 20  # to give a checkpoint a name that another job is giving to its own


def aside_of(directory: Path, token: str) -> Path:
    """Where the checkpoint is written before it gets its name: beside it, so that a rename is enough.

    ``token``: of this save. Another job may save under the same name at the same time: each is whole, the last stays.
    """
    return _sibling(directory, f".{token}{_SAVING}")


def prepare(directory: Path, token: str) -> None:
    """Make the directory beside. What an interrupted save left there is deleted, once nothing is written to it."""
    if directory.is_symlink() or (directory.exists() and not _is_replaceable(directory)):
        raise FileExistsError(
            f"directory expects a new path, an empty directory or a checkpoint, which is replaced, but {directory} "
            "is something else. Choose another."
        )
    aside, leftover = aside_of(directory, token), re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]+\{_SAVING}")
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
    return directory.is_dir() and ((directory / manifests.METADATA_NAME).exists() or not any(directory.iterdir()))


def commit(aside: Path, directory: Path) -> None:
    """Give a complete checkpoint its name. From then on it survives a power failure.

    At every moment there is a complete one: the old one under its name, or the old one set aside, or the new one.
    """
    old = _sibling(directory, _REPLACED)
    _flush(aside)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if directory.exists():
                _delete(old)
                os.rename(directory, old)
            os.rename(aside, directory)
            break
        except OSError:  # another job has moved what was there, or given the name to its own
            if attempt == _ATTEMPTS or not aside.exists():
                raise
    _flush(directory.parent)
    with suppress(OSError):  # the new checkpoint is complete, even if the old one cannot be deleted
        _delete(old)


def _sibling(directory: Path, ending: str) -> Path:
    return directory.with_name(f".{directory.name}{ending}")


def _delete(directory: Path) -> None:
    """Delete a directory, if it is there. It loses its name first: half a checkpoint must not look like a whole one."""
    if directory.exists():
        doomed = _sibling(directory, f".{secrets.token_hex(4)}{_DELETED}")
        os.rename(directory, doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # a later prune deletes what is in use now


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(aside: Path) -> None:
    """Delete what was written aside, after a failure."""
    with suppress(OSError):
        _delete(aside)


def _delete_if_older(path: Path, seconds: float) -> None:
    """Delete what an interrupted save left: a younger one may belong to a save that is going on."""
    with suppress(FileNotFoundError):  # another job has given it its name, or deleted it
        written = max((inner.stat().st_mtime for inner in path.iterdir()), default=0.0) if path.is_dir() else 0.0
        if time.time() - max(written, path.stat().st_mtime) > seconds:
            _delete(path) if path.is_dir() else path.unlink(missing_ok=True)


def next_sequence(parent: Path) -> int:
    """A number higher than that of every checkpoint in ``parent``."""
    return max((manifests.sequence_of(path) for path in parent.iterdir()), default=0) + 1


def _candidates(parent: Path) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name.endswith((_SAVING, _DELETED)) or not path.is_dir():
            continue
        try:
            manifest = manifests.read(path)
        except CheckpointError:
            continue
        if manifest is not None:
            yield path, manifest


def newest_first(parent: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints in ``parent`` that are complete, by names and sizes."""
    return [pair for pair in _by_age(parent) if not any(manifests.quick_problems(*pair))]


def _by_age(parent: Path) -> list[tuple[Path, Manifest]]:
    """All that have a manifest, the newest first.

    One that was being replaced when the power went counts by its own name again.
    """
    found = []
    for path, manifest in _candidates(parent):
        if path.name.endswith(_REPLACED):
            original = path.with_name(path.name[1:].removesuffix(_REPLACED))
            if original.exists():
                continue
        found.append((path, manifest))
    return sorted(found, key=lambda pair: pair[1].sequence, reverse=True)


def to_try(parent: Path) -> tuple[list[str], list[str]]:
    """The names of all checkpoints, the newest first, damaged or not; and why others are not listed."""
    wrong = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.is_dir() and not path.name.endswith((_SAVING, _DELETED)):
            try:
                manifests.read(path)
            except CheckpointError as error:
                wrong.append(str(error))
    return [path.name for path, _ in _by_age(parent)], wrong


def problems(directory: Path, manifest: Manifest, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """What is wrong with a checkpoint. Reads every byte of it, unless sizes are wrong already."""
    quick = list(manifests.quick_problems(directory, manifest))
    yield from quick
    if not quick:
        for name, file in manifest.files.items():
            yield from manifests.problems_in_file(directory / name, file, progress)


def _is_of_another(one: Author | None, other: Author | None) -> bool:
    return one is not None and other is not None and one.run == other.run and one.rank != other.rank


def prune(parent: Path, keep: int, but: Path, author: Author | None = None) -> None:
    """Delete all complete checkpoints in ``parent`` but the newest ``keep``, and what interrupted saves left.

    Those that another rank of the run of ``author`` saved are not counted, and left alone.
    """
    with suppress(OSError):  # what cannot be deleted now can be deleted next time
        mine = [path for path, manifest in newest_first(parent) if not _is_of_another(manifest.author, author)]
        for path in mine[keep:]:
            if path != but:
                _delete(path)
        for path in parent.glob(f".*{_DELETED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in parent.glob(f".*{_REPLACED}"):
            if path.with_name(path.name[1:].removesuffix(_REPLACED)).exists():
                _delete(path)
        for path in [*parent.glob(f".*{_SAVING}"), *parent.glob(f".*{CLAIM}")]:
            _delete_if_older(path, _FORGOTTEN)


def may_be_checkpoint(names: Iterable[str]) -> bool:
    """A checkpoint that lacks a part is damaged. A directory without any part is no checkpoint."""
    known = (manifests.METADATA_NAME, manifests.FILE_NAME)
    return any(name in known or name.endswith(".distcp") for name in names)


def no_checkpoint(directory: Path) -> str:
    """What to say of a directory that was taken for a checkpoint."""
    newest = _newest_in(directory)
    if newest is not None:
        return (
            f"expects one checkpoint but {directory} is a directory of checkpoints. Pass one of them; the newest is "
            f"{newest}"
        )
    return (
        f"expects a checkpoint directory but {directory} holds no checkpoint (no {manifests.METADATA_NAME}). Check the "
        "path."
    )


def _newest_in(directory: Path) -> Path | None:
    """The newest checkpoint in it: by number, or of those that DCP wrote by age."""
    try:
        numbered = newest_first(directory)
        if numbered:
            return numbered[0][0]
        written = [path / manifests.METADATA_NAME for path in directory.iterdir() if not path.name.startswith(".")]
        found = [(path.stat().st_mtime, path.parent) for path in written if path.is_file()]
    except OSError:  # one of them is not readable; this is only for a suggestion
        return None
    return max(found)[1] if found else None
