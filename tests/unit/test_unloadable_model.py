"""A model that cannot be loaded is as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.oracle import assert_same


def test_a_model_with_a_tensor_that_cannot_be_written_to_is_put_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model.register_buffer("repeated", torch.zeros(4))
    checkpoint.save(tmp_path / "saved", ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1), model)
    with torch.no_grad():
        model[0].weight.add_(1)
    model.repeated = torch.zeros(1).expand(4)  # several elements at one place
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="single memory location"):
        checkpoint.load_model(tmp_path / "saved", model)
    assert_same(model.state_dict(), before)
