"""float32 masters wherever gradients come from: DDP, sharded gradients, both hooks; with views, lazy gathers, Join."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
    shard_ddp_gradients,
)
from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, SMALL, rounded
from tests.twins import values

WAYS = ("ddp", "sharded", "sharded in float32", "under ddp", "hook", "interleaved", "scattering hook")


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 23), nn.Tanh(), nn.Linear(23, 31), nn.Tanh(), nn.Linear(31, 5))
    return model.to(dtype)


def connect(way, model, params, optimizer_class=torch.optim.AdamW, ddp=None, **options):
    """A model that is trained one way: what to call, and its optimizer."""
    net = model if "sharded" in way else DistributedDataParallel(model, **(ddp or {}))
    arguments = {"lr": 0.01, "bucket_cap_mb": SMALL, **options}
    if way.startswith("sharded"):
        arguments["shard_gradients"] = True
        if "float32" in way:
            arguments["reduce_dtype"] = torch.float32
    if way in ("hook", "interleaved", "scattering hook", "scattering interleaved"):
        arguments["overlap_with_ddp"] = True
    opt = ZeroRedundancyOptimizer(params, optimizer_class, **arguments)
    if way == "hook":
        net.register_comm_hook(None, hook_with_zero_step(allreduce_hook, net, opt))
    elif way == "interleaved":
        net.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, net, opt))
    elif way == "scattering hook":
        net.register_comm_hook(None, hook_with_zero_step(reduce_scatter_hook, net, opt))
    elif way == "scattering interleaved":
        net.register_comm_hook(None, hook_with_zero_step_interleaved(reduce_scatter_hook, net, opt))
    elif way == "under ddp":
        shard_ddp_gradients(net, opt)
    return net, opt


class Run:
    """A model in 16 bits trained one way, and the plain optimizer over float32 copies with the same gradients."""

    def __init__(self, way, mode, shard, optimizer_class=torch.optim.AdamW, dtype=torch.bfloat16, **options):
        self.way, self.dtype = way, dtype
        self.mesh = options.get("process_group")
        self.model = make_model(dtype)
        self.params = list(self.model.parameters())
        self.copies = [nn.Parameter(param.detach().to(torch.float32)) for param in self.params]
        self.plain = optimizer_class(self.copies, lr=0.01)
        self.net, self.opt = connect(
            way, self.model, self.model.named_parameters(), optimizer_class, shard=shard, master_weights=mode, **options
        )

    def backward(self, rank, step):
        inputs = values((4, 9), 1000 * step + rank, self.dtype)
        self.net(inputs).to(torch.float32).pow(2).mean().backward()

    def gradients(self):
        if "sharded" in self.way or self.way == "under ddp":
            return [self.opt.full_grad(param) for param in self.params]
        return [param.grad for param in self.params]

    def iterate(self, rank, step):
        self.opt.zero_grad()
        before = [param.detach().clone() for param in self.params]
        self.backward(rank, step)
        if self.way.startswith("scattering"):  # the gradients are gone: from the same model under plain DDP
            found = self._reference_gradients(rank, step, before)
        else:
            found = self.gradients()
        for copy, gradient in zip(self.copies, found, strict=True):
            copy.grad = None if gradient is None else gradient.detach().to(torch.float32)
        self.opt.step()
        self.plain.step()

    def _reference_gradients(self, rank, step, before):
        twin = make_model(self.dtype)
        for param, like, value in zip(twin.parameters(), self.params, before, strict=True):
            param.data.copy_(value)
            param.requires_grad_(like.requires_grad)
        optimizer = ZeroRedundancyOptimizer(twin.parameters(), torch.optim.SGD, self.mesh, lr=0.0, shard_gradients=True)
        inputs = values((4, 9), 1000 * step + rank, self.dtype)
        twin(inputs).to(torch.float32).pow(2).mean().backward()
        return [optimizer.full_grad(param) for param in twin.parameters()]

    def check(self, where=""):
        for position, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            master = self.opt.full_state(param)["master_weight"]
            assert torch.equal(master, copy.detach()), f"{where}: master {position}"
            assert torch.equal(param.detach(), rounded(master, self.dtype)), f"{where}: parameter {position}"
        self.opt.check_replicas()


def _train(rank, world, way, mode, shard, options):
    run = Run(way, mode, shard, **options)
    for step in range(6):
        run.iterate(rank, step)
    run.check(f"{way} {mode} {shard} {options}")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("way", WAYS)
def test_masters_are_exact_wherever_gradients_come_from(way, mode, shard, world):
    run_ranks(_train, world, way, mode, shard, {})


@pytest.mark.parametrize("options", [{"parameters_as_bucket_view": True}, {"lazy_gather": True}, {"bucket_cap_mb": 25}])
@pytest.mark.parametrize("mode", KEPT)
def test_masters_go_with_bucket_views_lazy_gathers_and_large_buckets(mode, options):
    for way in ("ddp", "sharded"):
        run_ranks(_train, 3, way, mode, "element", options)


def _float16(rank, world):
    for way in ("ddp", "sharded in float32"):
        for shard in ("element", "tensor"):
            run = Run(way, torch.float32, shard, dtype=torch.float16)
            for step in range(5):
                run.iterate(rank, step)
            run.check(f"{way} {shard}")


@pytest.mark.parametrize("world", [1, 3])
def test_masters_of_float16_parameters(world):
    run_ranks(_float16, world)


def _closures(rank, world, mode, optimizer_class):
    run = Run("ddp", mode, "element", optimizer_class)
    for step in range(4):

        def closure(step=step):
            run.opt.zero_grad()
            run.backward(rank, step)
            for copy, param in zip(run.copies, run.params, strict=True):
                copy.grad = param.grad.to(torch.float32)

        run.opt.step(closure)
        run.plain.step()
    run.check("closures")
    run.iterate(rank, 9)  # and a step without one afterwards
    run.check("after closures")


@pytest.mark.parametrize("mode", KEPT)
def test_a_closure_steps_masters(mode):
    run_ranks(_closures, 3, mode, torch.optim.AdamW)


def _uneven(rank, world, way, mode):
    run = Run(way, mode, "element")
    joined = [run.opt] if run.net is run.model else [run.net, run.opt]
    steps = 2 + rank
    with Join(joined):
        for step in range(steps):
            run.opt.zero_grad()
            run.backward(rank, step)
            run.opt.step()
    run.opt.check_replicas()
    masters = [run.opt.full_state(param)["master_weight"] for param in run.params]
    for param, master in zip(run.params, masters, strict=True):
        assert torch.equal(param.detach(), rounded(master, run.dtype))
    return [master.to(torch.float64) for master in masters]


@pytest.mark.parametrize("way", ["ddp", "sharded"])
@pytest.mark.parametrize("mode", KEPT)
def test_ranks_without_inputs_step_their_masters(way, mode):
    results = run_ranks(_uneven, 3, way, mode)
    again = run_ranks(_uneven, 3, way, torch.float32)
    for one, other in zip(results[0], again[2], strict=True):
        assert torch.equal(one, other)
