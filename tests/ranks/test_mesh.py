"""Hybrid sharding: meshes of (replicate, shard). Oracle: DDP over all ranks and the plain optimizer, float64.

In the default mode and in DDP's hooks both sides step with the same reduced bytes, so bits are compared. With
``shard_gradients`` we sum in our own order: within a shard group in rank order, then across the replicas, and divide
once. For up to six ranks a mean then differs from DDP's by a few units of 1e-16, and what a handful of steps make of it
stays far below 1e-11. A gradient that is lost, doubled, or summed over one dimension alone moves weights by 1e-3.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import collectives
from tests.harness import run_ranks
from tests.hook_twins import HOOKS, HookTwins
from tests.meshes import Shape, check_alike, everybodys, mesh_of, owned
from tests.oracle import assert_same, values_of
from tests.ranks import test_aborted_iterations as aborted
from tests.ranks import test_join as join
from tests.ranks import test_sharded_join as sharded_join
from tests.surroundings import choose
from tests.versions import Muon, needs_muon

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
LIMITS = {"timeout": 80, "pg_timeout": 20}
SHAPES = [(2, 2), *(pytest.param(shape, marks=pytest.mark.again) for shape in ((3, 1), (1, 3), (2, 1), (3, 2), (2, 3)))]
SMALL = 0.002  # MiB: several buckets


class Net(nn.Module):
    """Matrices, vectors, and a scale that is used only if asked for. 369 elements."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(9, 21), nn.Linear(21, 7)
        self.scale = nn.Parameter(torch.ones(5))
        self.double()

    def forward(self, batch: Tensor, scaled: bool = True) -> Tensor:
        out = self.second(torch.tanh(self.first(batch)))
        return out * self.scale.square().mean() if scaled else out


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 9, generator=generator, dtype=torch.float64)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() <= 1], "lr": 0.01},
    ]


def train(model: nn.Module, optimizer: Any, steps: range, clip: Any, uses: Any = lambda step: True) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(dist.get_rank(), step), uses(step)).square().mean().backward()
        clip(0.05)
        optimizer.step()


