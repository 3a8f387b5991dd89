"""A byte-level GPT and its text, Python's own standard library: what the other examples share. Nothing to run here.

Batches depend on the number of the step only, and every rank takes its part: whoever resumes, with however many ranks,
sees the sequences that come next.
"""

from __future__ import annotations

import math
import os
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SKIPPED_DIRS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_ONE_IN = 20
HELD_OUT_WINDOWS = 256


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position, so attention sees distances."""
    position = torch.arange(x.shape[-2], device=x.device)[:, None]
    angle = position * torch.logspace(0, -3, x.shape[-1] // 2, device=x.device)
    left, right = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1).to(x.dtype)


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
    """This rank's part of the starts: a row of context + 1 bytes each, inputs and, one to the right, targets."""
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    return text[mine[:, None] + torch.arange(context + 1)].to(device, torch.long)


def training_batch(text: Tensor, step: int, size: int, context: int, seed: int, device: torch.device) -> Tensor:
    """This rank's rows of a step's batch; ``size`` counts the rows of all ranks."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (size,), generator=generator)
    return windows(text, starts, context, device)


def mean_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, context: int, device: torch.device) -> float:
    """Mean loss over evenly spaced windows, the same ones for any number of ranks, in nats per byte."""
    starts = torch.linspace(0, len(text) - context - 1, HELD_OUT_WINDOWS, dtype=torch.float64).long()
    total = torch.zeros((), device=device)
    for rows in windows(text, starts, context, device).split(16):
        total += len(rows) * mean_loss(model, rows)
    dist.all_reduce(total)
    return total.item() / len(starts)


def warmup_cosine(step: int, steps: int) -> float:
    """The learning rate at a step, as a part of the highest one."""
    return min(1.0, 20 * (step + 1) / steps) * (1 + math.cos(math.pi * step / steps)) / 2


def refuse(message: str) -> NoReturn:
    """End with a message, of one rank of each host, and the exit code of wrong arguments."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr)
    sys.exit(2)


def gathered(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank, on every rank."""
    mine = torch.tensor(numbers, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def pick_device() -> torch.device:
    """An accelerator for every rank if there are enough, else the CPU. Without torchrun: the command to start it."""
    if "RANK" not in os.environ:
        script = os.path.relpath(sys.argv[0])
        command = f"torchrun --standalone --nproc-per-node 2 {script}"
        refuse(f"{os.path.basename(script)} needs one process per rank; start it with:\n    {command}")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or torch.accelerator.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cpu")
    index = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)
