"""Checkpoint directories: written aside, renamed when complete, found again, and deleted when there are too many.

A directory under its own name is complete. What is being written has a name that nobody takes for a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from shardstep import manifest as manifests
from shardstep.manifest import CheckpointError, Manifest

_SAVING, _REPLACED = ".saving", ".replaced"


def aside_of(directory: Path) -> Path:
    """Where the checkpoint is written before it gets its name: beside it, so that a rename is enough."""
    return directory.with_name(f".{directory.name}{_SAVING}")


def prepare(directory: Path) -> None:
    """Make the directory beside. What an interrupted save left there is deleted."""
    if directory.exists() and not _is_replaceable(directory):
        raise FileExistsError(
            f"directory expects a new path, an empty directory or a checkpoint, which is replaced, but {directory} "
            "holds something else. Choose another."
        )
    aside = aside_of(directory)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _is_replaceable(directory: Path) -> bool:
    return directory.is_dir() and ((directory / manifests.METADATA_NAME).exists() or not any(directory.iterdir()))


def commit(directory: Path) -> None:
    """Give a complete checkpoint its name. From then on it is there, also after a power failure."""
    aside, old = aside_of(directory), directory.with_name(f".{directory.name}{_REPLACED}")
    _flush(aside)
    if old.exists():
        shutil.rmtree(old)
    if directory.exists():
        os.rename(directory, old)
    os.rename(aside, directory)
    _flush(directory.parent)
    if old.exists():
        shutil.rmtree(old)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(directory: Path) -> None:
    """Delete what was written aside, after a failure."""
    shutil.rmtree(aside_of(directory), ignore_errors=True)


def next_sequence(parent: Path) -> int:
    """A number higher than that of every checkpoint in ``parent``."""
    return max((manifests.sequence_of(path) for path in parent.iterdir()), default=0) + 1


def _candidates(parent: Path) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name.endswith(_SAVING) or not path.is_dir():
            continue
        try:
            manifest = manifests.read(path)
        except CheckpointError:
            continue
        if manifest is not None:
            yield path, manifest


def newest_first(parent: Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints in ``parent`` that are complete as far as names and sizes tell."""
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
    """The names of all checkpoints, the newest first, damaged or not; and what is wrong with those not even listed."""
    wrong = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.is_dir() and not path.name.endswith(_SAVING):
            try:
                manifests.read(path)
            except CheckpointError as error:
                wrong.append(str(error))
    return [path.name for path, _ in _by_age(parent)], wrong


def problems(directory: Path, manifest: Manifest, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """What is wrong with a checkpoint. Reads every byte of it, unless sizes tell already."""
    quick = list(manifests.quick_problems(directory, manifest))
    yield from quick
    if not quick:
        for name, file in manifest.files.items():
            yield from manifests.problems_in_file(directory / name, file, progress)


def prune(parent: Path, keep: int, but: Path) -> None:
    """Delete all complete checkpoints in ``parent`` but the newest ``keep``, and what interrupted saves left."""
    for path, _ in newest_first(parent)[keep:]:
        if path != but:
            shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(f".*{_SAVING}"):
        shutil.rmtree(path, ignore_errors=True)
