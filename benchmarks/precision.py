"""The figures of training in 16 bits: ``make bench-precision`` (or ``python -m benchmarks.precision``).

Runs ``benchmarks.precision_worker`` under torchrun at 2 and 4 ranks and writes a dated results file. The contestants
alternate inside one run on the same processes. A second run, over sockets, counts bytes.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from benchmarks.contestants import ALONE
from benchmarks.figures import Neighbours, machine, results_file, run_worker, spread
from benchmarks.gpt import DEFAULT, Size
from benchmarks.precision_worker import BY_HAND, MODES, ZERO1, ZERO2
from benchmarks.step import ENVIRONMENT, ON_SOCKETS, overheads, relative

TARGETS = {2: 0.7, 4: 0.5}  # of float32, relative to masters by hand
MODE_TARGETS = {"remainder": 1.15, "stochastic": 1.3}  # relative to float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=10)
    for name in ("layers", "width", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name), help="of the model")
    parser.add_argument("--note", default="", help="about the machine, for the results file")
    parser.add_argument("--output", type=Path, default=results_file("precision"))
    options = parser.parse_args()
    size = DEFAULT._replace(layers=options.layers, width=options.width, vocabulary=options.vocabulary)
    measured: dict[int, dict] = {}
    text = ""
    for ranks in options.ranks:
        measured[ranks] = measure(ranks, size, options.rounds)
        text = report(measured, size, options)  # written each time: whoever interrupts keeps what there is
        options.output.write_text(text)
        options.output.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")
    print(text)


def measure(ranks: int, size: Size, rounds: int) -> dict:
    def run(task: dict, env: dict[str, str]) -> dict:
        text = json.dumps({**task, "size": size})
        return run_worker("benchmarks.precision_worker", ranks, text, env={**ENVIRONMENT, **env})

    neighbours = Neighbours()
    measured = {
        "times": run({"kind": "times", "rounds": rounds}, {}),
        "demands": run({"kind": "demands"}, ON_SOCKETS),
    }
    return {**measured, "neighbours": neighbours.share()}


# --- text ---------------------------------------------------------------------------------------------------------


def report(measured: dict[int, dict], size: Size, options: argparse.Namespace) -> str:
    parameters = next(iter(measured.values()))["times"]["parameters"]
    chosen = {"rounds": options.rounds, "layers": size.layers, "width": size.width, "vocabulary": size.vocabulary}
    arguments = " ".join(f"--{name} {value}" for name, value in chosen.items())
    lines = [
        f"# Precision figures, {datetime.date.today().isoformat()}",
        "",
        machine(),
        f'Command: `make bench-precision ARGS="{arguments}"`. Raw numbers: the .json beside this file.',
        f"A GPT of {parameters / 1e6:.1f} M parameters in bfloat16 ({size.layers} layers, width {size.width}, "
        f"vocabulary {size.vocabulary}), fused AdamW.",
        "Times in ms, median (middle half), barrier to barrier, through shared memory. *Overhead* is an iteration "
        "minus forward and backward alone; ratios are taken round by round.",
        "Not measured: DeepSpeed in bfloat16, stages 1 and 2. Nobody has written that contestant yet.",
        *([f"**{options.note}**"] if options.note else []),
        "",
    ]
    for ranks, figures in measured.items():
        lines += [f"## {ranks} ranks", ""]
        lines += [f"Other programs took {figures['neighbours']:.0%} of the cores' time.", ""]
        lines += iterations(figures["times"]) + targets(figures["times"]["times"], ranks)
        lines += memory(figures["demands"]) + wire(figures["demands"], ranks)
    return "\n".join(lines) + "\n"


def iterations(figures: dict) -> list[str]:
    times = figures["times"]
    lines = ["### Iterations", "", f"| variant | ms | overhead, ms | relative to {BY_HAND} | weights |"]
    lines.append("|---|---|---|---|---|")
    for name, values in times.items():
        row = [name, spread(values)]
        if name == ALONE:
            row += ["", "", ""]
        else:
            row += [spread(overheads(times, name)), spread(relative(times, name, BY_HAND), 2)]
            row.append(f"{figures['differences'][name]:.3f}" if name != BY_HAND else "")
        lines.append(f"| {' | '.join(row)} |")
    lines += [f"| {name} | {reason} | | | |" for name, reason in figures["failures"].items()]
    told = f"*Weights*: distance from those of {BY_HAND} after the warm-up, relative to how far those have come."
    return [*lines, "", told, ""]


def targets(times: dict[str, list[float]], ranks: int) -> list[str]:
    lines = ["| overhead | value | target |", "|---|---|---|"]
    for names in (ZERO1, ZERO2):
        pairs = [(names["float32"], BY_HAND, TARGETS.get(ranks))]
        pairs += [(names[mode], names["float32"], MODE_TARGETS.get(mode)) for mode in MODES if mode != "float32"]
        for ours, theirs, target in pairs:
            if ours in times and theirs in times:
                limit = f"<= {target}" if target else ""
                lines.append(f"| {ours} / {theirs} | {spread(relative(times, ours, theirs), 2)} | {limit} |")
    return [*lines, ""]


def memory(demands: dict) -> list[str]:
    lines = ["### Bytes per parameter and rank", ""]
    lines += ["After a backward, measured on live tensors; the worst rank. *Scratch* is used by updates only."]
    lines += ["*Allocated*: what glibc counts for the whole variant then, DDP's and gloo's buffers included."]
    lines += ["FSDP2's parameters are float32 shards; the 16-bit copy (2 bytes) lives from forward to backward.", ""]
    kinds = ["parameters", "gradients", "state", "masters", "scratch"]
    lines += [f"| variant | {' | '.join(kinds)} | without scratch | allocated |", "|---" * 8 + "|"]
    for name, figures in demands.items():
        if "failure" in figures:
            lines.append(f"| {name} | {figures['failure']}{' |' * 7}")
            continue
        held = [figures["held"][kind] for kind in kinds]
        row = [*held, sum(held[:-1]), figures["allocated"]]
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in row)} |")
    return [*lines, ""]


def wire(demands: dict, ranks: int) -> list[str]:
    lines = ["### Bytes of the gather per parameter", ""]
    lines += [f"What a rank sends in `step()`, over sockets, times {ranks}/{ranks - 1} (it sends nothing to itself)."]
    lines += ["", "| variant | asked of torch.distributed | written by the process | calls |", "|---|---|---|---|"]
    for name in ZERO1.values():
        figures = demands.get(name, {})
        if "asked" in figures:
            calls = ", ".join(f"{count} {call}" for call, count in figures["calls"].items())
            lines.append(f"| {name} | {figures['asked']:.3f} | {figures['written']:.3f} | {calls} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
