"""float32 masters beside the rest: meshes (replicate, shard), replicated DTensors, optimizers with low-bit state.

Oracle: the plain optimizer over float32 copies with the same gradients, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import Parameter
from torch.optim import AdamW

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.meshes import check_alike, mesh_of
from tests.ranks.test_masters import KEPT, SHAPES, SMALL, MasterTwins, rounded
from tests.ranks.test_masters_modes import WAYS, Run
from tests.ranks.test_subclass_state import optimizer_class, same_state
from tests.twins import values

pytestmark = pytest.mark.extended  # the other files about masters have a cheaper test of each claim

# --- meshes -----------------------------------------------------------------------------------------------------------


def _on_a_mesh(rank, world, shape, ways):
    mesh = mesh_of(shape)
    for way in ways:
        for mode, shard in zip(KEPT, ("element", "tensor"), strict=True):
            run = Run(way, mode, shard, process_group=mesh)
            for step in range(4):
                run.iterate(rank, step)
            run.check(f"{way} {mode} {shard} on {shape}")
            check_alike(run.opt, shape)


@pytest.mark.parametrize(
    "shape", [(2, 2), *(pytest.param(shape, marks=pytest.mark.again) for shape in ((3, 1), (1, 3), (2, 3)))], ids=str
)
def test_masters_on_a_mesh_are_exact_wherever_gradients_come_from(shape):
    run_ranks(_on_a_mesh, shape[0] * shape[1], shape, WAYS, timeout=120)


def _stochastic_on_a_mesh(rank, world, shape):
    params = [Parameter(values(size, 100 + i, torch.bfloat16)) for i, size in enumerate(SHAPES)]
    group = None if shape is None else mesh_of(shape)
    opt = ZeroRedundancyOptimizer(
        params, AdamW, group, lr=0.01, master_weights="stochastic", rounding_seed=5, bucket_cap_mb=SMALL
    )
    for step in range(6):
        for i, param in enumerate(params):
            param.grad = values(param.shape, 1000 * step + i, torch.bfloat16)
        opt.step()
    opt.check_replicas()
    return [param.detach() for param in params]


def test_random_rounding_on_a_mesh_has_the_bits_of_one_rank():
    expected = run_ranks(_stochastic_on_a_mesh, 1, None)[0]
    for found in run_ranks(_stochastic_on_a_mesh, 4, (2, 2)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# --- DTensors ---------------------------------------------------------------------------------------------------------


class ReplicatedTwins:
    """Replicated DTensors in bfloat16 with masters, and the plain optimizer over float32 copies."""

    def __init__(self, mode, shard):
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        locals_ = [values(shape, 100 + i, torch.bfloat16) for i, shape in enumerate(SHAPES)]
        self.ours = [Parameter(distribute_tensor(value, mesh, [Replicate()])) for value in locals_]
        self.theirs = [Parameter(value.float()) for value in locals_]
        self.opt = ZeroRedundancyOptimizer(
            self.ours, AdamW, lr=0.01, master_weights=mode, shard=shard, bucket_cap_mb=SMALL
        )
        self.plain = AdamW(self.theirs, lr=0.01)

    def step(self, numbers):
        for number in numbers:
            for i, (mine, other) in enumerate(zip(self.ours, self.theirs, strict=True)):
                gradient = values(other.shape, 1000 * number + i, torch.bfloat16)
                mine.grad = DTensor.from_local(gradient, mine.device_mesh, mine.placements, run_check=False)
                other.grad = gradient.float()
            self.opt.step()
            self.plain.step()

    def check(self, where):
        for position, (mine, other) in enumerate(zip(self.ours, self.theirs, strict=True)):
            assert torch.equal(self.opt.full_state(mine)["master_weight"], other.detach()), f"{where}: {position}"
            assert torch.equal(mine.to_local().detach(), rounded(other.detach(), torch.bfloat16)), (
                f"{where}: {position}"
            )


def _replicated(rank, world, folder):
    for mode in KEPT:
        for shard in ("element", "tensor"):
            where = f"{mode} {shard}"
            twins = ReplicatedTwins(mode, shard)
            twins.step(range(3))
            twins.check(where)
            # Somebody changes one, in place and with other memory: the masters follow.
            first, last = twins.ours[0], twins.ours[3]
            first.to_local().detach().mul_(2)
            other = (last.to_local().detach() * 4).clone()
            last.data = DTensor.from_local(other, last.device_mesh, last.placements, run_check=False)
            for mine, theirs in ((first, twins.theirs[0]), (last, twins.theirs[3])):
                followed = twins.opt.full_state(mine)["master_weight"]
                assert torch.equal(rounded(followed, torch.bfloat16), mine.to_local().detach())
                theirs.data.copy_(followed)
            twins.step(range(3, 5))
            twins.check(f"{where}, changed")
            place = folder / f"{len(list(folder.iterdir())) if rank == 0 else 0}"
            box = [place]
            torch.distributed.broadcast_object_list(box, 0)
            checkpoint.save(box[0], twins.opt)
            again = ReplicatedTwins(KEPT[1 - KEPT.index(mode)], shard)  # into the other mode
            checkpoint.load(box[0], again.opt)
            for one, two, theirs in zip(again.ours, twins.ours, again.theirs, strict=True):
                assert torch.equal(one.to_local(), two.to_local())
                theirs.data.copy_(twins.opt.full_state(two)["master_weight"])
            again.plain.load_state_dict(twins.plain.state_dict())
            again.step(range(5, 7))
            again.check(f"{where}, resumed")


@pytest.mark.parametrize("world", [1, 3])
def test_masters_of_replicated_dtensors(world, tmp_path):
    run_ranks(_replicated, world, tmp_path)


# --- state in few bits ------------------------------------------------------------------------------------------------

LOW_BIT_SHAPES = [(64, 64), (33,), (128, 64), (4096,), (5, 7)]


def _low_bit(rank, world, name, sharded):
    """Their blocks see the float32 master: parameters and quantized states are those over float32 copies."""
    twins = MasterTwins(optimizer_class(name), KEPT, shapes=LOW_BIT_SHAPES, sharded=sharded, lr=0.01)
    twins.step(5)
    twins.check(name)
    quantized = 0
    for mine, other in zip(twins.ours, twins.theirs, strict=True):
        found = twins.opt.full_state(mine)
        del found["master_weight"]
        same_state(found, dict(twins.plain.state[other]), f"{name}: state")
        quantized += sum(hasattr(value, "__tensor_flatten__") for value in found.values())
    assert quantized >= 4, "the case that this test is about"


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("AdamW8bit", {}),
        ("AdamW8bit", {"shard": "tensor", "parameters_as_bucket_view": True}),
        ("PackedMomentum", {}),
        *(pytest.param(name, {}, marks=pytest.mark.again) for name in ("AdamW4bit", "AdamWFp8")),
    ],
)
def test_low_bit_state_of_masters_is_that_over_float32_copies(name, sharded):
    if name != "PackedMomentum":
        pytest.importorskip("torchao")
    run_ranks(_low_bit, 3, name, sharded, timeout=170)
