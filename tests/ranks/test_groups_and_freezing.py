"""add_param_group at any time; freezing and unfreezing at any time."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import collectives
from tests.harness import run_ranks
from tests.twins import Twins, assert_same, parameters, values
from tests.versions import needs_adagrad_that_grows

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
MODES = [(shard, views) for shard in ("tensor", "element") for views in (False, True)]


def _add(twins: Twins, make, **options) -> None:
    """The same new group to both."""
    for params, optimizer in ((twins.ours, twins.opt), (twins.theirs, twins.plain)):
        made = make()
        params += [item[1] if isinstance(item, tuple) else item for item in made]
        optimizer.add_param_group({"params": made, **options})


def _added_groups(rank, world_size):
    for shard, views in MODES if world_size == 3 else MODES[1:3]:
        twins = Twins(
            lambda: parameters(SHAPES[:2]),
            torch.optim.AdamW,
            sharded={"shard": shard, "parameters_as_bucket_view": views},
            lr=0.1,
        )
        twins.name = f"{shard} {views=}"
        _add(twins, lambda: parameters(SHAPES[2:4]), lr=0.05)  # before the first step
        twins.check()
        owners = _owners(twins.opt)
        twins.step(2)
        _add(twins, lambda: parameters([(2, 9), (3,)]), weight_decay=0.3)  # after steps
        assert _owners(twins.opt)[: len(owners)] == owners, "what was placed must stay where it is"
        twins.step(2)
        twins.check(to=world_size - 1)
        _add(twins, list)  # empty
        _add(twins, lambda: parameters([(4, 3), (6,)], torch.float32), lr=0.2)  # another dtype
        twins.step(2)
        twins.check()
        _add(twins, lambda: [Parameter(values((5, 3), 8), requires_grad=False)])  # frozen
        frozen = len(twins.ours) - 1
        twins.step(2, skip=[frozen])
        twins.check()
        assert not twins.opt.state[twins.ours[frozen]]
        assert len(twins.opt._all_params) == len(twins.theirs)
        for params in (twins.ours, twins.theirs):
            params[frozen].requires_grad_(True)
        twins.step(2)
        twins.check()
        twins.opt.check_replicas()
        sizes = [len(group["params"]) for group in twins.opt.param_groups]
        assert sizes == [2, 2, 2, 0, 2, 1]
        options = [group["weight_decay"] for group in twins.opt.param_groups]
        assert options == [group["weight_decay"] for group in twins.plain.param_groups], "defaults filled in at once"


def _owners(opt) -> list:
    layout = opt.layout
    return [layout.pieces_of(spec.index) for spec in layout.specs]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_groups_added_at_any_time_train_exactly_and_move_nothing(world_size):
    run_ranks(_added_groups, world_size)


def _named_groups(rank, world_size):
    for shard in ("tensor", "element"):
        twins = Twins(
            lambda: parameters(SHAPES[:2]),
            torch.optim.AdamW,
            lambda p: [("a", p[0]), ("b", p[1])],
            sharded={"shard": shard},
        )
        twins.step()
        _add(twins, lambda: [(f"w{i}", p) for i, p in enumerate(parameters(SHAPES[2:]))], lr=0.2)
        twins.step(2)
        twins.check()
        assert twins.opt.param_groups[1]["param_names"] == ["w0", "w1", "w2"]
        local = twins.opt.optim.param_groups[1]
        assert len(local["param_names"]) == len(local["params"])
        twins.opt.add_param_group({"params": []})
        assert twins.opt.param_groups[2]["param_names"] == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_named_groups_can_be_added(world_size):
    run_ranks(_named_groups, world_size)


def _other_forms(rank, world_size):
    twins = Twins(lambda: parameters(SHAPES[:1]), torch.optim.AdamW)
    for form in (lambda p: p[0], lambda p: (one for one in p), tuple):
        for params, optimizer in ((twins.ours, twins.opt), (twins.theirs, twins.plain)):
            made = parameters([(5, 3)])
            params += made
            optimizer.add_param_group({"params": form(made)})
        twins.step()
    twins.check()
    whole = parameters([(50, 3)])
    twins.opt.add_param_group({"params": whole, "shard": "tensor"})
    assert twins.opt.layout.specs[-1].granularity == "tensor"
    assert "shard" not in twins.opt.param_groups[-1]
    eager = Twins(lambda: parameters(SHAPES[:2]), torch.optim.Adagrad)
    eager.step()
    _add(eager, lambda: parameters(SHAPES[2:]))
    eager.step(2)
    eager.check()


@needs_adagrad_that_grows
def test_a_group_may_be_added_in_every_form():
    run_ranks(_other_forms, 3)


def _bad_groups(rank, world_size):
    twins = Twins(lambda: parameters(SHAPES), torch.optim.AdamW)
    twins.step()
    fresh = Parameter(values((3, 3), 1))
    for group, exception in (
        ([fresh], TypeError),
        ({"lr": 0.1}, ValueError),
        ({"params": {fresh}}, TypeError),
        ({"params": [fresh * 2]}, ValueError),
        ({"params": [twins.ours[0]]}, ValueError),
        ({"params": [("name", fresh)]}, ValueError),
        ({"params": [fresh], "shard": "rows"}, ValueError),
        ({"params": [torch.ones(3).to_sparse()]}, ValueError),
        ({"params": ["w"]}, TypeError),
    ):
        with pytest.raises(exception):
            twins.opt.add_param_group(group)
        assert len(twins.opt.param_groups) == len(twins.opt.optim.param_groups) == 1, group
        assert len(twins.opt.state) == len(SHAPES)
    twins.step(2)
    twins.check()
    _add(twins, lambda: parameters([(3, 3)]))
    twins.step(2)
    twins.check()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(world_size):
    run_ranks(_bad_groups, world_size)


def _refused_on_one_rank(rank, world_size):
    twins = Twins(lambda: parameters(SHAPES), torch.optim.AdamW)
    twins.step()
    with pytest.raises(ValueError if rank == 2 else RuntimeError) as caught:
        twins.opt.add_param_group({"params": parameters([(4, 3)]), "shard": "rows" if rank == 2 else "auto"})
    assert "rows" in str(caught.value)
    assert len(twins.opt.param_groups) == 1
    with pytest.raises(RuntimeError, match=r"lr is 0\.1 on ranks 0, 2 but 0\.2 on rank 1"):
        twins.opt.add_param_group({"params": parameters([(4, 3)]), "lr": 0.2 if rank == 1 else 0.1})
    twins.step(2)
    twins.check()
    _add(twins, lambda: parameters([(3, 3)]))
    twins.step(2)
    twins.check()


def test_a_group_that_one_rank_refuses_is_added_nowhere():
    run_ranks(_refused_on_one_rank, 3, pg_timeout=10)


def _empty_groups(rank, world_size):
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(SHAPES),
            torch.optim.AdamW,
            lambda p: [
                {"params": [], "lr": 0.5},
                {"params": p[:2], "lr": 0.1},
                {"params": [], "lr": 0.7, "weight_decay": 0.0},
                {"params": p[2:], "lr": 0.2},
                {"params": [], "lr": 0.9},
            ],
            sharded={"shard": shard, "parameters_as_bucket_view": views},
        )
        twins.step(3)
        twins.check()
        for groups in (twins.opt.param_groups, twins.opt.optim.param_groups):
            assert [group["lr"] for group in groups] == [0.5, 0.1, 0.7, 0.2, 0.9]
        assert [len(group["params"]) for group in twins.opt.param_groups] == [0, 2, 0, 3, 0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_groups_survive_in_order(world_size):
    run_ranks(_empty_groups, world_size)


# --- freezing -----------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 7)
        self.never = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, 3)
        for position, param in enumerate(self.parameters()):
            param.data = values(param.shape, position)
        self.never.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.never(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def _freeze_under_ddp(rank, world_size, shard, views, optimizer_class, options):
    ours, theirs = Net(), Net()

    def groups(net):
        return [
            {"params": [*net.first.parameters(), *net.never.parameters()]},
            {"params": [*net.second.parameters(), *net.head.parameters()], "lr": 0.05},
        ]

    opt = ZeroRedundancyOptimizer(
        groups(ours),
        optimizer_class,
        shard=shard,
        parameters_as_bucket_view=views,
        bucket_cap_mb=300 / 2**20,
        **options,
    )
    plain = optimizer_class(groups(theirs), **options)
    plan = [
        ("all", True),
        ("first", False),
        ("first", True),
        ("second", False),
        ("head", False),
        ("second", True),
        ("head", True),
    ]
    for phase, (part, trainable) in enumerate(plan):
        where = f"phase {phase}: {part} {trainable}"
        if part != "all":
            for net in (ours, theirs):
                getattr(net, part).requires_grad_(trainable)
                net.zero_grad()
        kept = {name: opt.full_state(p) for name, p in ours.named_parameters() if not p.requires_grad}
        for net, optimizer in ((ours, opt), (theirs, plain)):
            ddp = DistributedDataParallel(net)
            for step in range(2):
                optimizer.zero_grad()
                ddp(values((2, 5), 100 * phase + 10 * step + rank)).square().mean().backward()
                optimizer.step()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other), f"{where}: {name} on rank {rank}"
        for name, state in kept.items():
            assert_same(opt.full_state(ours.get_parameter(name)), state, f"{where}: state of {name} while frozen")
        opt.consolidate_state_dict(to=phase % world_size)
        if rank == phase % world_size:
            assert_same(opt.state_dict(), plain.state_dict(), where)
    eager = bool(optimizer_class(parameters(SHAPES)).state)
    for param in ours.never.parameters():
        assert eager or (opt.full_state(param) == {} and not opt.state[param]), "never trained, so no state"
    opt.check_replicas()


@pytest.mark.parametrize(
    ("world_size", "shard", "views", "optimizer_class", "options"),
    [
        (2, "auto", False, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
        (3, "auto", False, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
        (3, "auto", True, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
        (3, "tensor", False, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
        (3, "tensor", True, torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
        (4, "auto", True, torch.optim.RMSprop, {"lr": 0.02}),
        (3, "auto", False, torch.optim.Adafactor, {"lr": 0.02}),
        (3, "auto", False, torch.optim.Adagrad, {"lr": 0.02}),
    ],
)
def test_freezing_and_unfreezing_under_ddp_equals_the_plain_optimizer_and_keeps_the_state(
    world_size, shard, views, optimizer_class, options
):
    run_ranks(_freeze_under_ddp, world_size, shard, views, optimizer_class, options)


class Traffic:
    """Counts what passes torch.distributed, and the gathers, while it is on. Everything is really sent."""

    def __enter__(self):
        self.bytes = self.messages = self.gathers = 0
        self._isend, self._shards, self._buffer = dist.isend, collectives.gather_shards, collectives.gather_buffer

        def isend(tensor, *args, **kwargs):
            self.bytes += tensor.nbytes
            self.messages += 1
            return self._isend(tensor, *args, **kwargs)

        def gather_shards(*args):
            self.gathers += 1
            return self._shards(*args)

        def gather_buffer(*args):
            raise AssertionError("gloo gathers pairwise")

        dist.isend, collectives.gather_shards, collectives.gather_buffer = isend, gather_shards, gather_buffer
        return self

    def __exit__(self, *exception):
        dist.isend, collectives.gather_shards, collectives.gather_buffer = self._isend, self._shards, self._buffer

    def total(self) -> int:
        total = torch.tensor(self.bytes)
        dist.all_reduce(total)
        return int(total)


def _traffic(rank, world_size):
    os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"  # what goes through memory is not counted by messages
    shapes = [(7, 5), (100, 90), (5,), (33, 3), (11,)]
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(shapes), torch.optim.AdamW, sharded={"shard": shard, "parameters_as_bucket_view": views}
        )
        opt = twins.opt
        # padding between parameters, which only buffers have, stays below 64 elements each
        slack = 64 * 8 * len(shapes) * (world_size - 1) if views else 0
        for frozen in ([], [1], [0, 1, 2], [0, 2, 3, 4], [0, 1, 2, 3, 4], []):
            for params in (twins.ours, twins.theirs):
                for position, param in enumerate(params):
                    param.requires_grad_(position not in frozen)
            twins.step(1, skip=frozen)
            with Traffic() as traffic:
                twins.step(1, skip=frozen)
            active = sum(p.nbytes for i, p in enumerate(twins.ours) if i not in frozen)
            sent = traffic.total()
            name = f"{shard} {views=} {frozen=}"
            assert active * (world_size - 1) <= sent <= active * (world_size - 1) + slack, name
            assert traffic.gathers == len(opt.engine.sharded.plan.active_buckets), name
            assert frozen != list(range(5)) or traffic.gathers == traffic.bytes == 0, name
            twins.check()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_frozen_parameters_are_not_sent(world_size):
    """Counted in bytes: each active element goes to each other rank once, and nothing else goes."""
    run_ranks(_traffic, world_size)


def _buckets(rank, world_size):
    os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
    count = 40
    for views in (False, True):
        for shard in ("tensor", "element"):
            opt = ZeroRedundancyOptimizer(
                parameters([(25,)] * count),
                torch.optim.AdamW,
                shard=shard,
                parameters_as_bucket_view=views,
                bucket_cap_mb=2504 / 2**20,  # ten parameters of 200 bytes, each from a 64-byte boundary on
            )
            params = opt._all_params
            for frozen in (0, 20, count):
                for position, param in enumerate(params):
                    param.requires_grad_(position >= frozen)
                    param.grad = torch.ones_like(param) if position >= frozen else None
                opt.step()
                with Traffic() as traffic:
                    opt.step()
                expected = (count - frozen) // 10
                active = opt.engine.sharded.plan.active_buckets
                assert len(active) == traffic.gathers == expected, (shard, views, frozen)
                assert traffic.messages <= expected * (world_size - 1), "one message per bucket and other rank"


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_makes_one_exchange_per_active_bucket_not_per_parameter(world_size):
    run_ranks(_buckets, world_size)


def _frozen_with_gradient(rank, world_size):
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(SHAPES),
            torch.optim.AdamW,
            sharded={"shard": shard, "parameters_as_bucket_view": views},
            lr=0.1,
        )
        twins.name = f"{shard} {views=}"
        twins.step(2)
        for params in (twins.ours, twins.theirs):
            params[0].requires_grad_(False)
            params[3].requires_grad_(False)
        twins.opt.step()  # the old gradients are still there: the plain optimizer uses them
        twins.plain.step()
        twins.check()
        twins.step(1, skip=[0])
        twins.check()
        twins.step(1, skip=[0, 3])
        twins.step(1, skip=[3])
        twins.check()
        twins.opt.check_replicas()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_parameter_that_holds_a_gradient_is_stepped_as_by_the_plain_optimizer(world_size):
    run_ranks(_frozen_with_gradient, world_size)


def _frozen_changed_by_hand(rank, world_size):
    """A frozen parameter is the user's: a value set on all ranks is what trains on after the unfreeze."""
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(SHAPES), torch.optim.AdamW, sharded={"shard": shard, "parameters_as_bucket_view": views}
        )
        twins.step()
        for params in (twins.ours, twins.theirs):
            params[3].requires_grad_(False)
        twins.step(2, skip=[3])
        for params in (twins.ours, twins.theirs):
            with torch.no_grad():
                params[3].fill_(0.25)
            params[3].requires_grad_(True)
        twins.step(2)
        twins.check()


