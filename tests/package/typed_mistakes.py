"""Mistakes that a type checker must find. Each line that is wrong says so; ``test_types.py`` expects errors there only.

Never run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step

model = nn.Linear(2, 2)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
ddp = DistributedDataParallel(model)


def reduces_nothing(bucket: Tensor) -> Tensor:
    return bucket


ZeroRedundancyOptimizer(model, torch.optim.AdamW)  # wrong
ZeroRedundancyOptimizer(3, torch.optim.AdamW)  # wrong
ZeroRedundancyOptimizer(model.parameters(), "AdamW")  # wrong
ZeroRedundancyOptimizer(model.parameters(), nn.Linear)  # wrong
ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=3)  # wrong
ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, shard="elements")  # wrong
ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, bucket_cap_mb="25")  # wrong
ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, reduce_dtype="float32")  # wrong
ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, shard_gradients="yes")  # wrong

optimizer.step(3)  # wrong
optimizer.stepp()  # wrong
optimizer.clip_grad_norm_("1.0")  # wrong
optimizer.full_grad("weight")  # wrong
optimizer.consolidate_state_dict(to="0")  # wrong
optimizer.load_state_dict([])  # wrong
optimizer.sharded_state_dict(model.parameters())  # wrong
print(optimizer.memory().bytes)  # wrong
norm: float = optimizer.clip_grad_norm_(1.0)  # wrong
nothing: int = optimizer.step()  # wrong

hook_with_zero_step(reduces_nothing, ddp, optimizer)  # wrong
hook_with_zero_step("allreduce", ddp, optimizer)  # wrong

checkpoint.save(3, optimizer)  # wrong
checkpoint.save("step-3", model)  # wrong
checkpoint.save("step-3", optimizer, optimizer)  # wrong
checkpoint.save("step-3", optimizer, model, extra=[3])  # wrong
checkpoint.save("step-3", optimizer, model, extra={3: "step"})  # wrong
checkpoint.save("step-3", optimizer, model, keep="2")  # wrong
checkpoint.save("step-3", optimizer).wait("soon")  # wrong
checkpoint.load("step-3", model)  # wrong
step: int = checkpoint.resume("checkpoints", optimizer)  # wrong
print(checkpoint.latest("checkpoints").name)  # wrong
checkpoint.sav("step-3", optimizer)  # wrong
shardstep.checkpoints.save("step-3", optimizer)  # wrong
