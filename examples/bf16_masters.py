"""What float32 masters are worth: one small GPT trained in float32, and in bfloat16 with and without masters.

    torchrun --standalone --nproc-per-node 2 examples/bf16_masters.py

Prints the held-out loss of every way, each trained with three seeds: the spread of float32's is what a difference has
to exceed to mean something. --plot FILE draws the losses (pip install 'shardstep[plots]'). docs/precision.md explains
the ways.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from byte_gpt import byte_gpt, held_out_loss, load_text, mean_loss, pick_device, refuse, training_batch, warmup_cosine
from shardstep import ZeroRedundancyOptimizer

FLOAT32 = "float32"
WAYS: dict[str, tuple[torch.dtype, Any]] = {  # the model's dtype, and master_weights
    FLOAT32: (torch.float32, None),
    "bfloat16, float32 masters": (torch.bfloat16, torch.float32),
    'bfloat16, "remainder"': (torch.bfloat16, "remainder"),
    'bfloat16, "stochastic"': (torch.bfloat16, "stochastic"),
    "bfloat16, no masters": (torch.bfloat16, None),
}
# Of --plot. Curves that lie on each other are drawn from wide to narrow.
STYLES: dict[str, dict[str, Any]] = {
    FLOAT32: {"color": "0.45", "linewidth": 5},
    "bfloat16, float32 masters": {"color": "C0", "linewidth": 3.5},
    'bfloat16, "remainder"': {"color": "C1", "linewidth": 2},
    'bfloat16, "stochastic"': {"color": "C2", "linewidth": 1, "marker": "."},
    "bfloat16, no masters": {"color": "C3", "linewidth": 2.5},
}
Curve = dict[int, float]  # after how many steps, which held-out loss


def train(
    args: Namespace, text: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype, masters: Any, seed: int
) -> Curve:
    """Train one model. Its first weights and its batches depend on the seed."""
    torch.manual_seed(seed)
    gpt = byte_gpt(args.width, args.layers, args.heads).to(device, dtype)
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        gpt.parameters(),
        torch.optim.AdamW,
        lr=args.lr,
        betas=(0.9, 0.95),
        master_weights=masters,
        rounding_seed=seed if masters == "stochastic" else 0,
    )
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    curve: Curve = {}
    for step in range(args.steps):
        optimizer.zero_grad()
        mean_loss(model, training_batch(text[0], step, args.batch_size, args.context, seed, device)).backward()
        optimizer.step()
        schedule.step()
        if (done := step + 1) % args.look_every == 0 or done == args.steps:
            curve[done] = held_out_loss(gpt, text[1], args.context, device)
    return curve


def print_table(curves: dict[str, list[Curve]], steps: int) -> None:
    """The last losses, and how far their mean is from that of float32."""
    last = {way: [curve[steps] for curve in seeds] for way, seeds in curves.items()}
    print(f"{'held-out loss':<28}{'by seed':<{9 * len(last[FLOAT32])}}{'mean':>8}{'difference':>12}")
    for way, losses in last.items():
        by_seed = "".join(f"{loss:<9.4f}" for loss in losses)
        print(f"{way:<28}{by_seed}{mean(losses):>8.4f}{mean(losses) - mean(last[FLOAT32]):>+12.4f}")
    print(f"spread of the float32 seeds: {min(last[FLOAT32]):.4f} to {max(last[FLOAT32]):.4f}")


def plot(curves: dict[str, list[Curve]], steps: int, file: str) -> None:
    """On the left the way there, means over the seeds; on the right the end, a dot per seed. Float32 is a band."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), width_ratios=[6, 5], layout="constrained")
    spread = {step: [curve[step] for curve in curves[FLOAT32]] for step in curves[FLOAT32][0]}
    low, high = [min(losses) for losses in spread.values()], [max(losses) for losses in spread.values()]
    left.fill_between(list(spread), low, high, color="0.85", label=f"{FLOAT32}, from seed to seed")
    right.axhspan(low[-1], high[-1], color="0.85")
    for position, (way, seeds) in enumerate(curves.items()):
        means = [mean([curve[step] for curve in seeds]) for step in spread]
        left.plot(list(spread), means, label=f"{FLOAT32}, mean" if way == FLOAT32 else way, **STYLES[way])
        right.plot([position] * len(seeds), [curve[steps] for curve in seeds], "o", color=STYLES[way]["color"])
    left.set(xlabel="step", ylabel="held-out loss, nats per byte", title="On the way: means over the seeds")
    left.set_ylim(low[-1] - 0.04, low[-1] + 0.5)
    left.legend(frameon=False)
    right.set(title=f"After {steps} steps: a dot per seed", ylabel="held-out loss, nats per byte")
    labels = [way.replace(", ", ",\n").replace(" masters", "\nmasters") for way in curves]
    right.set_xticks(range(len(curves)), labels, fontsize="small")
    for axes in (left, right):
        axes.grid(axis="y", color="0.93")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    sizes = {"steps": 240, "batch-size": 8, "context": 64, "width": 64, "layers": 2, "heads": 4}
    sizes |= {"look-every": 30, "seeds": 3}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into a file; needs matplotlib")
    args = parser.parse_args()
    if args.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            refuse("--plot needs matplotlib: pip install 'shardstep[plots]'")
    return args


def main() -> None:
    args = parse_arguments()
    device = pick_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    text = load_text()
    curves = {
        way: [train(args, text, device, dtype, masters, seed) for seed in range(args.seeds)]
        for way, (dtype, masters) in WAYS.items()
    }
    if dist.get_rank() == 0:
        print_table(curves, args.steps)
        if args.plot:
            plot(curves, args.steps, args.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
