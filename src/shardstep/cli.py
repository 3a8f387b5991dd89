"""The command line: look into checkpoints, check them, convert them."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardstep import offline
from shardstep.manifest import CheckpointError
from shardstep.offline import Contents

_PATIENCE = 1.0  # seconds of work before a progress bar is shown


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0 fine, 1 the checkpoint is not, 2 the command is not."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except CheckpointError as error:
        print(f"shardstep: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, TypeError) as error:
        print(f"shardstep: {error}", file=sys.stderr)
        return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="shardstep", description="Tools for checkpoint directories of shardstep and DCP.")
    commands = parser.add_subparsers(required=True, metavar="command")
    inspect = commands.add_parser("inspect", help="what is inside: names, shapes, dtypes, bytes, step, writers")
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="everything, as JSON")
    inspect.set_defaults(run=_inspect)
    convert = commands.add_parser(
        "convert",
        help="to one plain file, or back",
        description="DIR to out.pt: one plain state dict, which any torch.optim optimizer loads; no more than 16 MiB "
        "of it is in memory. in.pt to DIR: a checkpoint, from the state dict of a plain optimizer, of torch's "
        "ZeroRedundancyOptimizer (consolidated) or of fairscale's OSS, which are the same. A plain file has "
        "no names, so what comes back loads by position.",
    )
    convert.add_argument("source", type=Path, metavar="DIR|in.pt")
    convert.add_argument("target", type=Path, metavar="out.pt|DIR")
    convert.add_argument("--part", choices=["optim", "model"], default="optim", help="which part of DIR (optim)")
    convert.set_defaults(run=_convert)
    verify = commands.add_parser("verify", help="read every byte and compare the checksums")
    verify.add_argument("directory", type=Path, metavar="DIR")
    verify.set_defaults(run=_verify)
    return parser


def _inspect(args: Namespace) -> int:
    contents = offline.inspect(args.directory)
    if args.json:
        print(json.dumps(_as_json(contents), default=str))
    else:
        _show(contents)
    return 0


def _as_json(contents: Contents) -> dict[str, Any]:
    data = contents._asdict()
    data["entries"] = [entry._asdict() for entry in contents.entries]
    return data


def _show(contents: Contents) -> None:
    tensors = [entry for entry in contents.entries if entry.kind == "tensor"]
    rows = [
        [entry.key, "x".join(map(str, entry.shape)) or "scalar", entry.dtype, f"{entry.bytes:,}", str(entry.pieces)]
        for entry in tensors
    ]
    rows += [
        [entry.key, "", entry.dtype, _short(entry.value), ""] for entry in contents.entries if entry.kind == "value"
    ]
    _print_table(["key", "shape", "dtype", "bytes or value", "pieces"], rows)
    ranks = ", ".join(map(str, contents.ranks)) or "unknown"
    steps = " to ".join(f"{step:g}" for step in sorted({*contents.steps[:1], *contents.steps[-1:]}))
    print(f"{len(tensors)} tensors, {sum(entry.bytes for entry in tensors):,} bytes, {len(contents.files)} files")
    print(f"written by ranks {ranks}; step {steps or 'unknown'}; checksums: {'yes' if contents.checksums else 'no'}")


def _short(value: Any, most: int = 40) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _print_table(headers: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
        for row in [headers, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table()
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position == 3 else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _convert(args: Namespace) -> int:
    if args.source.is_dir():
        with _progress("converting", offline.data_bytes(args.source)) as advance:
            offline.to_plain(args.source, args.target, args.part, advance)
    else:
        with _progress("converting", args.source.stat().st_size if args.source.exists() else 0) as advance:
            offline.from_plain(args.source, args.target, advance)
    print(f"{args.source} -> {args.target}")
    return 0


def _verify(args: Namespace) -> int:
    try:
        total = offline.data_bytes(args.directory)
    except OSError:  # a file is missing: that is what will be told
        total = 0
    with _progress("verifying", total) as advance:
        problems = offline.problems(args.directory, advance)
    for problem in problems:
        print(f"shardstep: {problem}", file=sys.stderr)
    if not problems:
        print(f"{args.directory} is complete and undamaged ({total:,} bytes)")
    return 1 if problems else 0


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, once the work has taken a second; a line now and then if that is no terminal."""
    started = shown = time.monotonic()
    done = 0
    bar: Any = None

    def advance(count: int) -> None:
        nonlocal done, shown, bar
        done += count
        now = time.monotonic()
        if now - started < _PATIENCE:
            return
        if bar is None:
            bar = _rich_bar(what, total)
        if bar is not False:
            bar.update(bar.task_ids[0], completed=done)
        elif now - shown > _PATIENCE:
            shown = now
            print(f"{what}: {done:,} of {total:,} bytes", file=sys.stderr)

    try:
        yield advance
    finally:
        if bar:
            bar.stop()


def _rich_bar(what: str, total: int) -> Any:
    """False if there is no rich, or no terminal to draw on."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return False
    console = Console(stderr=True)
    if not console.is_terminal:
        return False
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    bar.add_task(what, total=total)
    bar.start()
    return bar


if __name__ == "__main__":
    sys.exit(main())
