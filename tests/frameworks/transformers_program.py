"""The Trainer of transformers: saved by ``save_steps``, resumed with ``resume_from_checkpoint``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from shardstep import ZeroRedundancyOptimizer
from shardstep.integrations.transformers import ShardstepCallback
from tests.frameworks import work
from tests.frameworks.work import ACCUMULATE, CLIP, END, HOOK, MIDDLE, OPTIONS, PLAIN, ZERO1

MODES = (PLAIN, ZERO1, HOOK)  # the Trainer wraps every model in DDP


class Model(work.Model):
    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(inputs)}


class Look(TrainerCallback):
    """Notes what a gradient is: the Trainer throws it away."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.gradient = type(model.net[0].weight.grad).__name__


def run(mode: str, folder: Path, resume: bool, report: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=END,
        per_device_train_batch_size=work.ROWS // work.world_size(),
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=CLIP,
        learning_rate=OPTIONS["lr"],
        weight_decay=OPTIONS["weight_decay"],
        lr_scheduler_type="linear",
        save_strategy="no" if resume else "steps",
        save_steps=MIDDLE,
        logging_strategy="steps",
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    chosen: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {"lr": OPTIONS["lr"]})
    if mode != PLAIN:
        chosen = (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, "lr": OPTIONS["lr"]})
    model, look = Model(), Look()
    rows = torch.cat([work.rows_of(micro) for micro in range(END * ACCUMULATE)])
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"inputs": row} for row in rows],
        optimizer_cls_and_kwargs=chosen,
        callbacks=[look] if mode == PLAIN else [look, ShardstepCallback(shard_gradients=mode == HOOK)],
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{MIDDLE}") if resume else None)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == END
    assert min(norms) > CLIP
    work.report(report, model, trainer.optimizer.optimizer, look.gradient)
