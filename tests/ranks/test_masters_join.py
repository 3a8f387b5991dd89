"""float32 masters when ranks run out of inputs (Join). Oracles: masters kept by hand, bit for bit.

Where DDP reduces (the default mode, both stepping hooks), the oracle is DDP in its own Join and the plain optimizer
over float32 copies, which are rounded into the model by hand: both reduce the same gradients in the same order. Where
we reduce, it is one process that sees everybody's batches and does what we promise: gradients of 16 bits are added up
in float32 in the order of the ranks, divided once, and rounded once (not with ``reduce_dtype=torch.float32``).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from tests.harness import run_ranks
from tests.ranks.test_masters import KEPT, rounded
from tests.ranks.test_masters_modes import WAYS, Run, make_model
from tests.twins import values

pytestmark = pytest.mark.extended  # the other files about masters have a cheaper test of each claim

COUNTS = {2: [2, 4], 3: [3, 0, 5], 4: [2, 4, 3, 1]}  # of batches, by rank: one has none at all
REDUCED_BY_DDP = ("ddp", "hook", "interleaved")


def batch_of(rank, step):
    return values((4, 9), 1000 * step + rank, torch.bfloat16)


def loss_of(net, rank, step):
    return net(batch_of(rank, step)).float().pow(2).mean()


class ByHand:
    """A model in bfloat16, and the plain optimizer over float32 copies of its parameters."""

    def __init__(self):
        self.model = make_model()
        self.params = list(self.model.parameters())
        self.masters = [Parameter(param.detach().float()) for param in self.params]
        self.plain = AdamW(self.masters, lr=0.01)

    def step(self, gradients):
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float()
        self.plain.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data.copy_(rounded(master.detach(), torch.bfloat16))


def of_ddp(rank, counts, divides, in_hook):
    """The masters of the rank that has the most batches, which sees every step.

    ``in_hook``: DDP reduces with a hook, which divides by the number of ranks whatever Join is told.
    """
    hand = ByHand()
    ddp = DistributedDataParallel(hand.model)
    if in_hook:
        ddp.register_comm_hook(None, allreduce_hook)
    with Join([ddp], divide_by_initial_world_size=divides):
        for step in range(counts[rank]):
            hand.model.zero_grad()
            loss_of(ddp, rank, step).backward()
            hand.step([param.grad for param in hand.params])
    last = max(range(len(counts)), key=counts.__getitem__)
    for master in hand.masters:
        dist.broadcast(master.data, last)
    return [master.detach() for master in hand.masters]


def of_one_process(counts, divides, wide):
    """Everybody's gradients in the order of the ranks: added up in float32, divided, and rounded unless ``wide``."""
    hand = ByHand()
    for step in range(max(counts)):
        sums = [torch.zeros(param.shape) for param in hand.params]
        active = [rank for rank, count in enumerate(counts) if step < count]
        for rank in active:
            hand.model.zero_grad()
            loss_of(hand.model, rank, step).backward()
            for total, param in zip(sums, hand.params, strict=True):
                total += param.grad.float()
        divisor = len(counts) if divides else len(active)
        hand.step([total.div(divisor).to(torch.float32 if wide else torch.bfloat16) for total in sums])
    return [master.detach() for master in hand.masters]


def _uneven(rank, world, way):
    counts = COUNTS[world]
    for divides in (True, False):
        if way in REDUCED_BY_DDP:
            expected = of_ddp(rank, counts, divides, in_hook=way != "ddp")
        else:
            expected = of_one_process(counts, divides, wide="float32" in way)
        for mode, shard in zip(KEPT, ("element", "tensor"), strict=True):
            where = f"{way} {mode} {shard} {divides=}"
            run = Run(way, mode, shard)
            with Join([run.opt] if run.net is run.model else [run.net, run.opt], divide_by_initial_world_size=divides):
                for step in range(counts[rank]):
                    run.opt.zero_grad()
                    loss_of(run.net, rank, step).backward()
                    run.opt.step()
            run.opt.check_replicas()
            for position, (param, master) in enumerate(zip(run.params, expected, strict=True)):
                assert torch.equal(run.opt.full_state(param)["master_weight"], master), f"{where}: master {position}"
                assert torch.equal(param.detach(), rounded(master, torch.bfloat16)), f"{where}: parameter {position}"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_masters_of_ranks_that_run_out_of_inputs_are_those_kept_by_hand(way, world):
    """Both modes of masters, both granularities, both divisors."""
    run_ranks(_uneven, world, way)
