"""Paths from the command line: they are checked before anything is read or written.

Everything here raises ValueError, for a wrong argument. What is wrong inside a checkpoint is not checked here.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardstep.checkpoint.storage import directories
from shardstep.checkpoint.storage import manifest as manifests


def check_checkpoint(path: Path) -> None:
    """Check that it is the directory of one checkpoint, and readable."""
    kind = _kind(path)
    if kind == "directory":
        names = _names_in(path)
        if not directories.may_be_checkpoint(names):
            raise ValueError(directories.no_checkpoint(path))
        for name in names:
            _check_readable(path / name)
    elif kind == "missing":
        raise ValueError(f"expects a checkpoint directory but {path} does not exist. Check the path.")
    else:
        inside = (path.parent / manifests.METADATA_NAME).exists()
        remedy = f"Pass its directory, {path.parent}." if inside else "Pass the directory of a checkpoint."
        raise ValueError(f"expects a checkpoint directory but {path} is a file. {remedy}")


def check_source_file(path: Path) -> None:
    """Check that there is a readable file."""
    kind = _kind(path)
    if kind == "missing":
        raise ValueError(
            f"expects a checkpoint directory, or a file that torch.save wrote, but {path} does not exist. Check the "
            "path."
        )
    if kind != "file":
        raise ValueError(f"expects a checkpoint directory, or a file that torch.save wrote, but {path} is neither.")
    _check_readable(path)


def check_target_file(path: Path) -> None:
    """Check that a file can be written there. An existing one is replaced."""
    _check_parent(path)
    kind = _kind(path)
    if kind == "directory":
        raise ValueError(
            f"expects a file to write but {path} is a directory. Pass the name of a file, such as "
            f"{path / 'optimizer.pt'}."
        )
    if kind == "special":
        raise ValueError(f"expects a file to write but {path} is no ordinary file. Pass the name of a file.")


def check_target_directory(path: Path) -> None:
    """Check that a checkpoint can be made there. An existing one stays: it may hold more than an optimizer."""
    _check_parent(path)
    if _kind(path) in ("file", "special"):
        raise ValueError(f"expects a directory to make but {path} is a file. Choose another path.")
    if _kind(path) == "directory" and (path / manifests.METADATA_NAME).exists():
        raise ValueError(
            f"expects a directory to make but {path} holds a checkpoint. Choose another path, or delete it."
        )


def _check_parent(path: Path) -> None:
    parent = Path(os.path.abspath(path)).parent
    kind = _kind(parent)
    if kind == "missing":
        raise ValueError(f"expects a directory to write to but {parent} does not exist. Make it: mkdir -p {parent}")
    if kind != "directory":
        raise ValueError(f"expects a directory to write to but {parent} is a file. Choose another path.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"expects a directory to write to but {parent} is not writable. Choose another path, or change its "
            "permissions."
        )


def _kind(path: Path) -> str:
    """What is there: directory, file, special or missing."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "missing"
    except NotADirectoryError:
        file = next(parent for parent in path.parents if parent.is_file())
        raise ValueError(f"{path} expects {file} to be a directory but it is a file. Check the path.") from None
    except PermissionError:
        raise ValueError(f"{path} cannot be reached: permission denied. Check the directories above it.") from None
    if stat.S_ISDIR(mode):
        return "directory"
    return "file" if stat.S_ISREG(mode) else "special"


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except PermissionError:
        raise ValueError(f"{directory} cannot be read: permission denied. Check its permissions.") from None


def _check_readable(path: Path) -> None:
    """Try to open it: permission bits may be wrong on a network file system. Whoever reads it finds other failures."""
    try:
        if path.is_file():
            path.open("rb").close()
    except PermissionError:
        raise ValueError(f"{path} cannot be read: permission denied. Check its permissions.") from None
    except OSError:
        return  # whoever reads it says more than could be said here
