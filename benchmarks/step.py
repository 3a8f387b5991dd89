"""The figures of whole iterations: ``make bench-step`` (or ``python -m benchmarks.step``).

Runs ``benchmarks.step_worker`` under torchrun at 2 and 4 ranks and writes a dated results file. The contestants of a
table alternate inside one run on the same processes. They do not all fit into memory at once, so there are three
such runs, each with the references: sharded gradients, hooks, rivals. A fourth one counts bytes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.contestants import (
    ALONE,
    DDP,
    DDP_VIEWS,
    DEEPSPEED_1,
    DEEPSPEED_2,
    FAIRSCALE,
    FSDP2,
    HOOK,
    INTERLEAVED,
    INTERLEAVED_SCATTER,
    REDUCE_SCATTER,
    TORCH,
    TORCH_VIEWS,
    ZERO1,
    ZERO2,
    ZERO2_VIEWS,
)
from benchmarks.figures import Neighbours, machine, middle_half, ratios, results_file, run_worker, spread

# Whose iterations alternate in one run.
GRADIENTS = [ALONE, DDP, DDP_VIEWS, TORCH, TORCH_VIEWS, ZERO2, ZERO2_VIEWS]
HOOKS = [ALONE, DDP, TORCH, TORCH_VIEWS, ZERO1, HOOK, INTERLEAVED, REDUCE_SCATTER, INTERLEAVED_SCATTER]
RIVALS = [ALONE, DDP, TORCH_VIEWS, ZERO2, FSDP2, FAIRSCALE, DEEPSPEED_1, DEEPSPEED_2]
COUNTED = [
    DDP,
    TORCH_VIEWS,
    ZERO1,
    REDUCE_SCATTER,
    ZERO2,
    ZERO2_VIEWS,
    HOOK,
    FSDP2,
    FAIRSCALE,
    DEEPSPEED_1,
    DEEPSPEED_2,
]
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "extensions"),  # DeepSpeed compiles a transport at its first use
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # glibc gives memory back to the system when the end of its heap happens to be free, and maps it anew page by page
    # in the next iteration: *measured*, 0 to 22,000 page faults per iteration of one variant, depending on which
    # others are in the process. Every variant is measured with an allocator that keeps its memory.
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
ON_SOCKETS = {"SHARDSTEP_SHARED_MEMORY": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the two runs for the targets")
    parser.add_argument("--rival-rounds", type=int, default=5, help="rounds of the run with the rivals; 0: without")
    parser.add_argument("--output", type=Path, default=results_file("step"))
    options = parser.parse_args()
    measured = {ranks: measure(ranks, options) for ranks in options.ranks}
    text = report(measured, options)
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def measure(ranks: int, options: argparse.Namespace) -> dict:
    def run(task: dict, env: dict[str, str]) -> dict:
        return run_worker("benchmarks.step_worker", ranks, json.dumps(task), env={**ENVIRONMENT, **env})

    neighbours = Neighbours()
    measured: dict = {
        "gradients": run({"kind": "times", "names": GRADIENTS, "rounds": options.rounds}, {}),
        "hooks": run({"kind": "times", "names": HOOKS, "rounds": options.rounds}, {}),
        "demands": run({"kind": "demands", "names": COUNTED}, ON_SOCKETS),
        "demands, shared memory": run({"kind": "demands", "names": [ZERO1, ZERO2]}, {}),
    }
    if options.rival_rounds:
        try:
            measured["rivals"] = run({"kind": "times", "names": RIVALS, "rounds": options.rival_rounds}, {})
        except subprocess.CalledProcessError as error:  # one that brings the processes down takes the others with it
            measured["rivals"] = {"crashed": f"the run with the rivals ended with status {error.returncode}"}
    measured["neighbours"] = neighbours.share()
    return measured


# --- figures ------------------------------------------------------------------------------------------------------


def overheads(times: dict[str, list[float]], name: str) -> list[float]:
    """Round by round, what an iteration takes beyond forward and backward alone."""
    return [whole - alone for whole, alone in zip(times[name], times[ALONE], strict=True)]


def better_torch(times: dict[str, list[float]]) -> str:
    modes = [name for name in (TORCH, TORCH_VIEWS) if name in times]
    return min(modes, key=lambda name: statistics.median(times[name]))


def relative(times: dict[str, list[float]], name: str, reference: str) -> list[float]:
    """Round by round, the overhead relative to that of a reference."""
    return ratios(overheads(times, name), overheads(times, reference))


def all_reduce_mb(figures: dict, ranks: int) -> float:
    """What DDP's all-reduce makes a rank send, by the formula: 2 (N - 1) / N of the gradients' bytes."""
    return 2 * (ranks - 1) / ranks * gradient_mb(figures)


def gradient_mb(figures: dict) -> float:
    return figures["gradients"]["gradient_bytes"] / 1e6


# --- targets ------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    value: float
    text: str
    bound: float
    spread: tuple[float, float] | None = None  # the middle half


class Target(NamedTuple):
    claim: str
    measure: Callable[[dict, int], Measured | None]  # figures and ranks -> None if it could not be measured


def overhead_target(run: str, name: str, against: str, bounds: dict[int, float]) -> Target:
    def measure_it(figures: dict, ranks: int) -> Measured | None:
        times = figures[run]["times"]
        if name not in times:
            return None
        values = relative(times, name, better_torch(times) if against == TORCH else against)
        bound = bounds.get(ranks, min(bounds.values()))
        return Measured(statistics.median(values), spread(values, 2), bound, middle_half(values))

    reference = "torch's ZeRO, its better mode" if against == TORCH else against
    return Target(f"overhead, {name} / {reference}", measure_it)


def traffic_target(name: str) -> Target:
    def measure_it(figures: dict, ranks: int) -> Measured | None:
        row = figures["demands"][name]
        if "failure" in row:
            return None
        value = max(row["requested_mb"]) / all_reduce_mb(figures, ranks)
        return Measured(value, f"{value:.3f}", 1.05)

    return Target(f"bytes requested per step, {name} / DDP's all-reduce", measure_it)


def peak_target(run: str, name: str, bounds: dict[int, float]) -> Target:
    """Gradients in backward, with what is sent and received; through shared memory also a rank's part of the slots."""

    def measure_it(figures: dict, ranks: int) -> Measured | None:
        row = figures[run].get(name, {"failure": "not measured"})
        if "failure" in row:
            return None
        slots = row["shared_mb"] - figures[run][ZERO1]["shared_mb"]  # without those of parameters
        peak = max(row["peak_mb"]) + slots / ranks
        value = peak / gradient_mb(figures)
        return Measured(value, f"{value:.2f} ({peak:.1f} MB)", bounds.get(ranks, min(bounds.values())))

    where = "over sockets" if run == "demands" else "through shared memory, with its slots for gradients"
    return Target(f"peak of gradients in backward, {name}, {where} / all gradients", measure_it)


