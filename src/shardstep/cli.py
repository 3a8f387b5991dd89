"""The command line: inspect checkpoints, verify them, convert them."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shardstep import __version__, convert
from shardstep.checkpoint.export import masters_in
from shardstep.checkpoint.files import (
    METADATA,
    MODEL,
    OPTIM,
    STATE,
    Checkpoint,
    CheckpointError,
    SafeLoadPlanner,
    explain_missing,
    is_checkpoint,
)

_DAMAGED, _WRONG, _INTERRUPTED, _PIPE_CLOSED = 1, 2, 130, 141  # (the last two: 128 and the number of the signal)
_EXIT_CODES = (
    "Exit status: 0 fine; 1 the checkpoint or file is damaged; 2 the command or a path is wrong; 130 interrupted; 141 "
    'output pipe closed. With --json there is one object on standard output, {"error": ...} if the command failed; the '
    "error line is printed to standard error as well."
)
_PATIENCE = 1.0  # seconds of work before progress is shown
_MOST_STEPS = 256  # step counters that inspect reads
_UNREADABLE = "(not plain data)"  # stands for a value that only code could read
_MOST_TEXT = 40  # characters of a value in a table


def main(given: list[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    try:
        try:
            return _run(_parser().parse_args(given))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, while a closed pipe can still be handled
    except BrokenPipeError:
        _silence()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        _tell("interrupted.")
        return _INTERRUPTED
    except OSError as error:
        _silence()
        _tell(f"cannot write the output: {_line(error)}")
        return _WRONG


def _run(args: Namespace) -> int:
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError, ValueError, TypeError, ImportError) as error:
        message = _line(error)
        _tell(message)
        if args.json:
            _print_json({"error": message})
        return _DAMAGED if isinstance(error, CheckpointError) else _WRONG


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"'{error.filename}': {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="shardstep", description="Tools for checkpoint directories of shardstep and DCP.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"shardstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[Namespace], int], text: str) -> ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, epilog=_EXIT_CODES)
        command.add_argument("--json", action="store_true", help="everything, as one JSON object")
        command.set_defaults(run=run)
        return command

    add("inspect", _inspect, "names, shapes, dtypes, bytes, values, step, ranks").add_argument("directory", type=Path)
    add("verify", _verify, "read every byte and compare the checksums").add_argument("directory", type=Path)
    to_and_from = add(
        "convert",
        _convert,
        "DIR to out.pt: one plain state dict, which any torch.optim optimizer loads. DIR to model.safetensors: the "
        "model, as transformers reads it. in.pt to DIR: a checkpoint, from the state dict of a plain optimizer, of "
        "torch's ZeroRedundancyOptimizer (consolidated) or of fairscale's OSS, which are the same. A plain file has no "
        "names, so a checkpoint made of one loads by position.",
    )
    to_and_from.add_argument("source", type=Path, metavar="DIR|in.pt")
    to_and_from.add_argument("target", type=Path, metavar="out.pt|model.safetensors|DIR")
    which = to_and_from.add_mutually_exclusive_group()
    which.add_argument("--part", choices=["optim", "model"], help="which part of DIR (optim; for safetensors: model)")
    which.add_argument(
        "--key",
        help="the place in DIR or in.pt, if it is another one: app.optim for {'app': {'optim': ...}}, a dot for all of "
        "it. An optimizer becomes a plain state dict; anything else (app.model) is written as it was saved",
    )
    to_and_from.add_argument(
        "--master",
        action="store_true",
        help="the model of DIR in float32, from the masters that master_weights=... has kept; what has none is cast",
    )
    to_and_from.add_argument("--force", action="store_true", help="replace what exists at the target")
    to_and_from.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first: in.pt may hold tensors of its classes, if it tells torch that they are safe to load "
        "(torchao.optim does). Nothing is imported because a file asks for it",
    )
    return parser


# --- paths ------------------------------------------------------------------------------------------------------------


def _open(path: Path) -> Checkpoint:
    """The checkpoint in a directory. ValueError or OSError if the path is wrong, CheckpointError if it is damaged."""
    if not path.exists():
        raise ValueError(f"no such directory: '{path}'")
    if not path.is_dir():
        parent = f", '{path.parent}'" if (path.parent / METADATA).exists() else " of a checkpoint"
        raise ValueError(f"'{path}' is a file. Pass the directory{parent}.")
    if not is_checkpoint(path):
        raise ValueError(explain_missing(path))
    for inner in path.iterdir():
        if inner.is_file() and not os.access(inner, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(inner))
    return Checkpoint(path)


def _check_target(path: Path, force: bool, to_directory: bool) -> None:
    parent = Path(os.path.abspath(path)).parent
    if not parent.is_dir():
        raise ValueError(f"no such directory: '{parent}'. Make it: mkdir -p '{parent}'")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))
    if not path.exists() or (to_directory and path.is_dir() and not any(path.iterdir())):
        return
    if to_directory and not (path.is_dir() and is_checkpoint(path)):
        raise ValueError(f"'{path}' exists and is not a checkpoint. Choose another path.")
    if not to_directory and not path.is_file():
        raise ValueError(f"'{path}' is not a regular file. Pass the name of a file, such as 'out.pt'.")
    if not force:
        raise ValueError(f"'{path}' exists. Pass --force to replace it.")


def _files_of(checkpoint: Checkpoint) -> dict[str, int]:
    """The data files, and their sizes."""
    names = sorted({str(info.relative_path) for info in checkpoint.metadata.storage_data.values()})
    return {name: (checkpoint.directory / name).stat().st_size for name in names}


# --- the commands -----------------------------------------------------------------------------------------------------


def _verify(args: Namespace) -> int:
    problems, total = [], 0
    try:
        checkpoint = _open(args.directory)
        total = sum(_files_of(checkpoint).values())
        with _progress("verifying", total) as advance:
            problems += checkpoint.problems(progress=advance)
    except CheckpointError as error:
        problems.append(str(error))
    for problem in problems:
        _tell(problem)
    if args.json:
        _print_json({"directory": str(args.directory), "ok": not problems, "bytes": total, "problems": problems})
    elif not problems:
        print(f"{args.directory} is complete and undamaged ({total:,} bytes)")
    return _DAMAGED if problems else 0


def _convert(args: Namespace) -> int:
    for module in args.imports:
        try:
            import_module(module)
        except Exception as error:  # importing may raise anything
            raise ValueError(f"--import {module} failed: {type(error).__name__}: {error}") from error
    source, target = args.source, Path(os.path.abspath(args.target))
    from_directory = source.is_dir()
    if from_directory:
        total = 3 * sum(_files_of(_open(source)).values())  # read to verify, read, written
        is_model = args.master or target.suffix == convert.SAFETENSORS
        key = args.key or args.part or (MODEL if is_model else OPTIM)
        if args.master and args.part == OPTIM:
            raise ValueError("--master writes a model: leave out --part optim")
    else:
        if not source.is_file():
            missing = "is not a regular file" if source.exists() else "does not exist"
            raise ValueError(f"'{source}' {missing}. Pass a checkpoint directory, or a file of torch.save.")
        for option, given in (("--part", args.part), ("--master", args.master)):
            if given:
                raise ValueError(f"{option} is for checkpoint directories, and '{source}' is a file")
        total, key = source.stat().st_size, args.key or convert.WHOLE
    _check_target(args.target, args.force, to_directory=not from_directory)
    with _progress("converting", total) as advance:
        if from_directory:
            note = convert.to_file(source, target, key, master=args.master, progress=advance)
            size = target.stat().st_size
        else:
            note = convert.to_directory(source, target, key, progress=advance)
            size = sum(_files_of(Checkpoint(target)).values())
    if note:
        _tell(note)
    if args.json:
        _print_json({"source": str(source), "target": str(args.target), "key": key, "bytes": size})
    else:
        print(f"{source} -> {args.target}")
    return 0


def _inspect(args: Namespace) -> int:
    checkpoint = _open(args.directory)
    files, masters, has_checksums = _files_of(checkpoint), masters_in(checkpoint), checkpoint.manifest is not None
    found = (re.search(r"__(\d+)_\d+\.distcp$", name) for name in files)
    ranks = sorted({int(match[1]) for match in found if match})
    entries, steps = _contents_of(checkpoint)
    if args.json:
        told = [entry._asdict() for entry in entries]
        contents = {"directory": str(args.directory), "entries": told, "ranks": ranks, "steps": steps}
        _print_json({**contents, "checksums": has_checksums, "files": files, "masters": len(masters)})
        return 0
    _print_table(["key", "shape", "dtype", "bytes or value", "pieces"], _rows_of(entries))
    tensors = [entry for entry in entries if entry.kind == "tensor"]
    step = " to ".join(f"{step:g}" for step in sorted({*steps[:1], *steps[-1:]})) or "unknown"
    print(f"{len(tensors)} tensors, {sum(entry.bytes for entry in tensors):,} bytes, {len(files)} files")
    print(f"written by ranks {', '.join(map(str, ranks)) or 'unknown'}; step {step}; ", end="")
    print(f"checksums: {'yes' if has_checksums else 'no'}")
    if masters:
        print(f"float32 masters of {len(masters)} parameters: convert --master writes the model from them")
    return 0


class _ShowingPlanner(SafeLoadPlanner):
    """Reads what is plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            super().load_bytes(read_item, value)
            convert.check_size(self.original_state_dict[key], value.getbuffer().nbytes, Path(key))
        except Exception:  # torch.load raises anything
            self.original_state_dict[key] = _UNREADABLE


