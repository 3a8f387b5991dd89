"""A model that cannot be loaded is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardstep.checkpoint.model_swap import ModelSwap
from tests.oracle import assert_same


class _WithRepeatedBuffer(nn.Module):
    """One of its tensors has several elements at one place: it cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 1)
        self.register_buffer("repeated", torch.zeros(1).expand(4))


def test_a_model_with_a_tensor_that_cannot_be_written_to_is_put_back() -> None:
    model = _WithRepeatedBuffer()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    read = {key: torch.ones_like(value, memory_format=torch.contiguous_format) for key, value in before.items()}
    with pytest.raises(RuntimeError, match="single memory location"):
        ModelSwap(model, read, strict=True).load()
    assert_same(model.state_dict(), before)
