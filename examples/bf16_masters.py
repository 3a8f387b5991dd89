"""What float32 masters are worth: one small GPT trained in float32, and in bfloat16 with and without masters.

    torchrun --standalone --nproc-per-node 2 examples/bf16_masters.py

Prints the held-out loss of every way. Float32 is trained with three seeds: their spread is what a difference has to
exceed to mean something. The others take the first seed. --plot FILE draws the losses on the way (pip install
'shardstep[plots]'). docs/precision.md explains the ways.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from byte_gpt import byte_gpt, held_out_loss, load_text, mean_loss, pick_device, refuse, training_batch, warmup_cosine
from shardstep import ZeroRedundancyOptimizer

SEEDS = (0, 1, 2)
IN_BFLOAT16: dict[str, Any] = {
    "bfloat16, no masters": None,
    "bfloat16, float32 masters": torch.float32,
    'bfloat16, "remainder"': "remainder",
    'bfloat16, "stochastic"': "stochastic",
}
Curve = list[tuple[int, float]]  # steps that were taken, and the held-out loss then


def train(
    args: Namespace, text: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype, masters: Any, seed: int
) -> Curve:
    """Train one model. Batches depend on the seed, too."""
    torch.manual_seed(seed)
    gpt = byte_gpt(args.width, args.layers, args.heads).to(device, dtype)
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        gpt.parameters(), torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95), master_weights=masters, rounding_seed=seed
    )
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    curve: Curve = []
    for step in range(args.steps):
        optimizer.zero_grad()
        mean_loss(model, training_batch(text[0], step, args.batch_size, args.context, seed, device)).backward()
        optimizer.step()
        schedule.step()
        if (done := step + 1) % args.look_every == 0 or done == args.steps:
            curve.append((done, held_out_loss(gpt, text[1], args.context, device)))
    return curve


def print_table(curves: dict[str, Curve]) -> None:
    """The last losses, relative to the mean of the float32 ones."""
    last = {way: curve[-1][1] for way, curve in curves.items()}
    reference = [loss for way, loss in last.items() if way not in IN_BFLOAT16]
    mean = sum(reference) / len(reference)
    print(f"{'':<30}{'held-out loss':>14}{'difference':>12}")
    for way, loss in last.items():
        print(f"{way:<30}{loss:>14.4f}{loss - mean:>+12.4f}")
    print(f"spread of the float32 seeds: {min(reference):.4f} to {max(reference):.4f}")


def plot(curves: dict[str, Curve], file: str) -> None:
    from matplotlib import pyplot

    for way, curve in curves.items():
        style = {} if way in IN_BFLOAT16 else {"color": "0.7"}
        pyplot.plot(*zip(*curve, strict=True), label=way, **style)
    pyplot.xlabel("step")
    pyplot.ylabel("held-out loss, nats per byte")
    pyplot.legend()
    pyplot.savefig(file, dpi=150)


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    sizes = {"steps": 240, "batch-size": 8, "context": 64, "width": 64, "layers": 2, "heads": 4, "look-every": 60}
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
    curves = {f"float32, seed {seed}": train(args, text, device, torch.float32, None, seed) for seed in SEEDS}
    for way, masters in IN_BFLOAT16.items():
        curves[way] = train(args, text, device, torch.bfloat16, masters, SEEDS[0])
    if dist.get_rank() == 0:
        print_table(curves)
        if args.plot:
            plot(curves, args.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
