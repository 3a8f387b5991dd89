"""parameters_as_bucket_view both ways, and what happens when somebody gives a parameter other memory."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.twins import Twins, assert_same, parameters, values

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
SHARDS = ("tensor", "element")


def _conv_net() -> torch.nn.Sequential:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3), torch.nn.Tanh(), torch.nn.Conv2d(5, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 3)
    )
    for position, param in enumerate(net.parameters()):
        param.data = values(param.shape, position)
    return net


def _large_conv_net() -> torch.nn.Sequential:
    """With a weight above the 64 KiB from which a parameter is sent from where it lies."""
    net = torch.nn.Sequential(torch.nn.Conv2d(32, 33, 3), torch.nn.Conv2d(5, 4, 3))
    for position, param in enumerate(net.parameters()):
        param.data = values(param.shape, position)
    return net


class NetTwins(Twins):
    """Twins over the parameters of two equal models."""

    def __init__(self, make_net, optimizer_class, name="", sharded=None, prepare=lambda net: None, **defaults):
        self.net, self.plain_net = make_net(), make_net()
        prepare(self.net)
        prepare(self.plain_net)
        self.name, self.close, self.seed = name, None, 1000
        self.ours, self.theirs = list(self.net.parameters()), list(self.plain_net.parameters())
        self.opt = ZeroRedundancyOptimizer(self.net.named_parameters(), optimizer_class, **(sharded or {}), **defaults)
        self.plain = optimizer_class(self.plain_net.named_parameters(), **defaults)


def _assert_views(opt: ZeroRedundancyOptimizer) -> None:
    """Every parameter lies in one of as few buffers as there are buckets."""
    storages = {p.untyped_storage().data_ptr() for p in opt._all_params if p.numel()}
    assert len(storages) == len(opt.layout.buckets) < len(opt._all_params)


def _both_ways(rank, world_size):
    for shard in SHARDS:
        weights = []
        for views in (False, True):
            twins = Twins(
                lambda: parameters(SHAPES),
                torch.optim.AdamW,
                sharded={"shard": shard, "parameters_as_bucket_view": views},
                lr=0.1,
            )
            memory = [p.data_ptr() for p in twins.ours]
            twins.step(4)
            twins.check()
            if views:
                _assert_views(twins.opt)
            moved = [p.data_ptr() for p in twins.ours] != memory
            assert not moved, "after construction nothing moves"
            weights.append([p.detach().clone() for p in twins.ours])
        assert_same(weights[0], weights[1], "with and without views")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_views_and_no_views_give_the_same_bits_as_the_plain_optimizer(world_size):
    run_ranks(_both_ways, world_size)


def _real_ddp(rank, world_size, shard, views):
    ours, theirs = _conv_net(), _conv_net()
    opt = ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.AdamW, lr=0.05, shard=shard, parameters_as_bucket_view=views
    )
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    nets = [DistributedDataParallel(net, gradient_as_bucket_view=views) for net in (ours, theirs)]
    for step in range(4):
        for net, optimizer in zip(nets, (opt, plain), strict=True):
            optimizer.zero_grad()
            net(values((2, 3, 5, 5), 10 * step + rank)).square().mean().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    opt.check_replicas()


@pytest.mark.parametrize("views", [False, True])
def test_under_ddp_the_weights_are_those_of_plain_ddp(views):
    for shard in SHARDS:
        run_ranks(_real_ddp, 3, shard, views)


def _aligned(rank, world_size):
    for shard in SHARDS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            params = [*parameters(SHAPES, dtype), *parameters([(3,), (5, 7)], torch.float32)]
            opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, shard=shard, parameters_as_bucket_view=True)
            _assert_views(opt)
            assert all(param.data_ptr() % 64 == 0 for param in params)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_parameter_starts_where_torch_itself_would_let_it_start(world_size):
    run_ranks(_aligned, world_size)


def _odd_net() -> torch.nn.Module:
    """Odd sizes everywhere: without alignment nearly every weight would start off a 64-byte boundary."""
    torch.manual_seed(5)
    sizes = [7, 33, 5, 129, 31, 3]
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def _forward_and_backward(rank, world_size):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for shard in SHARDS:
            nets = [_odd_net().to(dtype) for _ in range(2)]
            ZeroRedundancyOptimizer(
                nets[0].parameters(), torch.optim.SGD, lr=0.1, shard=shard, parameters_as_bucket_view=True
            )
            for batch in (1, 2, 17):
                outputs = [net(values((batch, 7), batch, dtype)) for net in nets]
                assert torch.equal(*outputs), f"forward in {dtype}"
                gradients = [
                    torch.autograd.grad(output.square().sum(), net.parameters())
                    for net, output in zip(nets, outputs, strict=True)
                ]
                for one, other in zip(*gradients, strict=True):
                    assert torch.equal(one, other), f"backward in {dtype}"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_forward_and_backward_have_the_same_bits_with_bucket_views_as_without(world_size):
    """On any CPU: kernels choose their path by the alignment of their operands, and views have torch's own."""
    run_ranks(_forward_and_backward, world_size)


