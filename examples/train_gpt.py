"""Train a small byte-level GPT on Python's own standard library, with DDP and a sharded AdamW.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

Prints the held-out loss before and after, what every rank really holds in memory, and a sample. Saves as it goes;
started again, with any number of ranks, it goes on where it was.
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
import time
import zlib
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardstep import ZeroRedundancyOptimizer, checkpoint

COMMAND = "torchrun --standalone --nproc-per-node 2 examples/train_gpt.py"
SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_ONE_IN = 20
FUSED_ADAMW_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description="Train a small byte-level GPT on Python's standard library with DDP and shardstep.",
        epilog=f"start it with: {COMMAND}",
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=positive, default=600, help="optimizer steps")
    add("--batch-size", type=positive, default=16, help="sequences per step, all ranks together")
    add("--context", type=positive, default=128, help="bytes per sequence")
    add("--width", type=positive, default=192, help="model width")
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--heads", type=positive, default=6, help="attention heads per block")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--weight-decay", type=float, default=0.1, help="weight decay of the matrices")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--seed", type=int, default=0, help="seed of weights, batches and sample")
    add("--eval-windows", type=positive, default=256, help="held-out sequences, all ranks")
    add("--sample-length", type=positive, default=400, help="bytes of text to generate")
    add("--temperature", type=float, default=0.8, help="lower is safer, higher is wilder")
    add("--prompt", default="def ", help="start of the generated text")
    add("--shard", choices=["auto", "element", "tensor"], default="auto", help="how to split the state")
    add("--bucket-view", action="store_true", help="keep the parameters in flat buckets")
    add("--checkpoints", type=Path, default=Path("checkpoints"), help="where to save; a run per model and seed")
    add("--save-every", type=positive, default=100, help="steps between checkpoints; the newest two are kept")
    add("--fresh", action="store_true", help="start over, whatever was saved")
    args = parser.parse_args()
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} must be a multiple of twice --heads {args.heads}")
    return args


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position, so attention sees distances."""
    position = torch.arange(x.shape[-2], device=x.device)[:, None]
    angle = position * torch.logspace(0, -3, x.shape[-1] // 2, device=x.device)
    left, right = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron; each reads a normalised copy of its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge_heads = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        per_head = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.merge_heads(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.perceptron(x)


def byte_gpt(width: int, layers: int, heads: int) -> nn.Sequential:
    blocks = [Block(width, heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))


def load_text() -> tuple[Tensor, Tensor]:
    """The standard library as (training, held-out) bytes, split by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    splits = (bytearray(), bytearray())
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if SKIPPED_DIRS.isdisjoint(name.split("/")):
            # A checksum of the name, so that a file stays on its side whatever else is installed.
            held_out = zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0
            splits[held_out].extend((root / name).read_bytes() + b"\n")
    return torch.frombuffer(splits[0], dtype=torch.uint8), torch.frombuffer(splits[1], dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> Tensor:
    """One row of context + 1 bytes for every start: inputs and, one to the right, targets."""
    return text[starts[:, None] + torch.arange(context + 1)].to(device, torch.long)


def mean_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def training_batches(text: Tensor, first: int, args: Namespace, device: torch.device) -> Iterator[Tensor]:
    """This rank's sequences of every step from ``first`` on.

    A step's batch depends on its number only, and each rank takes its part of it: whoever resumes, with as many ranks
    as there are then, sees the sequences that come next.
    """
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        starts = torch.randint(len(text) - args.context, (args.batch_size,), generator=generator)
        yield windows(text, starts[dist.get_rank() :: dist.get_world_size()], args.context, device)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, args: Namespace, device: torch.device) -> float:
    """Mean loss over evenly spaced windows, the same ones for any number of ranks."""
    starts = torch.linspace(0, len(text) - args.context - 1, args.eval_windows, dtype=torch.float64).long()
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros((), device=device)
    for chunk in mine.split(args.batch_size):
        total += len(chunk) * mean_loss(model, windows(text, chunk, args.context, device))
    dist.all_reduce(total)
    return total.item() / len(starts)


def sharded_adamw(model: nn.Module, args: Namespace, device: torch.device) -> ZeroRedundancyOptimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return ZeroRedundancyOptimizer(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        AdamW,
        shard=args.shard,
        parameters_as_bucket_view=args.bucket_view,
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=device.type in FUSED_ADAMW_DEVICES,
    )


def warmup_times_cosine(optimizer: Optimizer, steps: int) -> LambdaLR:
    def factor(step: int) -> float:
        return min(1.0, 20 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2

    return LambdaLR(optimizer, factor)


class Run:
    """The training run: model, optimizer and schedule, and how many steps they have made."""

    def __init__(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer, args: Namespace) -> None:
        self.model, self.optimizer, self.args = model, optimizer, args
        self.schedule = warmup_times_cosine(optimizer, args.steps)
        self.step = 0
        self.last_save: checkpoint.SaveHandle | None = None
        # Another model cannot go on with these weights, so it is another run.
        self.folder = args.checkpoints / f"gpt-{args.width}x{args.layers}x{args.heads}-seed{args.seed}"

    def resume(self) -> Path | None:
        """Go on where the newest checkpoint was taken, with however many ranks. None: there is none."""
        found = None if self.args.fresh else checkpoint.resume(self.folder, self.optimizer, self.model)
        if found is None:
            return None
        path, extra = found
        self.step = extra["step"]
        self.schedule.load_state_dict(extra["schedule"])
        return path

    def save(self) -> None:
        """Save in the background: training goes on at once. The next save waits for this one."""
        self.last_save = checkpoint.save(
            self.folder / f"step-{self.step:06}",
            self.optimizer,
            self.model,
            extra={"step": self.step, "schedule": self.schedule.state_dict()},
            keep=2,
            asynchronous=True,
        )

    def losses(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Take one optimizer step for every loss that is asked for."""
        for rows in batches:
            self.optimizer.zero_grad()
            # DDP takes the mean over ranks; with uneven parts of the batch that is not the mean over sequences.
            loss = mean_loss(self.model, rows) * (len(rows) * dist.get_world_size() / self.args.batch_size)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            if self.step % self.args.save_every == 0 or self.step == self.args.steps:
                self.save()
            yield loss.detach()


def train(run: Run, batches: Iterator[Tensor], args: Namespace, console: Console) -> None:
    tokens_per_step = args.batch_size * args.context
    # Reading a loss waits for the device, so it is not done at every step.
    show_every = 5 if console.is_terminal else max(1, args.steps // 12)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    recent: list[Tensor] = []
    started, first = time.perf_counter(), run.step
    with Progress(*columns, console=console, disable=console.quiet or not console.is_terminal) as bar:
        task = bar.add_task("starting", total=args.steps, completed=first)
        for step, loss in enumerate(run.losses(batches), start=first + 1):
            recent.append(loss)
            bar.advance(task)
            if step % show_every == 0 or step == args.steps:
                speed = (step - first) * tokens_per_step / (time.perf_counter() - started)
                status = f"loss {torch.stack(recent).mean().item():.3f}  {speed:,.0f} tokens/s"
                recent.clear()
                bar.update(task, description=status)
                if not console.is_terminal:
                    console.print(f"step {step:5}/{args.steps}  {status}")


def allocated_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors, counting once what several of them share."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(model: nn.Module, optimizer: ZeroRedundancyOptimizer, device: torch.device) -> list[list[int]]:
    """For every rank, the bytes of its parameters, gradients and optimizer state."""
    parameters = list(model.parameters())
    state = [value for entry in optimizer.optim.state.values() for value in entry.values()]
    held = (
        allocated_bytes(parameters),
        allocated_bytes(p.grad for p in parameters if p.grad is not None),
        allocated_bytes(value for value in state if isinstance(value, Tensor)),
    )
    mine = torch.tensor(held, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [row.tolist() for row in everyone]


def memory_table(per_rank: list[list[int]], model: nn.Module) -> Table:
    # Plain AdamW keeps two fp32 values for every parameter and one fp32 step count for every tensor.
    plain_state = sum(2 * 4 * p.numel() + 4 for p in model.parameters())
    rows = [(*held, sum(held), plain_state) for held in per_rank]
    table = Table(title="Bytes per rank, as measured (last column: computed)", show_footer=True)
    table.add_column("rank", footer="total", justify="right")
    headers = ("parameters", "gradients", "optimizer state", "sum", "state if unsharded")
    for header, column in zip(headers, zip(*rows, strict=True), strict=True):
        table.add_column(header, footer=f"{sum(column):,}", justify="right", overflow="fold")
    for rank, row in enumerate(rows):
        table.add_row(str(rank), *(f"{value:,}" for value in row))
    return table


@torch.no_grad()
def generate(model: nn.Module, args: Namespace, device: torch.device) -> str:
    generator = torch.Generator().manual_seed(args.seed)
    # The blank lines put the prompt at the start of a line, as code has it.
    text = list(b"\n\n" + args.prompt.encode())
    for _ in range(args.sample_length):
        logits = model(torch.tensor([text[-args.context :]], device=device))[0, -1]
        # Drawn on the CPU, where the generator lives.
        chances = F.softmax(logits.float().cpu() / args.temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text[2:]).decode(errors="replace").rstrip()


def pick_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or torch.accelerator.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def run(args: Namespace, device: torch.device, console: Console) -> None:
    text, held_out = load_text()
    torch.manual_seed(args.seed)
    model = byte_gpt(args.width, args.layers, args.heads).to(device)
    # Gradients that live in DDP's buckets exist once; otherwise the table would miss DDP's own copy.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = sharded_adamw(model, args, device)
    count = sum(p.numel() for p in model.parameters())
    console.print(f"{count:,} parameters, sharded AdamW, ranks: {dist.get_world_size()} ({device.type})")
    console.print(f"{len(text):,} bytes to train on, {len(held_out):,} held out")

    training = Run(ddp, optimizer, args)
    resumed = training.resume()
    if resumed is not None:
        console.print(f"resumed from {resumed}, step {training.step} of {args.steps} (--fresh starts over)")
    loss = held_out_loss(model, held_out, args, device)
    console.print(f"held-out loss before training: {loss:.3f} nats per byte")
    train(training, training_batches(text, training.step, args, device), args, console)
    loss = held_out_loss(model, held_out, args, device)
    console.print(f"held-out loss after training:  {loss:.3f} nats per byte")

    if training.last_save is not None:
        console.print(f"saved in {training.last_save.wait()}")
    console.print(memory_table(measure(model, optimizer, device), model))
    if dist.get_rank() == 0:
        console.rule("sample")
        console.print(Text(generate(model, args, device)), soft_wrap=True)
    # Nobody tears the group down while rank 0 is still busy.
    dist.barrier()


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        print(f"train_gpt.py needs one process per rank; start it with:\n    {COMMAND}", file=sys.stderr)
        return 2
    if args.batch_size < int(os.environ["WORLD_SIZE"]):
        print(f"--batch-size {args.batch_size} must be a sequence per rank at the least", file=sys.stderr)
        return 2
    device = pick_device()
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=None if device.type == "cpu" else device)
    try:
        run(args, device, Console(quiet=dist.get_rank() != 0, highlight=False))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
