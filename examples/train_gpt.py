"""Train a small byte-level GPT on Python's own standard library, with DDP and a sharded AdamW: how to use shardstep.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

Prints the held-out loss before and after, and what every rank holds in memory. Saves as it goes; started again, with
any number of ranks, it goes on where it was. Model, text and batches are in byte_gpt.py and know nothing of shardstep.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from byte_gpt import (
    byte_gpt,
    gathered,
    held_out_loss,
    load_text,
    mean_loss,
    pick_device,
    refuse,
    training_batch,
    warmup_cosine,
)
from shardstep import ZeroRedundancyOptimizer, checkpoint


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="sequences per step, all ranks together")
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--width", type=int, default=192, help="model width, a multiple of twice the heads")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--heads", type=int, default=6, help="attention heads per block")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    add("--checkpoints", type=Path, default=Path("checkpoints"), help="where to save; a folder per model and seed")
    add("--save-every", type=int, default=100, help="steps between checkpoints; the newest two are kept")
    add("--fresh", action="store_true", help="start over, whatever was saved")
    return parser.parse_args()


def check(args: Namespace) -> None:
    """What can be wrong is found before training, not after the first hundred steps."""
    for name in ("steps", "batch_size", "context", "width", "layers", "heads", "save_every"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.batch_size < int(os.environ["WORLD_SIZE"]):
        refuse(f"--batch-size {args.batch_size} must be at least one sequence per rank")
    if args.width % (2 * args.heads):
        refuse(f"--width {args.width} must be a multiple of twice --heads {args.heads}")
    try:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.checkpoints).close()
    except OSError as error:
        refuse(f"--checkpoints {args.checkpoints}: nothing can be saved there ({error})")


def leave_on_interrupt(folder: Path) -> None:
    """On Ctrl-C end where we stand. Every rank stands elsewhere, so nothing that takes all ranks can follow."""

    def leave(*_: object) -> None:
        if dist.get_rank() == 0:
            saved = checkpoint.latest(folder, thorough=False)
            told = f"Saved last: {saved}. The same command goes on from there." if saved else "Nothing was saved yet."
            os.write(1, f"\nInterrupted. {told}\n".encode())  # (print might be what was interrupted)
        os._exit(130)  # without waiting: a checkpoint is complete, or not there

    signal.signal(signal.SIGINT, leave)


def print_memory(optimizer: ZeroRedundancyOptimizer, device: torch.device) -> None:
    """What every rank holds, measured, and what AdamW would hold unsharded: two values for each parameter."""
    reports = gathered(optimizer.memory(), device)
    for rank, held in enumerate(reports if dist.get_rank() == 0 else ()):
        parameters, gradients, state, whole = (f"{size / 1e6:.1f} MB" for size in (*held[:3], 2 * held[0]))
        print(f"rank {rank}: parameters {parameters}, gradients {gradients}, optimizer state {state} of {whole}")


def train(args: Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda text: None
    # Another model cannot go on with these weights, so it has another folder.
    folder = args.checkpoints / f"gpt-{args.width}x{args.layers}x{args.heads}-seed{args.seed}"
    leave_on_interrupt(folder)
    text, held_out = load_text()
    say(f"{len(text):,} bytes to train on, {len(held_out):,} held out")

    torch.manual_seed(args.seed)
    model = byte_gpt(args.width, args.layers, args.heads).to(device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    # The line that shards: the groups, class and options that AdamW takes, but each rank keeps 1/N of its state.
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, sharded AdamW, ranks: {ranks} ({device.type})")

    sizes = {"width": args.width, "layers": args.layers, "heads": args.heads, "context": args.context}
    first, saving = 0, None
    found = None if args.fresh else checkpoint.resume(folder, optimizer, model)
    if found is not None:
        path, extra = found
        first = extra["step"]
        schedule.load_state_dict(extra["schedule"])
        say(f"resumed from {path}, step {first} of {args.steps} (--fresh starts over)")

    nats = held_out_loss(model, held_out, args.context, device)  # every rank takes a part
    say(f"held-out loss before training: {nats:.3f} nats per byte")
    began, shown, recent = time.perf_counter(), max(1, args.steps // 12), []
    for step in range(first, args.steps):
        rows = training_batch(text, step, args.batch_size, args.context, args.seed, device)
        optimizer.zero_grad()
        loss = mean_loss(ddp, rows)
        # DDP takes the mean over ranks; with uneven parts of the batch that is not the mean over sequences.
        (loss * len(rows) * ranks / args.batch_size).backward()
        optimizer.clip_grad_norm_(args.clip)
        optimizer.step()
        schedule.step()

        done = step + 1
        if done % args.save_every == 0 or done == args.steps:
            extra = {"step": done, "schedule": schedule.state_dict(), "sizes": sizes}
            # In the background: training goes on at once. The next save waits for this one.
            saving = checkpoint.save(
                folder / f"step-{done:06}", optimizer, model, extra=extra, keep=2, asynchronous=True
            )
        recent.append(loss.detach())
        if done % shown == 0 or done == args.steps:  # reading a loss waits for the device: not at every step
            speed = (done - first) * args.batch_size * args.context / (time.perf_counter() - began)
            say(f"step {done:5}/{args.steps}  loss {torch.stack(recent).mean().item():.3f}  {speed:,.0f} bytes/s")
            recent.clear()
    nats = held_out_loss(model, held_out, args.context, device)  # every rank takes a part
    say(f"held-out loss after training:  {nats:.3f} nats per byte")
    if saving is not None:
        saved = saving.wait()  # on every rank, before any of them leaves
        say(f"saved in {saved}")
    print_memory(optimizer, device)


def main() -> None:
    args = parse_args()
    device = pick_device()
    check(args)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=None if device.type == "cpu" else device)
    try:
        train(args, device)
        dist.barrier()  # with gloo, a program that ends right after a collective may abort
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