# --- other memory -------------------------------------------------------------------------------------------------


def _replace_memory(net, how: str) -> None:
    if how == "channels_last":
        net.to(memory_format=torch.channels_last)
    elif how == "clone":
        for param in net.parameters():
            param.data = param.data.clone()
    elif how == "clone one":
        param = list(net.parameters())[2]
        param.data = param.data.clone()
    elif how == "transposed":
        param = list(net.parameters())[-2]
        param.data = param.data.t().contiguous().t()
    elif how == "load":
        other = _conv_net()
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(0.5)
        net.load_state_dict(other.state_dict())
    elif how == "other values":
        for position, param in enumerate(net.parameters()):
            param.data = values(param.shape, 50 + position)
    elif how == "double and back":
        net.float()
        net.double()


HOWS = ["channels_last", "clone", "clone one", "transposed", "load", "other values", "double and back"]


def _memory_replaced(rank, world_size, views):
    for shard in SHARDS:
        for how in HOWS:
            twins = NetTwins(
                _conv_net,
                torch.optim.AdamW,
                name=f"{how} {shard} {views=}",
                sharded={"shard": shard, "parameters_as_bucket_view": views},
                lr=0.1,
            )
            twins.step(2)
            _replace_memory(twins.net, how)
            _replace_memory(twins.plain_net, how)
            twins.step(3)
            twins.check()
            if views:
                _assert_views(twins.opt)
            twins.opt.check_replicas()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_with_other_memory_are_bound_again_and_train_exactly(world_size, views):
    run_ranks(_memory_replaced, world_size, views)


def _memory_replaced_once(rank, world_size, views):
    for make_net in (_conv_net, _large_conv_net):
        for shard in SHARDS:
            for how in ("channels_last", "clone", "clone one"):
                twins = NetTwins(
                    make_net,
                    torch.optim.AdamW,
                    name=f"{how} {shard} {views=} {make_net.__name__}",
                    sharded={"shard": shard, "parameters_as_bucket_view": views},
                    lr=0.1,
                )
                twins.step(1)
                if rank == 1:
                    _replace_memory(twins.net, how)
                twins.step(2)
                twins.check()
                twins.opt.check_replicas()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world_size", [3])
def test_other_memory_on_one_rank_only_is_bound_again_without_drift(world_size, views):
    run_ranks(_memory_replaced_once, world_size, views, pg_timeout=10)


def _channels_last_from_the_start(rank, world_size):
    for views in (False, True):
        for make_net in (_conv_net, _large_conv_net):
            twins = NetTwins(
                make_net,
                torch.optim.AdamW,
                name=f"channels_last first, {views=} {make_net.__name__}",
                sharded={"shard": "element", "parameters_as_bucket_view": views},
                prepare=lambda net: net.to(memory_format=torch.channels_last),
                lr=0.1,
            )
            strided = [i for i, p in enumerate(twins.theirs) if not p.is_contiguous()]
            assert strided
            for index in strided:
                assert twins.opt.layout.spec_of[index].granularity == "tensor"
            if not views:
                assert not any(twins.ours[i].is_contiguous() for i in strided), "without views nothing is touched"
            twins.step(3)
            twins.check()
            if not views:
                assert not any(twins.ours[i].is_contiguous() for i in strided)
            twins.opt.check_replicas()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_that_are_not_contiguous_stay_whole_and_train_exactly(world_size):
    run_ranks(_channels_last_from_the_start, world_size)


