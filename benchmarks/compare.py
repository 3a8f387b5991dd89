"""Is this commit slower than an earlier one? ``make bench-compare BASE=<commit>``.

Both commits run in turns on the same machine, each with torch's class beside it in the same processes. A figure is ours
relative to torch's in the same round; two commits are compared by the medians of that over all turns. The workers are
those of this commit, the package is that of either.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import ALONE, DDP, HOOK, INTERLEAVED, TORCH_VIEWS, ZERO1, ZERO2
from benchmarks.figures import Neighbours, machine, ratios, results_file, run_worker, spread

ROOT = Path(__file__).parent.parent
KINDS = ("core", "step", "checkpoint")
NAMES = [ALONE, DDP, TORCH_VIEWS, ZERO1, ZERO2, HOOK, INTERLEAVED]
Figures = dict[str, list[float]]  # relative to torch's, by round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="the earlier commit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="of each commit, alternating")
    parser.add_argument("--rounds", type=int, default=4, help="of each contestant in a turn")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="what to measure")
    parser.add_argument("--output", type=Path, default=results_file("compare"))
    options = parser.parse_args()
    neighbours = Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "base"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", checkout, options.base], check=True)
        try:
            sources = {"before": checkout / "src", "after": ROOT / "src"}
            measured: dict[str, Figures] = {name: {} for name in sources}
            for turn in range(options.turns):
                order = list(sources) if turn % 2 == 0 else list(reversed(sources))
                for name in order:
                    for figure, values in measure(sources[name], options).items():
                        measured[name].setdefault(figure, []).extend(values)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", checkout], check=True)
    text = report(measured, options, neighbours.share())
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def measure(source: Path, options: argparse.Namespace) -> Figures:
    """One turn of the package in ``source``."""
    env, ranks, rounds = {"PYTHONPATH": f"{source}:{ROOT}"}, options.ranks, options.rounds
    figures: Figures = {}
    if "core" in options.only:
        figures |= core_figures(run_worker("benchmarks.core_worker", ranks, rounds, 1, env=env))
    if "step" in options.only:
        task = {"kind": "times", "names": NAMES, "rounds": rounds}
        figures |= step_figures(run_worker("benchmarks.step_worker", ranks, json.dumps(task), env=env)["times"])
    if "checkpoint" in options.only:
        with tempfile.TemporaryDirectory() as folder:
            figures |= checkpoint_figures(run_worker("benchmarks.checkpoint_worker", ranks, rounds, 0, folder, env=env))
    return figures


def core_figures(core: Mapping[str, Any]) -> Figures:
    figures = {}
    for model, times in core["steps"].items():
        for mode in ("default", "views"):
            figures[f"core, {model}, {mode} / torch views"] = ratios(times[f"shardstep {mode}"], times["torch views"])
    kept = core["consolidation"]
    figures["core, consolidation / torch"] = ratios(kept["shardstep"]["ms"], kept["torch"]["ms"])
    return figures


def step_figures(times: Mapping[str, Sequence[float]]) -> Figures:
    return {f"iteration, {name} / {DDP}": ratios(times[name], times[DDP]) for name in (ZERO1, ZERO2, HOOK, INTERLEAVED)}


def checkpoint_figures(saved: Mapping[str, Any]) -> Figures:
    ours, theirs = saved["shardstep"], saved["DTensors in DCP"]
    return {
        f"checkpoint, {kind} / DTensors in DCP": ratios(ours[f"{kind} s"], theirs[f"{kind} s"])
        for kind in ("save", "load")
    }


def report(measured: Mapping[str, Figures], options: argparse.Namespace, others: float) -> str:
    lines = [
        f"# This commit and {options.base}, {datetime.date.today().isoformat()}",
        "",
        machine(),
        f"Command: `make bench-compare BASE={options.base}` ({options.ranks} ranks, {options.turns} turns of each "
        f"commit, alternating, {options.rounds} rounds a turn); other programs took {100 * others:.0f} % of the cores' "
        "time. Raw numbers: the .json beside this file.",
        "Each figure: ours relative to the reference of the same round; median (middle half) over all turns. Below 1 "
        "in the last column: this commit is faster.",
        "",
        "| figure | before | after | after / before |",
        "|---|---|---|---|",
    ]
    for figure, before in measured["before"].items():
        after = measured["after"][figure]
        change = statistics.median(after) / statistics.median(before)
        lines.append(f"| {figure} | {spread(before, 2)} | {spread(after, 2)} | {change:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