TARGETS = [
    overhead_target("hooks", REDUCE_SCATTER, TORCH, {2: 0.68, 4: 0.52}),
    overhead_target("hooks", REDUCE_SCATTER, DDP, {2: 0.78, 4: 0.65}),
    overhead_target("hooks", INTERLEAVED_SCATTER, TORCH, {2: 0.68, 4: 0.52}),
    *(overhead_target("gradients", name, TORCH, {2: 0.48, 4: 0.42}) for name in (ZERO2, ZERO2_VIEWS)),
    *(overhead_target("hooks", name, TORCH, {2: 1.0}) for name in (HOOK, INTERLEAVED)),
    *(traffic_target(name) for name in (REDUCE_SCATTER, ZERO2, ZERO2_VIEWS)),
    *(peak_target(run, ZERO2, {2: 0.75, 4: 0.50}) for run in ("demands", "demands, shared memory")),
]


# --- text ---------------------------------------------------------------------------------------------------------


def report(measured: dict[int, dict], options: argparse.Namespace) -> str:
    lines = [
        f"# Step figures, {datetime.date.today().isoformat()}",
        "",
        machine(),
        f"Rivals: {', '.join(version_of(name) for name in ('fairscale', 'deepspeed'))}.",
        f"Command: `make bench-step` ({options.rounds} rounds, {options.rival_rounds} with the rivals). "
        "Raw numbers: the .json beside this file.",
        "Model: GPT, 8 layers, width 512, vocabulary 8192, 33.6 M parameters; 1 x 32 tokens per rank; fused AdamW.",
        "Times in ms, median (middle half), barrier to barrier, all variants of a table alternating in one run in "
        "changing order. *Overhead*: iteration minus forward + backward alone, in the same round. A ratio is the "
        "median over rounds of ratios of overheads. The C library's allocator is told to keep its memory, for all "
        "variants alike (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`).",
        "",
        "## Targets",
        "",
        *target_table(measured),
        "",
    ]
    for ranks, figures in measured.items():
        lines += [f"## {ranks} ranks", ""]
        lines += [f"Other programs took {figures['neighbours']:.0%} of the cores' time meanwhile.", ""]
        for run, title in (("gradients", "Sharded gradients"), ("hooks", "DDP's hooks"), ("rivals", "The rivals")):
            lines += [f"### {title}", "", *time_table(figures[run])] if run in figures else []
        lines += ["### Wire and memory", "", *demand_table(figures, ranks)]
    return "\n".join(lines).rstrip() + "\n"