def _half(rank, world_size):
    # one rank alone gathers nothing: without views its step is the plain one, which follows a conversion
    for views in (False, True) if world_size > 1 else (True,):
        for shard in SHARDS:
            twins = NetTwins(
                _conv_net, torch.optim.SGD, sharded={"shard": shard, "parameters_as_bucket_view": views}, lr=0.1
            )
            twins.step()
            twins.net.half()
            for param in twins.ours:
                param.grad = torch.ones_like(param)
            before = [p.detach().clone() for p in twins.ours]
            with pytest.raises(RuntimeError, match=r"float64.*float16.*build the optimizer") as caught:
                twins.opt.step()
            assert "0.weight" in str(caught.value)
            for param, value in zip(twins.ours, before, strict=True):
                assert torch.equal(param, value), "a refused step changes nothing"


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_dtype_after_construction_is_an_error_that_names_the_parameter(world_size):
    run_ranks(_half, world_size)


def _half_on_one(rank, world_size, views):
    twins = NetTwins(_conv_net, torch.optim.SGD, sharded={"parameters_as_bucket_view": views}, lr=0.1)
    twins.step()
    if rank == 1:
        twins.net.half()
    for param in twins.ours:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError) as caught:
        twins.opt.step()
    for word in ("rank 1",) * (rank != 1) + ("0.weight", "float16"):
        assert word in str(caught.value), f"rank {rank}: {word!r} is not in {caught.value!r}"


@pytest.mark.parametrize("views", [False, True])
def test_another_dtype_on_one_rank_is_an_error_on_all_that_names_rank_and_parameter(views):
    run_ranks(_half_on_one, 3, views, pg_timeout=3)


def _other_shape(rank, world_size):
    for views in (False, True):
        opt = ZeroRedundancyOptimizer(
            parameters(SHAPES), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=views, shard="element"
        )
        opt._all_params[1].data = values((6,), 1)
        for param in opt._all_params:
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=r"parameter 1 .*\(5,\).*\(6,\)"):
            opt.step()


def test_another_shape_after_construction_is_an_error_that_names_the_parameter():
    run_ranks(_other_shape, 2, pg_timeout=5)


# --- load_state_dict(assign=True) ---------------------------------------------------------------------------------


def _orphans(rank, world_size, ddp):
    """The module has new Parameter objects; the optimizer and DDP hold the old ones, that get no gradient again."""
    for shard in SHARDS:
        net = _conv_net()
        opt = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, lr=0.1, shard=shard, parameters_as_bucket_view=True
        )
        model = DistributedDataParallel(net) if ddp else net
        model(values((2, 3, 5, 5), 1)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        saved = copy.deepcopy(net.state_dict())
        net.load_state_dict(saved, assign=True)
        again = DistributedDataParallel(net) if ddp else net  # DDP, too, has to be told
        again(values((2, 3, 5, 5), 2)).square().mean().backward()
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(RuntimeError, match=r"assign=True"):
            opt.step()
        for param, value in zip(net.parameters(), before, strict=True):
            assert torch.equal(param, value)
        # the remedy
        fresh = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, lr=0.1, shard=shard, parameters_as_bucket_view=True
        )
        other = _conv_net()
        other.load_state_dict(saved)
        plain = torch.optim.AdamW(other.parameters(), lr=0.1)
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        fresh.step()
        plain.step()
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_after_load_state_dict_with_assign_is_an_error_not_a_step_of_orphans(world_size, ddp):
    run_ranks(_orphans, world_size, ddp, pg_timeout=10)


