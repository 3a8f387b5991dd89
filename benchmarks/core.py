"""The figures of the core: ``make bench-core`` (or ``python -m benchmarks.core``).

Runs ``benchmarks.core_worker`` under torchrun at 2 and 4 ranks and writes a dated results file. All times are ratios of
variants that alternate inside one run on the same processes, because machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pathlib import Path

from benchmarks.figures import machine, ratio, results_file, run_worker, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each timed variant")
    parser.add_argument("--consolidations", type=int, default=3, help="rounds of the consolidation figures")
    parser.add_argument("--output", type=Path, default=results_file("core"))
    options = parser.parse_args()
    measured = {
        ranks: run_worker("benchmarks.core_worker", ranks, options.rounds, options.consolidations)
        for ranks in options.ranks
    }
    text = report(measured, options)
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def report(measured: dict[int, dict], options: argparse.Namespace) -> str:
    lines = [
        f"# Core figures, {datetime.date.today().isoformat()}",
        "",
        machine(),
        f"Command: `make bench-core` ({options.rounds} rounds, {options.consolidations} consolidations). "
        "Raw numbers: the .json beside this file.",
        "Times in ms, median (middle half), barrier to barrier. A ratio is the median over rounds of ours / theirs.",
        "",
    ]
    for ranks, figures in measured.items():
        lines += [f"## {ranks} ranks", ""]
        for name, times in figures["steps"].items():
            lines += [f"### Step: {name}", "", "| variant | ms |", "|---|---|"]
            lines += [f"| {variant} | {spread(values)} |" for variant, values in times.items()]
            best = min(("torch default", "torch views"), key=lambda variant: statistics.median(times[variant]))
            lines += ["", "| ratio | value |", "|---|---|"]
            for ours in ("shardstep default", "shardstep views"):
                for theirs in ("torch default", "torch views"):
                    lines.append(f"| {ours} / {theirs} | {ratio(times[ours], times[theirs])} |")
                lines.append(f"| {ours} / torch's better mode ({best}) | {ratio(times[ours], times[best])} |")
            lines.append("")
        lines += _consolidation(figures["consolidation"]) + _collectives(figures["collectives"])
    return "\n".join(lines) + "\n"


def _consolidation(figures: dict) -> list[str]:
    lines = [f"### Consolidate {figures['state_mb']:.0f} MB of AdamW state to rank 0", ""]
    lines += [
        "| variant | ms | extra peak MB, worst rank that is not the recipient | on the recipient |",
        "|---|---|---|---|",
    ]
    for variant in ("torch", "shardstep"):
        extra, own = max(figures[variant]["others_mb"]), max(figures[variant]["recipient_mb"])
        lines.append(f"| {variant} | {spread(figures[variant]['ms'])} | {extra:.1f} | {own:.1f} |")
    return [*lines, "", f"Ratio of times: {ratio(figures['shardstep']['ms'], figures['torch']['ms'])}", ""]


def _collectives(figures: dict) -> list[str]:
    lines = [
        "### Calls of torch.distributed per step (rank 0)",
        "",
        "| model | variant | buckets | calls |",
        "|---|---|---|---|",
    ]
    for row in figures:
        lines.append(f"| {row['model']} | {row['variant']} | {row['buckets']} | {row['calls']} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
