"""The figures of several hosts: ``make bench-hosts`` (or ``python -m benchmarks.hosts``). It takes root.

Two hosts with two ranks each, as namespaces of this machine (``tests/hosts``), over a link that lets 1 and 10 Gbit/s
through. All variants alternate inside one run per speed, on the same processes. Bytes are read from the interface.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.contestants import DDP, REDUCE_SCATTER, TORCH_VIEWS, ZERO1, ZERO2
from benchmarks.figures import Neighbours, machine, middle_half, ratios, results_file, spread
from benchmarks.step import Measured, verdict
from tests.hosts.launch import torchrun
from tests.hosts.namespaces import open_hosts, why_not

NAMES = [DDP, TORCH_VIEWS, ZERO1, ZERO2, REDUCE_SCATTER]
COUNTS = [2, 2]  # ranks of each host
LIMIT = 20 * 60  # seconds, for one speed
# What issue 12 demands of an iteration over 1 Gbit/s, and of the bytes that cross, both relative to DDP.
SLOW = 1.0
TIME_BOUNDS = {ZERO1: 1.20, ZERO2: 0.85, REDUCE_SCATTER: 0.85}
BYTE_BOUNDS = {ZERO2: 0.70}
Speeds = dict[float, dict]  # Gbit/s -> what was measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speeds", type=float, nargs="+", default=[SLOW, 10.0], help="of the link, in Gbit/s")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=results_file("hosts"))
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"bench-hosts cannot make hosts: {reason}")
    measured = {speed: measure(speed, options.rounds) for speed in options.speeds}
    text = report(measured, options)
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def measure(speed: float, rounds: int) -> dict:
    neighbours, task = Neighbours(), json.dumps({"names": NAMES, "rounds": rounds})
    with tempfile.TemporaryDirectory() as name, open_hosts(len(COUNTS), Path(name)) as hosts:
        folder = Path(name)
        for host in hosts:
            host.link.limit(speed)
        command = ["-m", "benchmarks.hosts_worker", folder / "figures.json", task]
        with torchrun(hosts, COUNTS, command, folder) as job:
            job.succeed(LIMIT)
        measured = json.loads((folder / "figures.json").read_text())
    return {**measured, "neighbours": neighbours.share()}


# --- figures ------------------------------------------------------------------------------------------------------


def relative_times(figures: dict, name: str) -> list[float]:
    """Round by round, an iteration relative to DDP's in the same round."""
    return ratios(figures["times"][name], figures["times"][DDP])


def relative_bytes(figures: dict, name: str) -> list[float]:
    return ratios(figures["counts"][name], figures["counts"][DDP])


def judge(values: list[float], bound: float) -> str:
    return verdict(Measured(statistics.median(values), spread(values, 2), bound, middle_half(values)))


# --- text ---------------------------------------------------------------------------------------------------------


def report(measured: Speeds, options: argparse.Namespace) -> str:
    lines = [
        f"# Figures of two hosts, {datetime.date.today().isoformat()}",
        "",
        machine("gloo between two network namespaces (2 ranks each), the link limited by tc's tbf in both directions"),
        f"Command: `make bench-hosts` ({options.rounds} rounds). Raw numbers: the .json beside this file.",
        "Model: GPT, 8 layers, width 512, vocabulary 8192, 33.6 M parameters; 1 x 32 tokens per rank; fused AdamW.",
        "Iterations in ms, median (middle half), barrier to barrier, all variants of a table alternating in one run in "
        f"changing order. A ratio is the median over rounds of ratios to {DDP} in the same round. Bytes: both "
        "directions, from the counters of the first host's interface, headers included.",
        "",
        *(target_table(measured[SLOW]) if SLOW in measured else []),
    ]
    for speed, figures in measured.items():
        lines += [f"## {speed:g} Gbit/s", ""]
        share = f"{figures['neighbours']:.0%}"
        lines += [f"Other programs, and the kernel for all packets, took {share} of the cores' time meanwhile.", ""]
        lines += speed_table(figures)
    return "\n".join(lines).rstrip() + "\n"


def target_table(figures: dict) -> list[str]:
    lines = [f"## Targets, at {SLOW:g} Gbit/s", "", f"| target | relative to {DDP} |", "|---|---|"]
    for what, bounds, values_of in (
        ("iteration", TIME_BOUNDS, relative_times),
        ("bytes across the link", BYTE_BOUNDS, relative_bytes),
    ):
        for name, bound in bounds.items():
            result = judge(values_of(figures, name), bound) if name in figures["times"] else verdict(None)
            lines.append(f"| {what}, {name} | {result} |")
    return [*lines, ""]


def speed_table(figures: dict) -> list[str]:
    differences = figures["differences"]["at last"]
    lines = [
        f"| variant | iteration | / {DDP} | MB across the link | / {DDP} | weights differ by |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in figures["times"].items():
        megabytes = [count / 1e6 for count in figures["counts"][name]]
        cells = [spread(values), spread(relative_times(figures, name), 2)]
        cells += [spread(megabytes), spread(relative_bytes(figures, name), 2)]
        cells += [f"{differences[name]:.1g}" if name in differences else ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"All gradients are {figures['gradient_bytes'] / 1e6:.1f} MB. Weights are compared with those of {DDP} on the "
        f"same batches; a variant that differs by more than {figures['tolerance']:.0e} is not timed.",
        "",
    ]
    failures = [f"- {name}: {reason}" for name, reason in figures["failures"].items()]
    return [*lines, *(failures and [*failures, ""])]


if __name__ == "__main__":
    main()