def ddp_clip(model: nn.Module, limit: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def check_like(model: nn.Module, reference: nn.Module, close: dict[str, float] | None, claim: str) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if close is None:
            assert_same(mine.detach(), theirs.detach(), f"{claim}: {name}")
        else:
            torch.testing.assert_close(
                mine.detach(), theirs.detach(), msg=lambda text, name=name: f"{claim}: {name}: {text}", **close
            )


# --- every mode is DDP with the plain optimizer -----------------------------------------------------------------------

OPTIMIZERS = {"AdamW": (AdamW, {"lr": 0.02, "weight_decay": 0.1}), "SGD": (SGD, {"lr": 0.2, "momentum": 0.9})}


def trained_in_every_mode(rank: int, world: int, shape: Shape) -> None:
    mesh = mesh_of(shape)
    for (kind, options), shard in zip(OPTIMIZERS.values(), ("element", "tensor"), strict=True):
        reference = DistributedDataParallel(Net())
        plain = kind(two_groups(reference.module), **options)
        train(reference, plain, range(5), partial(ddp_clip, reference))
        for views in (False, True):
            ours: dict[str, Any] = {"shard": shard, "bucket_cap_mb": SMALL, "parameters_as_bucket_view": views}
            model = DistributedDataParallel(Net())
            opt = ZeroRedundancyOptimizer(two_groups(model.module), kind, mesh, **ours, **options)
            train(model, opt, range(5), partial(ddp_clip, model))
            check_like(model.module, reference.module, None, f"default {ours}")
            check_alike(opt, shape)
            sharded = Net(seed=rank)  # parameters start as rank 0 has them: see below
            sharded.load_state_dict(Net().state_dict() if rank == 0 else sharded.state_dict())
            opt = ZeroRedundancyOptimizer(two_groups(sharded), kind, mesh, shard_gradients=True, **ours, **options)
            train(sharded, opt, range(5), opt.clip_grad_norm_)
            check_like(sharded, reference.module, CLOSE, f"shard_gradients {ours}")
            check_alike(opt, shape)
            _check_state(opt, plain)


def _check_state(opt: ZeroRedundancyOptimizer, plain: Any) -> None:
    """Consolidated to the last rank of each shard group, and parameter by parameter, it is the plain optimizer's."""
    to = opt.world_size - 1
    opt.consolidate_state_dict(to=to)
    given = opt.state_dict()["state"]
    assert bool(given) == (opt.rank == to)
    for index, expected in plain.state_dict()["state"].items():
        param = [param for group in opt.param_groups for param in group["params"]][index]
        for found in (opt.full_state(param), *([given[index]] if given else [])):
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, **CLOSE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_default_and_sharded_gradients_equal_ddp_with_the_plain_optimizer_and_replicas_are_the_same_bits(shape):
    """Both granularities, with and without bucket views, two groups, clipping; all start with rank 0's parameters."""
    run_ranks(trained_in_every_mode, shape[0] * shape[1], shape, **LIMITS)


def trained_in_hooks(rank: int, world: int, shape: Shape) -> None:
    for hook in HOOKS:
        for unused in (False, True):
            zero = {"process_group": mesh_of(shape), "bucket_cap_mb": SMALL}
            twins = HookTwins(AdamW, hook=hook, ddp={"find_unused_parameters": unused}, zero=zero, lr=0.05)
            # Layer 2 is used by nobody, layer 4 by odd ranks only.
            twins.iterate(3, **({"skip": [2] if rank % 2 else [2, 4]} if unused else {}))
            check_alike(twins.zero, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ddp_hooks_equal_ddp_with_the_plain_optimizer(shape):
    run_ranks(trained_in_hooks, shape[0] * shape[1], shape, **LIMITS)


# --- the order of a sum ---------------------------------------------------------------------------------------------


def gradients_in_our_order(gradients: list[Tensor], shape: Shape) -> Tensor:
    """The mean as the design promises it: rank order inside, the order of the replicas, one division, one rounding."""
    wide = torch.float32 if gradients[0].dtype in (torch.float16, torch.bfloat16) else gradients[0].dtype
    total = torch.zeros_like(gradients[0], dtype=wide)
    for replica in range(shape[0]):
        inside = torch.zeros_like(total)
        for gradient in gradients[replica * shape[1] : (replica + 1) * shape[1]]:
            inside = inside + gradient.to(wide)
        total = total + inside
    return total.div(shape[0] * shape[1]).to(gradients[0].dtype)


class Mixed(nn.Module):
    """Three dtypes; one parameter of a single element, of which most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wide = nn.Parameter(torch.randn(37, 5, dtype=torch.float64))
        self.middle = nn.Parameter(torch.randn(203))
        self.narrow = nn.Parameter(torch.randn(29, 7, dtype=torch.bfloat16))
        self.one = nn.Parameter(torch.randn(1, dtype=torch.float16))

    def forward(self, rank: int, step: int) -> Tensor:
        losses = []
        for position, param in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * step + 10 * rank + position)
            factors = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
            losses.append((param * factors).sum().double())
        return torch.stack(losses).sum()


def means_have_promised_bits(rank: int, world: int, shape: Shape, transport: str) -> list[Tensor]:
    choose(transport)
    weights = []
    for cap, in_flight in ((0.0003, 1), (0.001, 3), (25, 2)):
        model, local = Mixed(), Mixed()
        opt = ZeroRedundancyOptimizer(
            model.parameters(),
            SGD,
            mesh_of(shape),
            shard_gradients=True,
            bucket_cap_mb=cap,
            gradient_buckets_in_flight=in_flight,
            lr=0.1,
        )
        for step in range(2):
            opt.zero_grad()
            local.zero_grad()
            model(rank, step).backward()
            local(rank, step).backward()
            for mine, other in zip(model.parameters(), local.parameters(), strict=True):
                expected = gradients_in_our_order(everybodys(other.grad), shape)
                assert_same(opt.full_grad(mine), expected, f"{shape}, cap {cap}, {mine.dtype}")
            opt.step()
        check_alike(opt, shape)
        weights.append(values_of(model.parameters()))
    for others in weights[1:]:
        assert_same(others, weights[0], "other buckets, other bits")
    return weights[0]


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize(
    "shape", [(2, 2), *(pytest.param(s, marks=pytest.mark.again) for s in ((3, 1), (3, 2)))], ids=str
)
def test_a_mean_is_summed_inside_then_across_and_rounded_once_whatever_the_buckets(shape, transport):
    """Bits: the same for every bucket size, in flight or not, through shared memory or sockets; float16 to float64."""
    run_ranks(means_have_promised_bits, shape[0] * shape[1], shape, transport, **LIMITS)


def few_parameters(rank: int, world: int) -> int:
    """One parameter that is kept whole: a rank of each replica owns it, the others nothing."""
    model, reference = nn.Linear(3, 1, bias=False).double(), nn.Linear(3, 1, bias=False).double()
    reference.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(reference)
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, mesh_of((2, 2)), shard="tensor", shard_gradients=True)
    plain = AdamW(ddp.parameters())
    for step in range(3):
        for module, optimizer in ((model, opt), (ddp, plain)):
            optimizer.zero_grad()
            module(batch_of(rank, step)[:, :3]).square().mean().backward()
            optimizer.step()
    check_like(model, reference, CLOSE, "one parameter")
    check_alike(opt, (2, 2))
    return owned(opt)


def test_a_rank_may_own_nothing():
    assert sorted(run_ranks(few_parameters, 4, **LIMITS)) == [0, 0, 3, 3]


def as_on_an_accelerator(rank: int, world: int) -> None:
    """Other backends than gloo sum natively, in their own order; nothing is reported unless asked for."""
    collectives.sends_pairwise = lambda group, device: False
    for find_unused in (False, True):
        uses = (lambda step: step % 2 == rank % 2) if find_unused else (lambda step: True)
        reference = DistributedDataParallel(Net(), find_unused_parameters=True)
        train(reference, AdamW(reference.parameters(), lr=0.02), range(4), lambda limit: None, uses)
        model = Net()
        opt = ZeroRedundancyOptimizer(
            model.parameters(),
            AdamW,
            mesh_of((2, 2)),
            shard_gradients=True,
            find_unused_parameters=find_unused,
            bucket_cap_mb=SMALL,
            lr=0.02,
        )
        train(model, opt, range(4), lambda limit: None, uses)
        check_like(model, reference.module, CLOSE, f"native, {find_unused=}")
        check_alike(opt, (2, 2))


def test_native_sums_across_replicas_equal_ddp():
    run_ranks(as_on_an_accelerator, 4, **LIMITS)


# --- who has used what, and who has failed --------------------------------------------------------------------------


def used_in_one_replica(rank: int, world: int) -> None:
    """``scale`` is used by rank 3 alone, then by nobody, then by all but rank 3."""
    users = {0: [3], 1: [], 2: [0, 1, 2], 3: [3], 4: [0]}
    reference, model = DistributedDataParallel(Net(), find_unused_parameters=True), Net()
    plain = AdamW(reference.parameters(), lr=0.02, weight_decay=0.3)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, mesh_of((2, 2)), shard_gradients=True, lr=0.02, weight_decay=0.3
    )
    for step, using in users.items():
        one = range(step, step + 1)
        train(reference, plain, one, lambda limit: None, lambda step: rank in using)  # noqa: B023
        train(model, opt, one, lambda limit: None, lambda step: rank in using)  # noqa: B023
        assert (model.scale.grad is None) == (not using), f"step {step}: used by {using}"
        check_like(model, reference.module, CLOSE, f"step {step}: used by {using}")
    check_alike(opt, (2, 2))


def test_a_parameter_that_a_rank_of_another_replica_has_used_is_stepped_everywhere():
    """With weight decay a parameter that is stepped without a gradient, or left alone with one, shows."""
    run_ranks(used_in_one_replica, 4, **LIMITS)


FAILURES = {1: {2: "middle"}, 3: {0: "forward"}, 5: {3: "loss"}, 6: {1: "input", 2: "forward"}, 8: {0: "after"}}


def fails_in_one_replica(rank: int, world: int, transport: str, flow: str) -> None:
    aborted.prepare(transport)
    for ours, zero in zip((aborted.SETTINGS[0], aborted.SETTINGS[1]), ("top", "end"), strict=True):
        both = aborted.Beside({**ours, "process_group": mesh_of((2, 2))})
        aborted.train(both, rank, 10, FAILURES, flow, zero)
        check_alike(both.opt, (2, 2))


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("flow", ["flag", "direct"])
def test_a_batch_that_fails_on_a_rank_of_one_replica_is_skipped_by_all(flow, transport):
    """Also by those that had met its buckets inside their shard group, and wait for its sums across."""
    run_ranks(fails_in_one_replica, 4, transport, flow, timeout=90, pg_timeout=15)


def infinite_on_one_rank(rank: int, world: int) -> None:
    reference, model = DistributedDataParallel(Net()), Net()
    plain = SGD(reference.parameters(), lr=0.1)
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, mesh_of((2, 2)), shard_gradients=True, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(4):
        for module, optimizer, scaler in ((reference, plain, scalers[0]), (model, opt, scalers[1])):
            optimizer.zero_grad()
            loss = module(batch_of(rank, step)).square().mean() * (float("inf") if (step, rank) == (2, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        check_like(model, reference.module, CLOSE, f"step {step}")
        assert scalers[0].get_scale() == scalers[1].get_scale()
    check_alike(opt, (2, 2))


def test_an_inf_on_a_rank_of_one_replica_skips_the_step_of_all():
    run_ranks(infinite_on_one_rank, 4, **LIMITS)


# --- uneven inputs --------------------------------------------------------------------------------------------------


def uneven_inputs(rank: int, world: int, counts: list[int]) -> None:
    mesh = mesh_of((2, 2))
    options: dict[str, Any] = {"lr": 0.1}
    last = max(range(world), key=counts.__getitem__)
    inputs = join.batches(rank, counts[rank])
    oracle_ddp, ddp = (DistributedDataParallel(join.make_model()) for _ in range(2))
    oracle, opt = (
        AdamW(oracle_ddp.parameters(), **options),
        ZeroRedundancyOptimizer(ddp.parameters(), AdamW, mesh, **options),
    )
    join.fit(oracle_ddp, oracle, [oracle_ddp], inputs)
    join.fit(ddp, opt, [ddp, opt], inputs)
    assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()), f"{counts}")
    check_alike(opt, (2, 2))
    opt.consolidate_state_dict(to=last % 2)
    if rank == last:
        assert_same(opt.state_dict()["state"], oracle.state_dict()["state"], f"state, {counts}")
    for divides in (True, False):
        model, reference = sharded_join.Net(), DistributedDataParallel(sharded_join.Net())
        sharded = ZeroRedundancyOptimizer(
            model.parameters(), SGD, mesh, shard_gradients=True, lr=0.3, bucket_cap_mb=0.0002
        )
        plain = SGD(reference.parameters(), lr=0.3)
        with join.Join([reference], divide_by_initial_world_size=divides):
            sharded_join.train(reference, plain, inputs)
        with join.Join([sharded], divide_by_initial_world_size=divides):
            sharded_join.train(model, sharded, inputs)
        check_like(model, reference.module, CLOSE, f"{counts}, {divides=}")
        check_alike(sharded, (2, 2))


@pytest.mark.parametrize("counts", [[3, 1, 0, 4], pytest.param([2, 2, 5, 5], marks=pytest.mark.again)], ids=str)
def test_uneven_inputs_end_in_the_weights_of_ddps_join(counts):
    """A rank without inputs borrows from a rank of any replica; with sharded gradients it counts, or not, as in DDP."""
    run_ranks(uneven_inputs, 4, counts, **LIMITS)


# --- what users call ------------------------------------------------------------------------------------------------


def called_by_users(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    model, other = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    opt, plain = ZeroRedundancyOptimizer(model.parameters(), AdamW, mesh, lr=0.02), AdamW(other.parameters(), lr=0.02)
    assert opt.mesh is mesh
    assert opt.process_group is mesh.get_group("shard")
    assert (opt.rank, opt.world_size, opt.global_rank) == (rank % 2, 2, rank)
    train(model, opt, range(2), lambda limit: None)
    train(other, plain, range(2), lambda limit: None)
    # A plain optimizer's dict loads; a new group is added; a layer is frozen; a copy goes on alone.
    opt.load_state_dict(plain.state_dict())
    extra, twin = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    opt.add_param_group({"params": [extra]})
    plain.add_param_group({"params": [twin]})
    extra.grad, twin.grad = torch.ones_like(extra), torch.ones_like(twin)
    opt.step()
    plain.step()
    assert_same(extra.detach(), twin.detach())
    train(model, opt, range(2, 4), lambda limit: None)
    train(other, plain, range(2, 4), lambda limit: None)
    check_like(model.module, other.module, None, "after a load and an added group")
    copied = copy.deepcopy(opt)
    assert (copied.mesh, copied.rank, copied.world_size) == (mesh, opt.rank, opt.world_size)
    for param in copied.param_groups[-1]["params"]:
        param.grad = torch.ones_like(param)
    copied.step()
    copied.check_replicas()
    total = sum(param.numel() * 8 for param in model.parameters()) + 24
    assert opt.memory().parameters == total
    assert 0.8 * total < opt.memory().state < 1.2 * total  # two moments of one half


def test_what_users_call_works_within_the_shard_dimension():
    run_ranks(called_by_users, 4, **LIMITS)


def buffers_of_rank_0(rank: int, world: int) -> None:
    norm = nn.BatchNorm1d(3)
    norm.running_mean.fill_(rank)
    opt = ZeroRedundancyOptimizer(norm.parameters(), SGD, mesh_of((2, 2)), shard_gradients=True, lr=0.1)
    opt.broadcast_buffers(norm)
    assert_same(norm.running_mean, torch.zeros(3))


def test_buffers_are_broadcast_over_both_dimensions():
    run_ranks(buffers_of_rank_0, 4, **LIMITS)


def one_dimension_and_parts_of_a_mesh(rank: int, world: int) -> None:
    """A mesh of one dimension is its group; of a larger mesh any two dimensions work, on their own ranks."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "tensor", "shard"))
    wide = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("shard", "replicate", "tensor"))
    cases = {
        "one dimension": (whole["data"], [0, 1] if rank < 2 else [2, 3], rank % 2),
        "replicate alone": (deep["replicate", "shard"], [rank % 2, rank % 2 + 2], 0),
        "shard alone": (wide["shard"], [rank % 2, rank % 2 + 2], rank // 2),
    }
    for name, (mesh, ranks, position) in cases.items():
        group = {members: dist.new_group(list(members)) for members in ((0, 1), (2, 3), (0, 2), (1, 3))}[tuple(ranks)]
        for shard_gradients in (False, True):
            reference, model = DistributedDataParallel(Net(), process_group=group), Net()
            ours = model if shard_gradients else DistributedDataParallel(model, process_group=group)
            opt = ZeroRedundancyOptimizer(model.parameters(), SGD, mesh, shard_gradients=shard_gradients, lr=0.1)
            assert (opt.rank, opt.mesh) == (position, mesh), name
            train(ours, opt, range(3), lambda limit: None)
            train(reference, SGD(reference.parameters(), lr=0.1), range(3), lambda limit: None)
            check_like(model, reference.module, CLOSE, f"{name}, {shard_gradients=}")
            opt.check_replicas()


def test_one_dimension_is_its_group_and_dimensions_of_a_larger_mesh_work():
    run_ranks(one_dimension_and_parts_of_a_mesh, 4, **LIMITS)


GRIDS = ([[1, 2], [3, 4]], [[1, 3], [2, 4]], [[2, 1], [4, 3]], [[3, 4], [1, 2]])


def some_ranks_in_any_order(rank: int, world: int) -> None:
    """Rank 0 is in none of them. Their gradients are given: what is compared is bits."""
    for grid in GRIDS:
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
        if rank == 0:
            continue
        for shard_gradients in (False, True):
            model, other = Mixed(), Mixed()
            opt = ZeroRedundancyOptimizer(
                model.parameters(), SGD, mesh, shard_gradients=shard_gradients, bucket_cap_mb=0.0003, lr=0.125
            )
            plain = SGD(other.parameters(), lr=0.125)
            for step in range(2):
                for module, optimizer in ((model, opt), (other, plain)):
                    optimizer.zero_grad()
                    module(
                        7, step
                    ).backward()  # the same on every rank, so that the mean is exact: four is a power of two
                    optimizer.step()
            assert_same(values_of(model.parameters()), values_of(other.parameters()), f"{grid}, {shard_gradients=}")
            opt.check_replicas()


@pytest.mark.again
def test_a_mesh_of_some_ranks_in_any_order_that_all_rows_have():
    """Everyone's process group is made for it. torch numbers ranks by their global numbers, not as the mesh does."""
    run_ranks(some_ranks_in_any_order, 5, **LIMITS)


@needs_muon
def test_optimizers_that_keep_tensors_whole_work_on_a_mesh():
    run_ranks(muon_on_a_mesh, 4, **LIMITS)


def muon_on_a_mesh(rank: int, world: int) -> None:
    matrices = [nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    twins = [nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    opt, plain = ZeroRedundancyOptimizer(matrices, Muon, mesh_of((2, 2)), lr=0.1), Muon(twins, lr=0.1)
    for step in range(3):
        for position, (mine, theirs) in enumerate(zip(matrices, twins, strict=True)):
            mine.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + position))
            theirs.grad = mine.grad.clone()
        opt.step()
        plain.step()
    assert_same(values_of(matrices), values_of(twins))
    check_alike(opt, (2, 2))
