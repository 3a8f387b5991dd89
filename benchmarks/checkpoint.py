"""The figures of checkpoints: ``make bench-checkpoint`` (or ``python -m benchmarks.checkpoint``).

Runs ``benchmarks.checkpoint_worker`` under torchrun at 2 and 4 ranks and writes a dated results file. All contestants
alternate inside one run on the same processes and the same disk.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.figures import Neighbours, machine, ratios, results_file, run_worker, spread

OURS, ASYNC, DTENSORS, PLAIN, TORCH = (
    "shardstep",
    "shardstep asynchronous",
    "DTensors in DCP",
    "plain write",
    "torch ZeRO",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each contestant")
    parser.add_argument("--slow-rounds", type=int, default=2, help="rounds of torch's class, after a warm-up")
    parser.add_argument("--folder", type=Path, default=None, help="where to write the checkpoints (a temporary folder)")
    parser.add_argument("--output", type=Path, default=results_file("checkpoint"))
    options = parser.parse_args()
    neighbours = Neighbours()
    measured = {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measured[ranks] = run_worker(
                "benchmarks.checkpoint_worker", ranks, options.rounds, options.slow_rounds, folder
            )
    text = report(measured, options, neighbours.share())
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def report(measured: dict[int, dict], options: argparse.Namespace, others: float) -> str:
    lines = [
        f"# Checkpoint figures, {datetime.date.today().isoformat()}",
        "",
        machine(),
        f"Command: `make bench-checkpoint` ({options.rounds} rounds, {options.slow_rounds} of torch's class); other "
        f"programs took {100 * others:.0f} % of the cores' time. Raw numbers: the .json beside this file.",
        "268 MB of AdamW state of 128 parameters. Seconds, median (middle half), barrier to barrier, files flushed to "
        "disk; loading finds them in the page cache. Extra MB: what the worst rank held at its peak beyond what it had "
        "before and after.",
        "A ratio is the median over rounds of ours / theirs.",
        "",
    ]
    for ranks, figures in measured.items():
        lines += [
            f"## {ranks} ranks",
            "",
            "| | save s | load s | extra MB, saving | loading |",
            "|---|---|---|---|---|",
        ]
        for name in (OURS, DTENSORS, PLAIN, TORCH):
            row = figures[name]
            extra = [f"{max(row[kind]):.0f}" for kind in ("save MB", "load MB")]
            lines.append(f"| {name} | {spread(row['save s'], 3)} | {spread(row['load s'], 3)} | {' | '.join(extra)} |")
        lines += ["", "| ratio | must reach | save | load |", "|---|---|---|---|"]
        lines.append(f"| shardstep / DTensors in DCP | 1.0 | {_ratio(figures, DTENSORS)} |")
        lines.append(f"| shardstep / plain write, plain read | as close as can be | {_ratio(figures, PLAIN)} |")
        lines.append(f"| torch ZeRO / shardstep | 15 (save) | {_times(figures)} |")
        pause, rest = figures[ASYNC]["pause s"], figures[ASYNC]["rest s"]
        against = ratios(pause, figures[OURS]["save s"])
        lines += [
            "",
            f"Asynchronous save: the pause is {spread(pause, 3)} s, {spread(against, 2)} of a blocking save; the rest "
            f"took {spread(rest, 3)} s in the background.",
            "",
        ]
    return "\n".join(lines) + "\n"


def _ratio(figures: dict, theirs: str) -> str:
    pairs = (ratios(figures[OURS][kind], figures[theirs][kind]) for kind in ("save s", "load s"))
    return " | ".join(spread(pair, 2) for pair in pairs)


def _times(figures: dict) -> str:
    """How many times faster: of medians, because torch's class runs fewer rounds."""
    medians = (
        statistics.median(figures[TORCH][kind]) / statistics.median(figures[OURS][kind])
        for kind in ("save s", "load s")
    )
    return " | ".join(f"{value:.1f}" for value in medians)


if __name__ == "__main__":
    main()
