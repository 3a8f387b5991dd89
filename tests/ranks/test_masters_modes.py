"""float32 masters wherever gradients come from: what the differential harness does not do in 16 bits.

There gradients of 16 bits are reduced by us on two ranks only, and neither scaled, nor reduced in float32, nor clipped
by our own method. Here the oracle is the plain optimizer over float32 copies with the gradients that we say there are.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
    shard_ddp_gradients,
)
from tests.harness import run_ranks
from tests.meshes import check_alike, mesh_of
from tests.ranks.test_masters import SMALL, rounded
from tests.twins import values

HOOKS = {
    "hook": (hook_with_zero_step, allreduce_hook),
    "interleaved": (hook_with_zero_step_interleaved, allreduce_hook),
    "scattering hook": (hook_with_zero_step, reduce_scatter_hook),
    "scattering interleaved": (hook_with_zero_step_interleaved, reduce_scatter_hook),
}
WAYS = ("ddp", "sharded", "sharded in float32", "under ddp")


def connect(way, model, params, optimizer_class=torch.optim.AdamW, ddp=None, **options):
    """A model that is trained one way: what to call, and its optimizer."""
    net = model if "sharded" in way else DistributedDataParallel(model, **(ddp or {}))
    arguments = {"lr": 0.01, "bucket_cap_mb": SMALL, "overlap_with_ddp": way in HOOKS, **options}
    if way.startswith("sharded"):
        arguments["shard_gradients"] = True
        arguments["reduce_dtype"] = torch.float32 if "float32" in way else None
    opt = ZeroRedundancyOptimizer(params, optimizer_class, **arguments)
    if way in HOOKS:
        stepping, reducing = HOOKS[way]
        net.register_comm_hook(None, stepping(reducing, net, opt))
    elif way == "under ddp":
        shard_ddp_gradients(net, opt)
    return net, opt


class Branching(nn.Module):
    """Of three layers the middle one is used only if asked for. The gain is float32."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(3)).to(dtype)
        self.gain = nn.Parameter(torch.ones(17))

    def forward(self, inputs, with_middle=True):
        out = torch.tanh(self.layers[0](inputs))
        out = torch.tanh(self.layers[1](out)) if with_middle else out
        return (self.layers[2](out).float() * self.gain).pow(2).mean()


class Run:
    """A model in 16 bits, trained one way with both kinds of masters, and the plain optimizer over float32 copies."""

    def __init__(self, way, shard, dtype=torch.bfloat16, **options):
        self.way, self.dtype = way, dtype
        self.model = Branching(dtype)
        self.params = list(self.model.parameters())
        self.copies = [nn.Parameter(param.detach().float().clone()) for param in self.params]
        self.plain = torch.optim.AdamW(self.copies, lr=0.01, weight_decay=0.1)
        second = "remainder" if dtype == torch.bfloat16 else torch.float32
        groups = [
            {"params": self.params[:3], "master_weights": torch.float32},
            {"params": self.params[3:], "master_weights": second},
        ]
        ddp = {"find_unused_parameters": True}
        self.net, self.opt = connect(way, self.model, groups, shard=shard, ddp=ddp, weight_decay=0.1, **options)

    def gradients(self):
        found = [self.opt.full_grad(param) for param in self.params]
        return [None if gradient is None else gradient.clone() for gradient in found]

    def give(self, gradients, scale=1.0):
        for copy, gradient in zip(self.copies, gradients, strict=True):
            copy.grad = None if gradient is None else gradient.float() / scale

    def check(self, where):
        for position, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            state = self.opt.full_state(param)
            assert torch.equal(state.get("master_weight", param.detach()), copy.detach()), f"{where}: master {position}"
            expected = copy.detach() if param is self.model.gain else rounded(copy.detach(), self.dtype)
            assert torch.equal(param.detach(), expected), f"{where}: parameter {position}"
        self.opt.check_replicas()


def _clipped(rank, world, way, shape):
    """Two backwards for a step, the first without reducing; our clipping; at first a layer is unused."""
    mesh = {} if shape is None else {"process_group": mesh_of(shape)}
    for shard in ("element", "tensor"):
        run = Run(way, shard, **mesh)
        no_sync = run.opt.no_sync if way.startswith("sharded") else run.net.no_sync
        for step in range(4):
            run.opt.zero_grad()
            for part, context in enumerate((no_sync, contextlib.nullcontext)):
                with context():
                    inputs = values((4, 17), 1000 * step + 10 * part + rank, torch.bfloat16)
                    run.net(inputs, with_middle=step >= 2).backward()
            before = [gradient for gradient in run.gradients() if gradient is not None]
            assert len(before) == (5 if step < 2 else 7)
            if "float32" in way:
                lower = torch.cat([gradient.reshape(-1).view(torch.int32) & 0xFFFF for gradient in before])
                assert lower.count_nonzero() > lower.numel() / 2, "nothing was rounded to bfloat16 on the way"
            norm = run.opt.clip_grad_norm_(0.01).double()
            expected = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1).double() for gradient in before]))
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            after = [gradient for gradient in run.gradients() if gradient is not None]
            for one, other in zip(before, after, strict=True):  # multiplied in float32, and rounded once
                close = 2.0**-8 if one.dtype == torch.bfloat16 else 1e-6
                torch.testing.assert_close(other.double(), one.double() * 0.01 / (norm + 1e-6), rtol=close, atol=1e-12)
            run.give(run.gradients())
            run.opt.step()
            run.plain.step()
        run.check(f"{way} {shard} {shape}")
        if shape is not None:
            check_alike(run.opt, shape)


@pytest.mark.parametrize("way", WAYS)
def test_masters_step_with_gradients_that_were_accumulated_and_clipped(way):
    run_ranks(_clipped, 3, way, None)


def test_masters_step_with_sharded_gradients_on_a_mesh():
    run_ranks(_clipped, 4, "sharded in float32", (2, 2))


SCALE = 2.0**8


def _scaled(rank, world, way, dtype):
    """An inf on the last rank skips steps 1 and 2 on all."""
    run = Run(way, "element", dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    for step in range(5):
        run.opt.zero_grad()
        inputs = values((4, 17), 100 * step + rank, dtype)
        if step in (1, 2) and rank == world - 1:
            inputs[0, 0] = float("inf")
        scaler.scale(run.net(inputs)).backward()
        run.give(run.gradients(), scaler.get_scale())
        run.opt.clip_grad_norm_(1e6 * scaler.get_scale())  # in units of the scaled gradients: here nothing to do
        before = [param.detach().clone() for param in run.params]
        if dtype == torch.bfloat16 and step == 3:  # of float16 torch refuses it
            scaler.unscale_(run.opt)
        scaler.step(run.opt)
        scaler.update()
        if step in (1, 2):
            assert all(torch.equal(one, two) for one, two in zip(before, run.params, strict=True)), "skipped on all"
        else:
            run.plain.step()
            run.check(f"{way} {dtype} step {step}")
    assert scaler.get_scale() == SCALE / 4


def _scaled_in_both(rank, world, way):
    for dtype in (torch.float16, torch.bfloat16):
        _scaled(rank, world, way, dtype)


@pytest.mark.parametrize("way", WAYS)
def test_a_scaler_steps_masters_and_an_inf_on_one_rank_skips_on_all(way):
    run_ranks(_scaled_in_both, 3, way)