def test_a_value_set_while_frozen_is_kept():
    run_ranks(_frozen_changed_by_hand, 3)


def _frozen_and_given_other_memory(rank, world_size):
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(SHAPES), torch.optim.AdamW, sharded={"shard": shard, "parameters_as_bucket_view": views}
        )
        twins.step()
        for params in (twins.ours, twins.theirs):
            params[3].requires_grad_(False)
        for param in twins.ours:
            param.data = param.data.clone()
        twins.step(2, skip=[3])
        twins.check()


def test_parameters_may_be_frozen_and_given_other_memory_before_the_same_step():
    run_ranks(_frozen_and_given_other_memory, 3)


def _built_frozen(rank, world_size):
    """Everything frozen at construction, layer by layer thawed: the usual fine-tuning."""

    def params():
        made = parameters(SHAPES)
        for param in made:
            param.requires_grad_(False)
        return made

    for shard, views in MODES:
        twins = Twins(params, torch.optim.AdamW, sharded={"shard": shard, "parameters_as_bucket_view": views}, lr=0.1)
        twins.step(1, skip=range(5))
        assert twins.opt.memory().state == 0
        for thawed in range(5):
            for both in (twins.ours, twins.theirs):
                both[4 - thawed].requires_grad_(True)
            twins.step(2, skip=range(4 - thawed))
            for position in range(4 - thawed):
                assert twins.opt.full_state(twins.ours[position]) == {}
            twins.check()


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_was_built_frozen_is_thawed_layer_by_layer(world_size):
    run_ranks(_built_frozen, world_size)