class _Entry(NamedTuple):
    """What a checkpoint holds under one key."""

    key: str
    kind: str  # "tensor" or "value"
    shape: list[int]
    dtype: str
    bytes: int
    pieces: int
    value: Any


def _contents_of(checkpoint: Checkpoint) -> tuple[list[_Entry], list[float]]:
    """What is under each key, and the steps that the optimizers have made, according to it: usually one number."""
    tensors = {key: entry for key, entry in checkpoint.entries.items() if isinstance(entry, TensorStorageMetadata)}
    steps = [key for key, path in checkpoint.paths.items() if key in tensors and path[-1] == "step" and STATE in path]
    steps = [key for key in steps if math.prod(tensors[key].size) == 1][:_MOST_STEPS]
    form: dict[str, Any] = {key: None for key in checkpoint.entries if key not in tensors}
    form |= {key: torch.empty(tensors[key].size, dtype=tensors[key].properties.dtype) for key in steps}
    checkpoint.read_into(form, _ShowingPlanner())
    entries = []
    for key in sorted(checkpoint.entries):
        if key in tensors:
            shape, dtype, pieces = tensors[key].size, tensors[key].properties.dtype, len(tensors[key].chunks)
            size = math.prod(shape) * dtype.itemsize
            entries.append(_Entry(key, "tensor", list(shape), str(dtype).removeprefix("torch."), size, pieces, None))
        else:
            kind = "" if form[key] is _UNREADABLE else type(form[key]).__name__
            entries.append(_Entry(key, "value", [], kind, 0, 1, form[key]))
    return entries, sorted({float(form[key]) for key in steps})


