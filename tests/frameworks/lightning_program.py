"""Lightning: automatic optimization, ``ModelCheckpoint``, and ``fit(ckpt_path=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import shardstep
from shardstep.integrations.lightning import ShardedStrategy
from tests.frameworks import work
from tests.frameworks.work import ACCUMULATE, CLIP, END, HOOK, MIDDLE, PLAIN, ZERO1, ZERO2

MODES = (PLAIN, ZERO1, HOOK, ZERO2)


class Module(L.LightningModule):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.model, self.mode = work.Model(), mode

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = work.new_optimizer(self.mode, self.model.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": work.new_scheduler(optimizer), "interval": "step"},
        }

    def on_train_start(self) -> None:
        if self.mode == HOOK:
            shardstep.shard_ddp_gradients(self.trainer.strategy.model, self.optimizers())

    def training_step(self, inputs: torch.Tensor, position: int) -> torch.Tensor:
        return self.model(work.my_rows(position))


def run(mode: str, folder: Path, resume: bool, report: Path) -> None:
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=MIDDLE, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=work.world_size(),
        strategy=ShardedStrategy() if mode == ZERO2 else "ddp",
        max_steps=END,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=[] if resume else [saving],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=not resume,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(mode)
    data = torch.utils.data.DataLoader(torch.zeros(END * ACCUMULATE), batch_size=1)
    trainer.fit(module, data, ckpt_path=folder / f"step={MIDDLE}.ckpt" if resume else None)
    assert trainer.global_step == END
    optimizer: Any = trainer.optimizers[0]
    work.report(report, module.model, optimizer)