def _not_orphans(rank, world_size):
    """No gradients alone are no error: the plain optimizer does nothing then, and so do we."""
    twins = NetTwins(_conv_net, torch.optim.AdamW, sharded={"parameters_as_bucket_view": True}, lr=0.1)
    twins.step(1, skip=range(10))
    twins.step(2)
    twins.step(1, skip=range(10))
    twins.check()
    loose = Twins(lambda: parameters(SHAPES), torch.optim.AdamW, sharded={"parameters_as_bucket_view": True})
    loose.step(2)
    twins.net.load_state_dict(
        twins.net.state_dict(), assign=True
    )  # its own values: nothing is orphaned but the objects
    twins.net.load_state_dict(twins.plain_net.state_dict())
    loose.check()


def test_a_step_without_gradients_is_no_error_while_the_parameters_are_in_use():
    run_ranks(_not_orphans, 3)


def _assigned_and_used(rank, world_size):
    """assign=True with the module's own Parameter objects keeps them, so training goes on."""
    twins = NetTwins(_conv_net, torch.optim.AdamW, sharded={"parameters_as_bucket_view": True}, lr=0.1)
    twins.step()
    twins.net.load_state_dict(dict(twins.net.named_parameters()), assign=True)
    assert all(a is b for a, b in zip(twins.net.parameters(), twins.ours, strict=True))
    twins.step(2)
    twins.check()


def test_assigning_the_parameters_themselves_changes_nothing():
    run_ranks(_assigned_and_used, 2)


# --- check_replicas -----------------------------------------------------------------------------------------------


def _differing(rank, world_size, views):
    twins = Twins(
        lambda: parameters(SHAPES),
        torch.optim.AdamW,
        lambda p: [(f"layer{i}.weight", one) for i, one in enumerate(p)],
        sharded={"parameters_as_bucket_view": views},
    )
    twins.step()
    twins.opt.check_replicas()
    if rank == 1:
        with torch.no_grad():
            # the lowest bit of one element, and a later parameter too
            twins.ours[2].view(-1)[5] = torch.nextafter(twins.ours[2].view(-1)[5], torch.tensor(9.0).double())
            twins.ours[3][0, 0] += 1
    with pytest.raises(RuntimeError) as caught:
        twins.opt.check_replicas()
    text = str(caught.value)
    assert "layer2.weight" in text
    assert "layer3.weight" not in text
    assert "[1]" in text
    assert str([r for r in range(world_size) if r != 1]) in text
    dist.barrier()
    if rank == 1:
        with torch.no_grad():
            for mine, theirs in zip(twins.ours, twins.theirs, strict=True):
                mine.copy_(theirs)
    twins.opt.check_replicas()
    # every rank of its own opinion, also -0.0 and 0.0, and rows that only changed places
    for tamper in (
        lambda p: p.fill_(rank),
        lambda p: p.fill_(-0.0 if rank == 0 else 0.0),
        lambda p: p.copy_(p.flip(0)) if rank == 0 else p,
    ):
        with torch.no_grad():
            tamper(twins.ours[0])
        with pytest.raises(RuntimeError, match=r"layer0\.weight"):
            twins.opt.check_replicas()
        with torch.no_grad():
            twins.ours[0].copy_(twins.theirs[0])
    twins.opt.check_replicas()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_check_replicas_names_the_first_parameter_and_the_ranks_that_differ_on_every_rank(world_size, views):
    run_ranks(_differing, world_size, views)


def _drift_is_seen(rank, world_size):
    """Values that one rank set alone: the next step spreads or keeps them, but check_replicas never lies."""
    for views in (False, True):
        for shard in SHARDS:
            twins = Twins(
                lambda: parameters(SHAPES),
                torch.optim.SGD,
                lambda p: [(f"w{i}", one) for i, one in enumerate(p)],
                sharded={"parameters_as_bucket_view": views, "shard": shard},
                lr=0.1,
            )
            twins.step()
            if rank == 0:
                twins.ours[0].data = twins.ours[0].data + 1
            with pytest.raises(RuntimeError, match=r"'w0'.*\[0\] and ranks \[1, 2\]"):
                twins.opt.check_replicas()
            twins.step()  # every owner sends what it has, so replicas are equal again
            twins.opt.check_replicas()


def test_a_value_set_on_one_rank_is_seen_and_the_next_step_makes_replicas_equal():
    run_ranks(_drift_is_seen, 3)
