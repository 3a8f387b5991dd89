"""transformers reads the models that we export."""

from __future__ import annotations

import pytest
import torch

from shardstep import ZeroRedundancyOptimizer, checkpoint, cli
from tests.oracle import assert_same

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_from_pretrained_reads_an_exported_model(tied, tmp_path):
    """In bfloat16 as it was trained, and in float32 from its masters."""
    transformers = pytest.importorskip("transformers", reason="in the environment of make test-frameworks")
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    named = list(model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(named, torch.optim.AdamW, lr=1e-3, master_weights=torch.float32)
    tokens = torch.arange(20).view(2, 10)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    checkpoint.save(tmp_path / "step-1", optimizer, model)
    masters = {name: optimizer.full_state(param)["master_weight"] for name, param in named}
    for folder, more, dtype in (("as_it_is", [], torch.bfloat16), ("masters", ["--master"], torch.float32)):
        file = tmp_path / folder / "model.safetensors"
        config.save_pretrained(file.parent)
        assert cli.main(["convert", str(tmp_path / "step-1"), str(file), *more]) == 0
        read, told = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=dtype, output_loading_info=True
        )
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        found = {name: param.detach() for name, param in read.named_parameters()}
        assert_same(found, masters if more else {name: param.detach() for name, param in named}, folder)


def test_from_pretrained_reads_what_export_model_writes(tmp_path):
    transformers = pytest.importorskip("transformers", reason="in the environment of make test-frameworks")
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
