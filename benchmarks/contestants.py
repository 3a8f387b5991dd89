"""The training loops that the step figures compare, each behind the same four calls.

Every one trains its own copy of the same GPT with fused AdamW at its defaults and lr 1e-3. Buckets have their default
size, of rivals 25 MiB where that can be said. A function that needs what is not installed (or not built) raises, and
the figures come without it.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import shardstep
from benchmarks.gpt import GPT

LEARNING_RATE = 1e-3
BUCKET_BYTES = 25 * 2**20
ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "fused": True}


@dataclass
class Contestant:
    """A model in training. One iteration is ``clear``, ``reach`` (forward and backward), ``step``."""

    gpt: GPT  # whose parameters are trained
    model: Callable[[Tensor, Tensor], Tensor]  # what a batch is given to
    clear: Callable[[], object]
    step: Callable[[], object]
    backward: Callable[[Tensor], object] = Tensor.backward
    optimizer: Any = None

    def reach(self, batch: tuple[Tensor, Tensor]) -> None:
        self.backward(self.model(*batch))

    def iterate(self, batch: tuple[Tensor, Tensor]) -> None:
        self.clear()
        self.reach(batch)
        self.step()

    def weights(self) -> list[Tensor]:
        """All parameters, whole, on every rank."""
        params = [param.detach() for param in self.gpt.parameters()]
        return [param.full_tensor() if isinstance(param, DTensor) else param for param in params]


def nothing() -> None:
    """What a loop does whose update is part of its backward, or that has none."""


def forward_backward(gpt: GPT) -> Contestant:
    return Contestant(gpt, gpt, gpt.zero_grad, nothing)


def ddp(gpt: GPT, **options: Any) -> Contestant:
    model = DistributedDataParallel(gpt, **options)
    optimizer = AdamW(model.parameters(), **ADAMW)
    return Contestant(gpt, model, optimizer.zero_grad, optimizer.step)


def ddp_zero(gpt: GPT, zero: Callable[..., Any], **options: Any) -> Contestant:
    model = DistributedDataParallel(gpt)
    optimizer = zero(model.parameters(), AdamW, **options, **ADAMW)
    return Contestant(gpt, model, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


def reduce_scattered(gpt: GPT) -> Contestant:
    model = DistributedDataParallel(gpt)
    optimizer = shardstep.ZeroRedundancyOptimizer(model.parameters(), AdamW, **ADAMW)
    shardstep.shard_ddp_gradients(model, optimizer)
    return Contestant(gpt, model, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


def sharded_gradients(gpt: GPT, **options: Any) -> Contestant:
    optimizer = shardstep.ZeroRedundancyOptimizer(gpt.parameters(), AdamW, shard_gradients=True, **options, **ADAMW)
    return Contestant(gpt, gpt, optimizer.zero_grad, optimizer.step, optimizer=optimizer)


def hooked(gpt: GPT, name: str, inner: Callable[..., Any] = allreduce_hook) -> Contestant:
    make_hook = getattr(shardstep, name)
    model = DistributedDataParallel(gpt)
    optimizer = shardstep.ZeroRedundancyOptimizer(model.parameters(), AdamW, overlap_with_ddp=True, **ADAMW)
    model.register_comm_hook(None, make_hook(inner, model, optimizer))
    return Contestant(gpt, model, optimizer.zero_grad, nothing, optimizer=optimizer)


def fsdp2(gpt: GPT) -> Contestant:
    mesh = init_device_mesh(gpt.head.weight.device.type, (dist.get_world_size(),))
    for module in [*gpt.blocks, gpt]:
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    optimizer = AdamW(gpt.parameters(), **ADAMW)
    return Contestant(gpt, gpt, optimizer.zero_grad, optimizer.step)


def fairscale(gpt: GPT) -> Contestant:
    optimizer = importlib.import_module("fairscale.optim.oss").OSS(gpt.parameters(), optim=AdamW, **ADAMW)
    model = importlib.import_module("fairscale.nn.data_parallel").ShardedDataParallel(gpt, optimizer)
    return Contestant(gpt, model, model.zero_grad, optimizer.step)


def deepspeed(gpt: GPT, stage: int, **settings: Any) -> Contestant:
    # With its default, all gradients are one bucket: slower (measured).
    elements = BUCKET_BYTES // gpt.head.weight.element_size()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default clips to 1
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": elements, "allgather_bucket_size": elements},
        **settings,
    }
    optimizer = AdamW(gpt.parameters(), **ADAMW)
    initialize = importlib.import_module("deepspeed").initialize
    engine = initialize(model=gpt, optimizer=optimizer, config=config, dist_init_required=False)[0]
    return Contestant(gpt, engine, nothing, engine.step, backward=engine.backward)  # its step clears the gradients


ALONE = "forward + backward alone"
DDP = "DDP + AdamW"
TORCH = "DDP + torch ZeRO"
TORCH_VIEWS = "DDP + torch ZeRO, bucket views"
ZERO1 = "DDP + shardstep"
ZERO1_VIEWS = "DDP + shardstep, bucket views"
ZERO1_LAZY = "DDP + shardstep, lazy gathers"
ZERO2 = "shardstep, sharded gradients"
ZERO2_VIEWS = "shardstep, sharded gradients, bucket views"
REDUCE_SCATTER = "DDP + shardstep, reduce_scatter_hook"
HOOK = "DDP + hook_with_zero_step"
INTERLEAVED = "DDP + hook_with_zero_step_interleaved"
INTERLEAVED_SCATTER = "DDP + hook_with_zero_step_interleaved, reduce_scatter_hook"
DDP_VIEWS = "DDP, gradients as bucket views, + AdamW"
FSDP2 = "FSDP2, reshard_after_forward=False"
FAIRSCALE = "fairscale OSS + ShardedDDP"
DEEPSPEED_1 = "DeepSpeed stage 1"
DEEPSPEED_2 = "DeepSpeed stage 2"

MAKERS: dict[str, Callable[[GPT], Contestant]] = {
    ALONE: forward_backward,
    DDP: ddp,
    DDP_VIEWS: partial(ddp, gradient_as_bucket_view=True),
    TORCH: partial(ddp_zero, zero=TorchZero),
    TORCH_VIEWS: partial(ddp_zero, zero=TorchZero, parameters_as_bucket_view=True),
    ZERO1: partial(ddp_zero, zero=shardstep.ZeroRedundancyOptimizer),
    ZERO1_VIEWS: partial(ddp_zero, zero=shardstep.ZeroRedundancyOptimizer, parameters_as_bucket_view=True),
    ZERO1_LAZY: partial(ddp_zero, zero=shardstep.ZeroRedundancyOptimizer, lazy_gather=True),
    REDUCE_SCATTER: reduce_scattered,
    ZERO2: sharded_gradients,
    ZERO2_VIEWS: partial(sharded_gradients, parameters_as_bucket_view=True),
    HOOK: partial(hooked, name="hook_with_zero_step"),
    INTERLEAVED: partial(hooked, name="hook_with_zero_step_interleaved"),
    INTERLEAVED_SCATTER: partial(hooked, name="hook_with_zero_step_interleaved", inner=shardstep.reduce_scatter_hook),
    FSDP2: fsdp2,
    FAIRSCALE: fairscale,
    DEEPSPEED_1: partial(deepspeed, stage=1),
    DEEPSPEED_2: partial(deepspeed, stage=2),
}


def make(name: str, template: GPT) -> Contestant:
    """A contestant over a copy of ``template``, or over itself if that is never changed.

    Collective: call on every rank. Raises if there is no such thing here.
    """
    return MAKERS[name](template if name == ALONE else copy.deepcopy(template))
