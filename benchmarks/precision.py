"""The figures of training in 16 bits: ``make bench-precision`` (or ``python -m benchmarks.precision``).

Runs ``benchmarks.precision_worker`` under torchrun at 2 and 4 ranks and writes a dated results file. The contestants of
a table alternate inside one run on the same processes. They do not all fit into memory at once, so there are three
such runs, each with the references. Further ones, over sockets, count bytes. DeepSpeed has runs of its own: if it
brings the processes down, the other figures stay.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.contestants import ALONE
from benchmarks.figures import Neighbours, machine, middle_half, ratios, results_file, run_worker, spread
from benchmarks.gpt import DEFAULT, Size
from benchmarks.precision_contestants import (
    BY_HAND,
    DEEPSPEED,
    FAMILIES,
    FSDP2,
    MODES,
    PLAIN,
    SHARDED_DDP,
    ZERO1,
    ZERO2,
)
from benchmarks.precision_worker import KINDS
from benchmarks.step import ENVIRONMENT, ON_SOCKETS, Measured, overheads, relative, verdict, version_of

TARGETS = {2: 0.7, 4: 0.5}  # of float32, relative to masters by hand
MODE_TARGETS = {"remainder": 1.15, "stochastic": 1.3}  # relative to float32

# Whose iterations alternate in one run.
REDUCED = [ALONE, BY_HAND, PLAIN, *ZERO1.values(), FSDP2]
SHARDED = [ALONE, BY_HAND, *SHARDED_DDP.values(), *ZERO2.values()]
RIVALS = [ALONE, BY_HAND, ZERO1["float32"], ZERO2["float32"], *DEEPSPEED.values()]
TITLES = {
    "reduced": "DDP all-reduces the gradients, and FSDP2",
    "sharded": "Sharded gradients",
    "rivals": "DeepSpeed",
}
COUNTED = [BY_HAND, PLAIN, *(name for family in FAMILIES for name in family.values()), FSDP2]

Times = dict[str, list[float]]
Relative = Callable[[Times, str, str], list[float]]  # times, whose, relative to whose -> by round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the runs for the targets")
    parser.add_argument("--rival-rounds", type=int, default=5, help="rounds of the run with DeepSpeed; 0: without it")
    for name in ("layers", "width", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name), help="of the model")
    parser.add_argument("--note", default="", help="about the machine, for the results file")
    parser.add_argument("--output", type=Path, default=results_file("precision"))
    options = parser.parse_args()
    size = DEFAULT._replace(layers=options.layers, width=options.width, vocabulary=options.vocabulary)
    measured: dict[int, dict] = {}
    text = ""
    for ranks in options.ranks:
        measured[ranks] = measure(ranks, size, options)
        text = report(measured, size, options)  # written each time: whoever interrupts keeps what there is
        options.output.write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def measure(ranks: int, size: Size, options: argparse.Namespace) -> dict:
    def run(task: dict, env: dict[str, str]) -> dict:
        text = json.dumps({**task, "size": size})
        return run_worker("benchmarks.precision_worker", ranks, text, env={**ENVIRONMENT, **env})

    def rival_run(task: dict, env: dict[str, str]) -> dict:
        try:
            return run(task, env)
        except subprocess.CalledProcessError as error:
            return {"crashed": f"The run with DeepSpeed ended with status {error.returncode}."}

    neighbours = Neighbours()
    measured = {
        "reduced": run({"kind": "times", "names": REDUCED, "rounds": options.rounds}, {}),
        "sharded": run({"kind": "times", "names": SHARDED, "rounds": options.rounds}, {}),
        "demands": run({"kind": "demands", "names": COUNTED}, ON_SOCKETS),
    }
    if options.rival_rounds:
        measured["rivals"] = rival_run({"kind": "times", "names": RIVALS, "rounds": options.rival_rounds}, {})
        measured["rivals' demands"] = rival_run({"kind": "demands", "names": [*DEEPSPEED.values()]}, ON_SOCKETS)
    return {**measured, "neighbours": neighbours.share()}


def step_ratios(times: Times, name: str, reference: str) -> list[float]:
    """Round by round, the step relative to that of a reference."""
    return ratios(times[name], times[reference])


# --- text ---------------------------------------------------------------------------------------------------------


def report(measured: dict[int, dict], size: Size, options: argparse.Namespace) -> str:
    parameters = next(iter(measured.values()))["reduced"]["parameters"]
    chosen = {"rounds": options.rounds, "rival-rounds": options.rival_rounds}
    chosen |= {"layers": size.layers, "width": size.width, "vocabulary": size.vocabulary}
    arguments = " ".join(f"--{name} {value}" for name, value in chosen.items())
    lines = [
        f"# Precision figures, {datetime.date.today().isoformat()}",
        "",
        machine(),
        f"Rivals: {version_of('deepspeed')}.",
        f'Command: `make bench-precision ARGS="{arguments}"`. Raw numbers: the .json beside this file.',
        f"A GPT of {parameters / 1e6:.1f} M parameters in bfloat16 ({size.layers} layers, width {size.width}, "
        f"vocabulary {size.vocabulary}), fused AdamW.",
        "Times in ms, median (middle half), through shared memory; the variants of a table alternate in one run in "
        "changing order. An *iteration* clears, goes forward and backward, meets in a barrier, steps, and meets again; "
        "*step() alone* is from barrier to barrier. *Overhead*: iteration minus forward and backward alone, in the "
        "same round. A ratio is the median over rounds.",
        *([f"**{options.note}**"] if options.note else []),
        "",
    ]
    for ranks, figures in measured.items():
        lines += [f"## {ranks} ranks", ""]
        lines += [f"Other programs took {figures['neighbours']:.0%} of the cores' time.", ""]
        lines += ["### Targets: overhead of an iteration", "", *targets(figures, "iterations", relative, ranks)]
        lines += ["### Targets: step() alone", "", *targets(figures, "steps", step_ratios, ranks)]
        for run, title in TITLES.items():
            lines += [f"### {title}", "", *times(figures[run])] if run in figures else []
        demands = {**figures["demands"], **figures.get("rivals' demands", {})}
        crashed = demands.pop("crashed", None)
        lines += memory(demands) + wire(demands, ranks) + ([crashed, ""] if crashed else [])
    return "\n".join(lines) + "\n"


def targets(figures: dict, kind: str, ratio: Relative, ranks: int) -> list[str]:
    lines = ["| | ratio |", "|---|---|"]
    for run, families in {"reduced": [ZERO1], "sharded": [SHARDED_DDP, ZERO2]}.items():
        for family in families:
            pairs = [(family["float32"], BY_HAND, TARGETS.get(ranks))]
            pairs += [(family[mode], family["float32"], MODE_TARGETS.get(mode)) for mode in MODES if mode != "float32"]
            for ours, theirs, target in pairs:
                lines.append(f"| {ours} / {theirs} | {against(figures[run][kind], ratio, ours, theirs, target)} |")
    return [*lines, ""]


def against(times: Times, ratio: Relative, ours: str, theirs: str, target: float | None) -> str:
    if ours not in times or theirs not in times:
        return "not measured"
    values = ratio(times, ours, theirs)
    if target is None:
        return spread(values, 2)
    return verdict(Measured(statistics.median(values), spread(values, 2), target, middle_half(values)))


def times(figures: dict) -> list[str]:
    if "crashed" in figures:
        return [figures["crashed"], ""]
    iterations, steps = figures["iterations"], figures["steps"]
    by_hand = "/ by hand"
    lines = [f"| variant | iteration | overhead | {by_hand} | step() alone | {by_hand} | weights |", "|---" * 7 + "|"]
    for name, values in iterations.items():
        row = [name, spread(values)]
        if name == ALONE:
            row += [""] * 5
        else:
            row += [spread(overheads(iterations, name)), spread(relative(iterations, name, BY_HAND), 2)]
            row += [spread(steps[name]), spread(step_ratios(steps, name, BY_HAND), 2)]
            row.append(f"{figures['differences'][name]:.3f}" if name != BY_HAND else "")
        lines.append(f"| {' | '.join(row)} |")
    lines += [f"| {name} | {reason} | | | | | |" for name, reason in figures["failures"].items()]
    told = f"*Weights*: distance from those of {BY_HAND} after the warm-up, relative to how far those have come."
    return [*lines, "", told, ""]


def memory(demands: dict) -> list[str]:
    lines = ["### Bytes per parameter and rank", ""]
    lines += ["After a backward, measured on live tensors; the worst rank. *Scratch* is used by updates only."]
    lines += ["*Allocated*: what glibc counts for the whole variant then, DDP's and gloo's buffers included."]
    lines += ["FSDP2's parameters are float32 shards; the 16-bit copy (2 bytes) lives from forward to backward."]
    lines += ["DeepSpeed's share of the gradients is views of whole ones: the memory behind them counts.", ""]
    lines += [f"| variant | {' | '.join(KINDS)} | without scratch | allocated |", "|---" * 8 + "|"]
    for name, figures in demands.items():
        if "failure" in figures:
            lines.append(f"| {name} | {figures['failure']}{' |' * 7}")
            continue
        held = [figures["held"][kind] for kind in KINDS]
        row = [*held, sum(held[:-1]), figures["allocated"]]
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in row)} |")
    return [*lines, ""]


def wire(demands: dict, ranks: int) -> list[str]:
    lines = ["### Bytes of the gather per parameter", ""]
    lines += [f"What a rank sends in `step()`, over sockets, times {ranks}/{ranks - 1} (it sends nothing to itself)."]
    lines += ["", "| variant | asked of torch.distributed | written by the process | calls |", "|---|---|---|---|"]
    for name in [*ZERO1.values(), *SHARDED_DDP.values(), *ZERO2.values(), *DEEPSPEED.values()]:
        figures = demands.get(name, {})
        if "asked" in figures:
            calls = ", ".join(f"{count} {call}" for call, count in figures["calls"].items())
            lines.append(f"| {name} | {figures['asked']:.3f} | {figures['written']:.3f} | {calls} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
