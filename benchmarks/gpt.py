"""The model that the step figures are measured on, and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 8, 512, 8, 8192, 32


class Block(nn.Module):
    """Causal attention, then a two-layer perceptron; each reads a normalised copy of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge_heads = nn.Linear(WIDTH, WIDTH)
        self.perceptron_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, WIDTH)
        per_head = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = per_head.permute(2, 0, 3, 1, 4)  # each (batch, HEADS, tokens, WIDTH / HEADS)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge_heads(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.perceptron_norm(x))))


class GPT(nn.Module):
    """33.6 M parameters in 101 tensors: 8 layers, width 512, vocabulary 8192, head not tied. Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # both (batch, CONTEXT)
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_gpt() -> GPT:
    """The same weights on every call and rank."""
    torch.manual_seed(0)
    return GPT()


def make_batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Batch ``number`` of a rank, 1 x 32 tokens: the same for every variant."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    text = torch.randint(VOCABULARY, (1, CONTEXT + 1), generator=generator)
    return text[:, :-1], text[:, 1:]
