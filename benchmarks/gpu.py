"""The figures of a machine with GPUs: ``make bench-gpu`` (or ``python -m benchmarks.gpu``).

Runs ``benchmarks.gpu_worker`` under torchrun, a rank per GPU, and writes a dated results file. Variants alternate
inside one run. Without GPUs, ``--device cpu --small`` shows that it runs: a smoke run, which writes no results file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import DDP, FSDP2, INTERLEAVED, REDUCE_SCATTER, TORCH, ZERO1, ZERO1_LAZY, ZERO1_VIEWS, ZERO2
from benchmarks.figures import ratio, results_file, run_worker, spread

NAMES = [DDP, TORCH, ZERO1, ZERO1_VIEWS, ZERO1_LAZY, ZERO2, REDUCE_SCATTER, INTERLEAVED, FSDP2]
MOST_RANKS = 8
SMOKE = (
    "A smoke run on the CPU: it shows that the benchmark runs. Its times say nothing, and no results file is written."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, help="default: as many as there are GPUs, at most 8")
    parser.add_argument("--rounds", type=int, default=30, help="iterations of each variant that are timed")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--output", type=Path, default=results_file("gpu"))
    options = parser.parse_args()
    count = torch.cuda.device_count()
    if options.device == "cuda" and count == 0:
        sys.exit(f"bench-gpu expects a GPU, and torch {torch.__version__} sees none on this machine.")
    ranks = options.ranks or (min(count, MOST_RANKS) if options.device == "cuda" else 2)
    task = {"names": NAMES, "device": options.device, "rounds": options.rounds, "small": options.small}
    measured = run_worker("benchmarks.gpu_worker", ranks, json.dumps(task))
    text = report(measured, options.device, ranks, options.rounds)
    print(text)
    if options.device == "cuda":
        options.output.write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")


def report(measured: dict[str, Any], device: str, ranks: int, rounds: int) -> str:
    lines = [f"# Figures of a machine with GPUs, {datetime.date.today().isoformat()}", ""]
    lines += [SMOKE, ""] if device == "cpu" else []
    lines += [
        f"Machine: {measured['machine']}; Python {platform.python_version()}, Linux {platform.release()}.",
        f"{ranks} ranks, {measured['parameters'] / 1e6:.1f} M parameters in float32, {measured['tokens']} tokens per "
        f"rank and iteration, fused AdamW, {rounds} rounds. Raw numbers: the .json beside this file.",
        "",
        "An iteration is zero_grad, forward, backward, step; median (middle half) in ms, from one synchronisation of "
        "the device to the next. Relative: the median over rounds. Hidden: how much of the time of NCCL's kernels on "
        "rank 0 some other kernel ran as well, from torch's profiler. Peak: of a variant alone, the most on any rank.",
        "",
        "| variant | ms | relative to DDP + AdamW | communication hidden | peak MB |",
        "|---|---|---|---|---|",
    ]
    times = measured["times"]
    for name in NAMES:
        if name in measured["failures"]:
            lines.append(f"| {name} | does not run here: {measured['failures'][name]} | | | |")
            continue
        relative = ratio(times[name], times[DDP]) if DDP in times else "-"
        lines.append(
            f"| {name} | {spread(times[name], 2)} | {relative} | {_percent(measured['hidden'][name])} "
            f"| {_megabytes(measured['peaks'][name])} |"
        )
    return "\n".join(lines) + "\n"


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.0%}"


def _megabytes(count: int | None) -> str:
    return "not measured" if count is None else f"{count / 1e6:.0f}"


if __name__ == "__main__":
    main()
