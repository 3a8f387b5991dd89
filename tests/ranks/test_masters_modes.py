"""float32 masters and gradients: what the differential harness does not do in 16 bits.

There gradients of 16 bits are reduced by us on two ranks only, and neither scaled, nor reduced in float32, nor clipped
by our own method. Here the oracle is the plain optimizer over float32 copies with the gradients of ``full_grad``.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shardstep import ZeroRedundancyOptimizer, shard_ddp_gradients
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.oracle import values
from tests.ranks.test_masters import SMALL, rounded

WAYS = ("ddp", "sharded", "sharded in float32", "under ddp")


class Net(nn.Module):
    """Layers of 16 bits, and a gain in float32."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17)).to(dtype)
        self.gain = nn.Parameter(torch.ones(17))

    def forward(self, inputs):
        return (self.layers(inputs).float() * self.gain).pow(2).mean()


class Run:
    """Such a model with both kinds of masters, trained one way, and the plain optimizer over float32 copies."""

    def __init__(self, way, dtype=torch.bfloat16, mesh=None):
        self.dtype, model = dtype, Net(dtype)
        self.params = list(model.parameters())
        self.copies = [nn.Parameter(param.detach().float().clone()) for param in self.params]
        self.plain = AdamW(self.copies, lr=0.01)
        second = "remainder" if dtype == torch.bfloat16 else torch.float32
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "master_weights": second}]
        sharded = way.startswith("sharded")
        options = {"shard_gradients": sharded, "reduce_dtype": torch.float32 if "float32" in way else None}
        self.net = model if sharded else DistributedDataParallel(model)
        self.opt = ZeroRedundancyOptimizer(
            groups, AdamW, mesh, lr=0.01, bucket_cap_mb=SMALL, master_weights=torch.float32, **options
        )
        self.no_sync = self.opt.no_sync if sharded else self.net.no_sync
        if way == "under ddp":
            shard_ddp_gradients(self.net, self.opt)

    def gradients(self):
        return [self.opt.full_grad(param).clone() for param in self.params]

    def give(self, scale=1.0):
        for copy, gradient in zip(self.copies, self.gradients(), strict=True):
            copy.grad = gradient.float() / scale

    def check(self, where):
        for position, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            state, narrow = self.opt.full_state(param), param.dtype == self.dtype
            assert torch.equal(state["master_weight"] if narrow else param.detach(), copy.detach()), (where, position)
            assert not narrow or torch.equal(param.detach(), rounded(copy.detach(), self.dtype)), (where, position)
        self.opt.check_replicas()


def _clipped(rank, world, way, shape=None):
    """Two backwards for a step, the first without reducing."""
    run = Run(way, mesh=None if shape is None else mesh_of(shape))
    for step in range(3):
        run.opt.zero_grad()
        for part, context in enumerate((run.no_sync, contextlib.nullcontext)):
            with context():
                run.net(values((4, 17), 1000 * step + 10 * part + rank, torch.bfloat16)).backward()
        before = run.gradients()
        if "float32" in way:
            lower = torch.cat([gradient.view(-1).view(torch.int32) & 0xFFFF for gradient in before])
            assert lower.count_nonzero() > lower.numel() / 2, "nothing was rounded to bfloat16 on the way"
        norm = run.opt.clip_grad_norm_(0.01).double()
        expected = torch.linalg.vector_norm(torch.cat([gradient.view(-1).double() for gradient in before]))
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for one, other in zip(before, run.gradients(), strict=True):  # multiplied in float32, and rounded once
            close = 2.0**-8 if one.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(other.double(), one.double() * 0.01 / (norm + 1e-6), rtol=close, atol=1e-12)
        run.give()
        run.opt.step()
        run.plain.step()
    run.check(f"{way} {shape}")


@pytest.mark.parametrize("way", WAYS)
def test_masters_step_with_gradients_that_were_accumulated_and_clipped(way):
    run_ranks(_clipped, 3, way)


def test_masters_step_with_sharded_gradients_on_a_mesh():
    run_ranks(_clipped, 4, "sharded in float32", (2, 2))


SCALE = 2.0**8


def _scaled(rank, world, way):
    """An inf on the last rank skips steps 1 and 2 on all."""
    for dtype in (torch.float16, torch.bfloat16):
        run = Run(way, dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        for step in range(5):
            run.opt.zero_grad()
            inputs = values((4, 17), 100 * step + rank, dtype)
            if step in (1, 2) and rank == world - 1:
                inputs[0, 0] = float("inf")
            scaler.scale(run.net(inputs)).backward()
            run.give(scaler.get_scale())
            run.opt.clip_grad_norm_(1e6 * scaler.get_scale())  # in units of the scaled gradients: here nothing to do
            before = [param.detach().clone() for param in run.params]
            if dtype == torch.bfloat16 and step == 3:  # of float16 torch refuses it
                scaler.unscale_(run.opt)
            scaler.step(run.opt)
            scaler.update()
            if step in (1, 2):
                assert all(torch.equal(one, two) for one, two in zip(before, run.params, strict=True)), "skipped"
            else:
                run.plain.step()
                run.check(f"{way} {dtype} step {step}")
        assert scaler.get_scale() == SCALE / 4


@pytest.mark.parametrize("way", WAYS)
def test_a_scaler_steps_masters_and_an_inf_on_one_rank_skips_on_all(way):
    run_ranks(_scaled, 3, way)