def version_of(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed"


def target_table(measured: dict[int, dict]) -> list[str]:
    lines = [
        "| target | " + " | ".join(f"{ranks} ranks" for ranks in measured) + " |",
        "|---|" + "---|" * len(measured),
    ]
    for target in TARGETS:
        cells = [verdict(target.measure(figures, ranks)) for ranks, figures in measured.items()]
        lines.append(f"| {target.claim} | " + " | ".join(cells) + " |")
    return lines


def verdict(result: Measured | None) -> str:
    if result is None:
        return "not measured"
    reached = "reached" if result.value <= result.bound else "**missed**"
    low, high = result.spread or (result.value, result.value)
    doubt = " (bound within the spread)" if low <= result.bound < high else ""
    return f"{result.text}, at most {result.bound}: {reached}{doubt}"


def time_table(figures: dict) -> list[str]:
    if "crashed" in figures:
        return [figures["crashed"], ""]
    times, differences = figures["times"], figures["differences"]["at last"]
    torch_zero = better_torch(times)
    lines = [
        f"| variant | iteration | overhead | / {DDP} | / {torch_zero} | weights differ by |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in times.items():
        cells = [spread(values)]
        if name == ALONE:
            cells += ["", "", "", ""]
        else:
            cells += [spread(overheads(times, name))]
            cells += [spread(relative(times, name, reference), 2) for reference in (DDP, torch_zero)]
            cells += [f"{differences[name]:.1g}" if name in differences else ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Weights are compared with those of {DDP} on the same batches, after {figures['warm_up']} iterations (a "
        f"variant that differs by more than {figures['tolerance']:.0e}, a tenth of the learning rate, is not timed) "
        "and at the end (the figure above).",
        "",
    ]
    lines += [f"- {name}: {reason}" for name, reason in figures["failures"].items()]
    shared = [f"{name} {size / 2**20:.0f} MiB" for name, size in figures["shared_bytes"].items() if size]
    lines += [f"- Shared memory, once per host: {', '.join(shared) or 'none, sockets were used'}.", ""]
    return lines


def demand_table(figures: dict, ranks: int) -> list[str]:
    lines = [
        "| variant | MB sent per step, by the kernel | requested | calls from Python | held after backward, MB | peak "
        "in backward | between iterations |",
        "|---|---|---|---|---|---|---|",
    ]
    failures = []
    for name, row in figures["demands"].items():
        if "failure" in row:
            failures.append(f"- {name}: {row['failure']}")
            continue
        calls = ", ".join(f"{count} {call}" for call, count in sorted(row["calls"].items()))
        in_cpp = name in (DDP, TORCH_VIEWS, ZERO1)  # a hook asks from Python instead
        cells = [f"{max(row['sent_mb']):.1f}", f"{max(row['requested_mb']):.1f}{' + DDP' if in_cpp else ''}", calls]
        cells += [f"{max(row[key]):.1f}" for key in ("held_mb", "peak_mb", "between_mb")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "One variant at a time, the worst rank; shardstep on sockets (its shared memory off). *DDP*: its C++ asks for "
        f"an all-reduce of the gradients, {all_reduce_mb(figures, ranks):.1f} MB by the formula 2 (N-1)/N. "
        "*Requested*: calls of torch.distributed times what each makes a rank send. *Held*, *peak*: allocated since "
        "the gradients were cleared, in all threads, whoever holds it; all gradients are "
        f"{gradient_mb(figures):.1f} MB. *Between iterations*: parameters, optimizer state "
        "and what else stays.",
        "",
        *(failures and [*failures, ""]),
    ]


if __name__ == "__main__":
    main()
