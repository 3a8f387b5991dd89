"""A user's program with types: trains, saves and resumes in every mode, and states what each call returns.

``test_types.py`` has mypy and pyrefly check it where nothing but the wheel and torch is installed, and then runs it:
what the types say is what comes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from typing_extensions import assert_type

import shardstep
from shardstep import (
    MemoryReport,
    ShardedGradient,
    StateShard,
    ZeroRedundancyOptimizer,
    checkpoint,
    hook_with_zero_step,
    reduce_scatter_hook,
    shard_ddp_gradients,
)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def backward(model: nn.Module) -> Tensor:
    loss = model(torch.ones(4, 8)).square().mean()
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
    return loss


def every_form_of_params(model: nn.Sequential, group: dist.ProcessGroup | None) -> None:
    adamw = torch.optim.AdamW
    ZeroRedundancyOptimizer(model.parameters(), adamw, group, lr=1e-3)
    ZeroRedundancyOptimizer(model.named_parameters(), adamw, process_group=group, shard="element", bucket_cap_mb=1)
    ZeroRedundancyOptimizer(list(model.parameters()), adamw, shard="tensor", lr=torch.tensor(1e-3))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "shard": "tensor"},
        {"params": list(model[1].parameters()), "lr": 1e-2},
    ]
    optimizer = ZeroRedundancyOptimizer(groups, adamw, lr=1e-3)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 1e-4})


def after_backward(directory: Path) -> None:
    """The default mode: DDP reduces, then the step."""
    model = DistributedDataParallel(new_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, lazy_gather=True)
    as_torch_sees_it: torch.optim.Optimizer = optimizer
    scheduler = StepLR(as_torch_sees_it, step_size=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model)

    def number() -> float:
        return closure().item()

    assert_type(optimizer.step(closure), Tensor)
    assert_type(optimizer.step(number), float)
    closure()
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    optimizer.step()
    scheduler.step()
    optimizer.wait_for_parameters()

    assert_type(optimizer.memory(), MemoryReport)
    assert_type(optimizer.memory().state, int)
    assert_type(optimizer.rank, int)
    assert_type(optimizer.world_size, int)
    assert_type(optimizer.process_group, dist.ProcessGroup | None)
    assert_type(optimizer.join_device, torch.device)
    optimizer.check_replicas()
    for parameter in model.parameters():
        assert_type(optimizer.full_state(parameter), dict[str, Any])
        assert_type(optimizer.full_grad(parameter), Tensor | None)

    optimizer.consolidate_state_dict(to=0)
    plain = optimizer.state_dict()
    assert_type(plain, dict[str, Any])
    if dist.get_rank() == 0:
        assert set(plain) == {"state", "param_groups"}
    sharded = optimizer.sharded_state_dict(model)
    assert_type(sharded, dict[str, Any])
    assert any(isinstance(value, StateShard) for entry in sharded["state"].values() for value in entry.values())
    optimizer.load_sharded_state_dict(sharded, model)

    saving = checkpoint.save(directory / "step-3", optimizer, model, extra={"step": 3}, keep=2)
    assert_type(saving, checkpoint.SaveHandle)
    assert_type(saving.wait(), Path)
    later = checkpoint.save(str(directory / "step-4"), optimizer, extra={"step": 4}, asynchronous=True)
    assert_type(later.wait(timeout=60), Path)
    assert_type(later.done(), bool)
    assert_type(checkpoint.load(directory / "step-3", optimizer, model), dict[str, Any])
    assert_type(checkpoint.latest(directory), Path | None)
    checkpoint.verify(directory / "step-3")
    found = checkpoint.resume(directory, optimizer, strict=False)
    assert_type(found, tuple[Path, dict[str, Any]] | None)
    assert found is not None
    assert found[1]["step"] == 4


def sharded_gradients() -> None:
    """ZeRO-2: no wrapper, uneven inputs."""
    model = new_model()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=True, reduce_dtype=torch.float32, lr=1e-2, momentum=0.9
    )
    shardstep.add_no_sync(model, optimizer)
    with optimizer.no_sync():
        backward(model)
    backward(model)
    gradient = model[0].weight.grad
    assert isinstance(gradient, ShardedGradient)
    assert_type(optimizer.clip_grad_norm_(1.0, norm_type=2.0), Tensor)
    optimizer.step()
    optimizer.broadcast_buffers(model)
    with Join([optimizer]):
        for _ in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()


def inside_backward() -> None:
    """A DDP hook that steps."""
    model = DistributedDataParallel(new_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    backward(model)


def under_ddp() -> None:
    """Gradients sharded inside DDP's hook, with and without a stepping hook."""
    model = DistributedDataParallel(new_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    assert_type(shard_ddp_gradients(model, optimizer), None)
    backward(model)
    optimizer.step()
    listed = DistributedDataParallel(new_model())
    optimizers = [ZeroRedundancyOptimizer(listed.parameters(), torch.optim.AdamW, lr=1e-3)]
    listed.register_comm_hook(optimizers, reduce_scatter_hook)
    backward(listed)
    stepping = DistributedDataParallel(new_model())
    inside = ZeroRedundancyOptimizer(stepping.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    stepping.register_comm_hook(None, hook_with_zero_step(reduce_scatter_hook, stepping, inside))
    backward(stepping)


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    assert_type(shardstep.__version__, str)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)  # torch 2.15 says that it may be a number, on ranks outside
    every_form_of_params(new_model(), group)
    after_backward(directory)
    sharded_gradients()
    inside_backward()
    under_ddp()
    print(f"rank {dist.get_rank()} is done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
