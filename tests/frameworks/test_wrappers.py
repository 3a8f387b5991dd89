"""A framework that wraps the model in DDP although the optimizer shards its gradients is told the way round for it.

(That the ways round train as plain DDP: test_resuming.py.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.surroundings import as_under_torchrun

pytestmark = pytest.mark.extra


class Model(nn.Module):
    """As HF's Trainer wants it: returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(inputs).square().mean()}


def sharded(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), SGD, shard_gradients=True, lr=0.1)


def accelerator(folder: Path) -> None:
    from accelerate import Accelerator

    model = Model()
    Accelerator(cpu=True).prepare(model, sharded(model))


def fabric(folder: Path) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model = Model()
    fabric.setup(model, sharded(model))


def lightning(folder: Path) -> None:
    """(It wraps before it asks for the optimizer: there building it is what is refused.)"""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sharded(self.model)

        def training_step(self, inputs: Any, position: int) -> Tensor:
            return self.model(inputs)["loss"]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=1, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(32, 5), batch_size=4))


def trainer(folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, ddp_backend="gloo", save_strategy="no", report_to=[]
    )
    model = Model()
    rows = [{"inputs": torch.ones(5)}] * 8
    Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(sharded(model), None)).train()


FRAMEWORKS: dict[Callable[[Path], None], tuple[str, str]] = {
    accelerator: ("accelerate", "With Accelerate: give accelerator.prepare everything but the model"),
    fabric: ("lightning", "Fabric(strategy=shardstep.integrations.fabric.ShardedStrategy()) does not wrap"),
    lightning: ("lightning", "shardstep.shard_ddp_gradients(self.trainer.model, optimizer) in on_train_start"),
    trainer: ("transformers", "shardstep.shard_ddp_gradients(trainer.model_wrapped, optimizer) in a callback's"),
}


def refused(rank: int, world: int, framework: Callable[[Path], None], folder: Path) -> str:
    as_under_torchrun(rank, world)
    return str(error_of(lambda: framework(folder), "a framework that wraps the model"))


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.__name__)
def test_a_framework_that_wraps_is_told_the_way_round_for_it(framework, tmp_path):
    package, words = FRAMEWORKS[framework]
    pytest.importorskip(package, reason="in the environment of make test-frameworks")
    for told in run_ranks(refused, 2, framework, tmp_path, fresh=True, pg_timeout=20):
        assert "shard_gradients=True expects a model that is not wrapped" in told
        assert words in told
