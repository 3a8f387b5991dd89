"""What each rank holds with plain AdamW, with a sharded AdamW, and with sharded gradients: measured, side by side.

    torchrun --standalone --nproc-per-node 2 examples/memory.py

Two steps of the same small GPT each. Counted are the bytes of live tensors: not activations, nor what is under way.
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from byte_gpt import byte_gpt, gathered, load_text, mean_loss, pick_device, training_batch
from shardstep import MemoryReport, ZeroRedundancyOptimizer

PLAIN, ZERO1, ZERO2 = "DDP + AdamW", "DDP + shardstep", "shard_gradients=True"


def measured(model: nn.Module, optimizer: Optimizer) -> MemoryReport:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.memory()
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return MemoryReport(*(sum(tensor.nbytes for tensor in tensors) for tensors in (params, grads, state)))


def train_two_steps(way: str, args: Namespace, text: Tensor, device: torch.device) -> list[list[int]]:
    """Take two steps in one of the three ways; what every rank holds then."""
    torch.manual_seed(0)
    model: nn.Module = byte_gpt(args.width, args.layers, args.heads).to(device)
    shard_gradients = way == ZERO2
    if not shard_gradients:
        # Without bucket views DDP holds every gradient twice: in the parameter and in its bucket.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == PLAIN:
        optimizer: Optimizer = AdamW(model.parameters())
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, shard_gradients=shard_gradients)
    for step in range(2):
        optimizer.zero_grad()
        mean_loss(model, training_batch(text, step, 2 * dist.get_world_size(), 32, 0, device)).backward()
        optimizer.step()
    return gathered(measured(model, optimizer)[:3], device)  # parameters, gradients, state; there are no masters


def print_row(way: str, rank: object, *sizes: float) -> None:
    print(f"{way:<22}{rank:>6}" + "".join(f"{size / 1e6:>12.2f}" for size in (*sizes, sum(sizes))))


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    for name, default in {"width": 192, "layers": 4, "heads": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the model")
    args = parser.parse_args()
    device = pick_device()
    dist.init_process_group(dist.get_default_backend_for_device(device))
    text, _ = load_text()
    rows = {way: train_two_steps(way, args, text, device) for way in (PLAIN, ZERO1, ZERO2)}
    if dist.get_rank() == 0:
        print(f"{'MB':<22}{'rank':>6}{'parameters':>12}{'gradients':>12}{'state':>12}{'sum':>12}")
        for way, reports in rows.items():
            for rank, held in enumerate(reports):
                print_row(way, rank, *held)
        whole = rows[PLAIN][0][0]
        print_row("unsharded, computed", "each", whole, whole, 2 * whole)  # AdamW: two values for each parameter
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
