"""What the command line shows: tables, JSON, progress. Also what to do when nobody reads it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shardstep.checkpoint.inspection import Contents

_PATIENCE = 1.0  # seconds of work before a progress bar is shown
_MOST = 40  # characters of a value in a table


def tell(message: str) -> None:
    """One line for people, on standard error."""
    print(f"shardstep: {' '.join(message.split())}", file=sys.stderr)


def print_json(data: Mapping[str, Any]) -> None:
    print(json.dumps(_carried(data)))


def _carried(value: Any) -> Any:
    """A value as JSON data. What JSON has no form for becomes a text."""
    if isinstance(value, Mapping):
        return {str(key): _carried(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_carried(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def print_contents_as_json(contents: Contents) -> None:
    print_json({**contents._asdict(), "entries": [entry._asdict() for entry in contents.entries]})


def print_contents(contents: Contents) -> None:
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
    if contents.masters:
        print(f"float32 masters of {contents.masters} parameters: convert --master writes the model from them")


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


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

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise  # the error that rich is handling: it would end the program

    table = Table()
    for position, header in enumerate(headers):
        table.add_column(header, justify="right" if position == 3 else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    on_a_terminal = sys.stdout is not None and sys.stdout.isatty()
    Quiet(width=None if on_a_terminal else 160).print(table)


def flush() -> None:
    """Flush now, while a closed pipe can still be handled. When Python exits it only complains."""
    if sys.stdout is not None:
        sys.stdout.flush()


def silence() -> None:
    """Redirect streams that cannot be written to the null device."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, once the work has taken a second; without a terminal, a line now and then."""
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
