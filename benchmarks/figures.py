"""What the benchmarks share: starting the ranks, and turning lists of times into text."""

from __future__ import annotations

import ctypes
import datetime
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def results_file(name: str) -> Path:
    """Where today's figures of that name go."""
    return RESULTS / f"{datetime.date.today().isoformat()}-{name}.md"


def run_worker(module: str, ranks: int, *arguments: object, env: Mapping[str, str] | None = None) -> Any:
    """Run a module under torchrun, one thread per rank. It gets a file's name and then ``arguments``; what rank 0
    writes to the file, as JSON, is returned."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", module, file.name, *map(str, arguments)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": binaries, **(env or {})})
        return json.loads(Path(file.name).read_text())


def machine(network: str = "gloo over loopback") -> str:
    return (
        f"Machine: {os.cpu_count()} cores, {platform.processor() or platform.machine()}, Linux {platform.release()}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, {network}, one thread per rank, CPU only."
    )


def forget_freed_memory() -> None:
    """Give back what was freed earlier: it must not hide what is used next."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak() -> None:
    """Let the kernel measure this process's peak memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_kb(field: str) -> int:
    """Of this process, from the kernel: VmRSS (now) or VmHWM (at its peak)."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1])


class Neighbours:
    """How much of the cores' time other programs take while this one waits for its child processes."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: of the clock, of all cores busy with anything, of this program's children that have ended."""
        ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and waiting for disks
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), children.ru_utime + children.ru_stime

    def share(self) -> float:
        """Since this object was made, between 0 and 1."""
        clock, busy, own = (now - start for now, start in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / (clock * (os.cpu_count() or 1))


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return low, high


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and the range of the middle half."""
    low, high = middle_half(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round: both variants of a round met the same machine."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Median of the ratios round by round."""
    return f"{statistics.median(ratios(ours, theirs)):.3f}"
