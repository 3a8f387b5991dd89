"""The model that the step figures are measured on, and its batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int


DEFAULT = Size(8, 512, 8, 8192, 32)  # 33.6 M parameters in 101 tensors


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron; each reads a normalised copy of its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge_heads = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        per_head = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge_heads(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.perceptron_norm(x))))


class GPT(nn.Module):
    """A decoder whose head is not tied to its embedding. Returns the loss."""

    def __init__(self, size: Size = DEFAULT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both (batch, context)
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_gpt(size: Size = DEFAULT) -> GPT:
    """The same weights on every call and rank."""
    torch.manual_seed(0)
    return GPT(size)


def make_batch(rank: int, number: int, sequences: int = 1, size: Size = DEFAULT) -> tuple[Tensor, Tensor]:
    """Batch ``number`` of a rank: the same for every variant."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    text = torch.randint(size.vocabulary, (sequences, size.context + 1), generator=generator)
    return text[:, :-1], text[:, 1:]
