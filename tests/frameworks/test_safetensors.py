"""What ``export_model`` writes is a model for transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.oracle import assert_same


def test_transformers_reads_an_exported_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)  # with tied weights
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", optimizer, model)
    config.save_pretrained(tmp_path / "hf")
    checkpoint.export_model(tmp_path / "c", tmp_path / "hf" / "model.safetensors")
    found, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values()), told
    assert_same(dict(found.state_dict()), dict(model.state_dict()))
