"""Small programs as users of each framework write them. Run by torchrun: ``programs.py NAME DIRECTORY``.

Each trains with a ZeroRedundancyOptimizer, saves with ``shardstep.checkpoint`` what the framework calls the optimizer,
with the last rank half a second late, and loads it into a new one. It is an error if anything is lost on the way.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstep import ZeroRedundancyOptimizer, checkpoint


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 31), torch.nn.Tanh(), torch.nn.Linear(31, 3)).double()


def new_optimizer(model: torch.nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 7, dtype=torch.float64, generator=generator)


def states(optimizer: ZeroRedundancyOptimizer) -> list[dict[str, Any]]:
    return [optimizer.full_state(param) for group in optimizer.param_groups for param in group["params"]]


def save_and_load(directory: Path, wrapper: Any, optimizer: ZeroRedundancyOptimizer, wrap: Callable) -> None:
    """Save through the wrapper, load into a new optimizer through a new wrapper: the same state on every rank."""
    assert wrapper is not optimizer, "the case that this is about"
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.5)
    checkpoint.save(directory, wrapper, extra={"step": 2})
    dist.barrier()
    checkpoint.verify(directory)
    model = new_model()
    fresh = new_optimizer(model)
    assert checkpoint.load(directory, wrap(fresh)) == {"step": 2}
    for one, other in zip(states(fresh), states(optimizer), strict=True):
        assert one.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(one[key], other[key]) for key in one)
    print(f"rank {dist.get_rank()}: saved and loaded through {type(wrapper).__name__}", flush=True)


def lightning(directory: Path) -> None:
    import lightning as L
    from lightning.pytorch.core.optimizer import LightningOptimizer

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = new_model(), False

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return new_optimizer(self.model)

        def training_step(self, inputs: Any, position: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.model(batch(position)).square().mean())
            optimizer.step()
            if position == 1:
                save_and_load(directory, optimizer, optimizer.optimizer, LightningOptimizer)
                optimizer.consolidate_state_dict()
                assert any(optimizer.state_dict()["state"].values()) == (dist.get_rank() == 0)
            if position == 3:  # two steps later what was collected is stale, so no file is written
                for one in (optimizer, optimizer.optimizer):
                    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=0\)"):
                        pickle.dumps(one.state_dict())

    data = torch.utils.data.DataLoader(torch.zeros(32, 1), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist_size(),
        strategy="ddp",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), data)
    assert trainer.global_step == 4


def fabric(directory: Path) -> None:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist_size(), strategy="ddp")
    fabric.launch()
    raw = new_model()
    optimizer = new_optimizer(raw)
    model, wrapper = fabric.setup(raw, optimizer)
    for step in range(2):
        wrapper.zero_grad()
        fabric.backward(model(batch(step)).square().mean())
        wrapper.step()
    save_and_load(directory, wrapper, optimizer, fabric.setup_optimizers)


def trainer(directory: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model(inputs).square().mean()}

    saved = []

    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                wrap = type(optimizer)
                save_and_load(directory, optimizer, optimizer.optimizer, lambda fresh: wrap(fresh))
                saved.append(state.global_step)

    arguments = TrainingArguments(
        output_dir=str(directory.parent / "trainer"),
        max_steps=4,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = Model()
    data = [{"inputs": torch.full((7,), float(i), dtype=torch.float64)} for i in range(64)]
    optimizers = (new_optimizer(model), None)
    Trainer(model=model, args=arguments, train_dataset=data, optimizers=optimizers, callbacks=[Save()]).train()
    assert saved == [2]


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    name, target = sys.argv[1:]
    if name == "trainer":  # it starts the process group late, after the optimizer was built
        dist.init_process_group("gloo")
    {"lightning": lightning, "fabric": fabric, "trainer": trainer}[name](Path(target))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