def _rows_of(entries: list[_Entry]) -> list[list[str]]:
    """A row for every group of entries that are alike and whose keys differ in numbers only: a model's layers."""
    groups: dict[Any, list[_Entry]] = {}
    for entry in entries:
        words = tuple("" if part.isdecimal() else part for part in entry.key.split("."))
        groups.setdefault((words, entry.dtype, *entry.shape, _short(entry.value)), []).append(entry)
    rows = []
    for group in sorted(groups.values(), key=lambda group: group[0].kind):  # tensors first
        first, size = group[0], f"{sum(entry.bytes for entry in group):,}"
        if first.kind == "value":
            rows.append([_key_of(group), "", first.dtype, _short(first.value), ""])
        else:
            shape, pieces = "x".join(map(str, first.shape)) or "scalar", {entry.pieces for entry in group}
            rows.append([_key_of(group), shape, first.dtype, size, _ranges(pieces)])
    return rows


def _key_of(group: list[_Entry]) -> str:
    """One key for all: ``layers.{0-23}.weight (24)``."""
    if len(group) == 1:
        return group[0].key
    columns = [set(column) for column in zip(*(entry.key.split(".") for entry in group), strict=True)]
    parts = [min(column) if len(column) == 1 else f"{{{_ranges(set(map(int, column)))}}}" for column in columns]
    return f"{'.'.join(parts)} ({len(group)})"


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} -> "0-2,5"."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True))


# --- output -----------------------------------------------------------------------------------------------------------


def _tell(message: str) -> None:
    """One line on standard error."""
    print(f"shardstep: {' '.join(message.split())}", file=sys.stderr)


def _print_json(data: Mapping[str, Any]) -> None:
    print(json.dumps(_as_json(data)))


def _as_json(value: Any) -> Any:
    """What JSON has no form for becomes a text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"


def _print_table(headers: list[str], rows: list[list[str]]) -> None:
    cells = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in [headers, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _silence() -> None:
    """Redirect streams that cannot be written to the null device: when Python exits it flushes them again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Once the work has taken a second: a bar on a terminal that has rich, else a line per 10 %, on standard error."""
    started, done, shown, bar = time.monotonic(), 0, 0, None

    def advance(count: int) -> None:
        nonlocal done, shown, bar
        done += count
        if bar is None and time.monotonic() - started < _PATIENCE:
            return
        if bar is None:
            bar = _rich_bar(what, total)
        tenth = min(10 * done // max(total, 1), 10)
        if bar:
            bar.update(bar.task_ids[0], completed=done)
        elif tenth > shown:
            shown = tenth
            _tell(f"{what}: {10 * tenth} %")

    try:
        yield advance
        if bar is not None:
            advance(total - done)
    finally:
        if bar:
            bar.stop()


def _rich_bar(what: str, total: int) -> Any:
    """False if there is no rich, or no terminal to draw on."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return False
    bar = Progress(console=Console(stderr=True))
    if not bar.console.is_terminal:
        return False
    bar.add_task(what, total=total)
    bar.start()
    return bar
