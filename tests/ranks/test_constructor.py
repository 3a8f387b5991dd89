"""Building an optimizer: what it takes, what it refuses and with which words, what it shows."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.twins import Twins, parameters, values

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]


class Net(torch.nn.Module):
    """Two layers that share one weight, and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.second = torch.nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.nothing = Parameter(torch.empty(0, 3))
        self.head = torch.nn.Linear(5, 3)
        for position, param in enumerate(self.parameters()):
            param.data = values(param.shape, position)


def _train(twins: Twins) -> None:
    twins.step(3)
    twins.check(to=twins.opt.world_size - 1)
    twins.opt.check_replicas()


FORMS = {
    "list": lambda p: p,
    "tuple": tuple,
    "generator": lambda p: (one for one in p),
    "dict values": lambda p: {str(i): one for i, one in enumerate(p)}.values(),
    "one dict": lambda p: [{"params": p}],
    "generator of dicts": lambda p: ({"params": [one]} for one in p),
    "generator inside a dict": lambda p: [{"params": (one for one in p)}],
    "generators inside two dicts": lambda p: [
        {"params": (one for one in p[:2])},
        {"params": (one for one in p[2:]), "lr": 0.3},
    ],
    "a tuple inside a dict": lambda p: [{"params": tuple(p)}],
    "one tensor in a dict": lambda p: [{"params": p[0]}, {"params": p[1:], "weight_decay": 0.2}],
    "named": lambda p: [(f"w{i}", one) for i, one in enumerate(p)],
    "named generator": lambda p: ((f"w{i}", one) for i, one in enumerate(p)),
    "named inside dicts": lambda p: [
        {"params": [("a", p[0])]},
        {"params": ((f"w{i}", one) for i, one in enumerate(p[1:])), "lr": 0.2},
    ],
    "an empty group first": lambda p: [{"params": []}, {"params": p}],
    "empty groups all over": lambda p: [
        {"params": p[:2]},
        {"params": [], "lr": 7.0},
        {"params": p[2:]},
        {"params": []},
    ],
    "an empty group beside named ones": lambda p: [
        {"params": [(f"w{i}", one) for i, one in enumerate(p)]},
        {"params": [], "weight_decay": 0.0},
    ],
    "one parameter": lambda p: [p[0]],
    "fewer parameters than ranks": lambda p: p[3:],
}


def _forms(rank, world_size):
    for form, groups in FORMS.items():
        for shard in ("auto", "tensor") if world_size == 3 else ("auto",):
            params, plain_params = parameters(SHAPES), parameters(SHAPES)
            opt = ZeroRedundancyOptimizer(groups(params), torch.optim.AdamW, lr=0.1, shard=shard)
            given = list(groups(plain_params))
            # torch refuses an empty group beside named ones; give its oracle the names that ours has
            for group in given:
                if isinstance(group, dict) and form == "an empty group beside named ones" and not group["params"]:
                    group["param_names"] = []
            plain = torch.optim.AdamW(given, lr=0.1)
            twins = Twins.__new__(Twins)
            vars(twins).update(
                name=f"{form} {shard}", close=None, ours=params, theirs=plain_params, opt=opt, plain=plain, seed=5
            )
            assert [len(g["params"]) for g in opt.param_groups] == [len(g["params"]) for g in plain.param_groups]
            assert [g.get("param_names") for g in opt.param_groups] == [
                g.get("param_names") for g in plain.param_groups
            ], form
            _train(twins)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_form_of_params_that_torch_takes_trains_exactly(world_size):
    run_ranks(_forms, world_size)


def _zero_elements(rank, world_size):
    for shapes in ([(0,), (7, 5), (0, 3), (2,)], [(0,)], [(0,), (0, 4), (3, 0)]):
        for views in (False, True):
            for shard in ("auto", "tensor"):
                _train(
                    Twins(
                        lambda shapes=shapes: parameters(shapes),
                        torch.optim.Adam,
                        name=f"{shapes} {views=} {shard}",
                        sharded={"parameters_as_bucket_view": views, "shard": shard},
                    )
                )


@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_of_zero_elements_are_kept(world_size):
    run_ranks(_zero_elements, world_size)


def _other_kinds(rank, world_size):
    """0-dim, integer and bool parameters: the latter are frozen, and plain optimizers carry them along."""

    def params():
        return [
            Parameter(values((), 3)),
            Parameter(torch.arange(5, dtype=torch.int8), requires_grad=False),
            Parameter(torch.tensor([True, False, True]), requires_grad=False),
            Parameter(values((4, 3), 4)),
        ]

    for views in (False, True):
        for groups in (list, lambda p: [{"params": p[1:3]}, {"params": [p[0], p[3]]}]):
            twins = Twins(params, torch.optim.AdamW, groups, sharded={"parameters_as_bucket_view": views})
            for step in range(3):
                for both in (twins.ours, twins.theirs):
                    both[0].grad, both[3].grad = values((), step), values((4, 3), step)
                twins.opt.step()
                twins.plain.step()
            twins.check()
            twins.opt.check_replicas()


@pytest.mark.parametrize("world_size", [1, 3])
def test_scalars_and_frozen_integers_are_carried_along(world_size):
    run_ranks(_other_kinds, world_size)


def _named(rank, world_size):
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    for shard in ("auto", "tensor"):
        opt = ZeroRedundancyOptimizer(net.named_parameters(), torch.optim.SGD, lr=0.1, shard=shard)
        assert opt.param_groups[0]["param_names"] == names
        local = opt.optim.param_groups[0]
        assert len(local["param_names"]) == len(local["params"])
        of_memory = {param.data_ptr(): name for name, param in net.named_parameters() if param.numel()}
        for name, piece in zip(local["param_names"], local["params"], strict=True):
            inside = [
                own
                for own, param in net.named_parameters()
                if param.numel() and param.data_ptr() <= piece.data_ptr() < param.data_ptr() + param.nbytes
            ]
            assert name == "nothing" or [name] == inside, (name, inside, of_memory)
        assert opt.state_dict()["param_groups"][0]["param_names"] == names
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        opt.step()
        assert opt.param_groups[0]["param_names"] == names
        assert len(opt.optim.param_groups[0]["param_names"]) == len(opt.optim.param_groups[0]["params"])


@pytest.mark.parametrize("world_size", [1, 3])
def test_names_are_kept_in_the_groups_and_in_the_local_groups(world_size):
    run_ranks(_named, world_size)


def _tied(rank, world_size):
    ours, theirs = Net(), Net()
    opt = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    assert len(opt.param_groups[0]["params"]) == len(list(theirs.parameters()))
    for step in range(3):
        for net in (ours, theirs):
            net.zero_grad()
            x = values((4, 5), step)
            net.head(torch.tanh(net.second(torch.tanh(net.first(x))))).square().mean().backward()
        opt.step()
        plain.step()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert ours.second.weight is ours.first.weight
    opt.check_replicas()


@pytest.mark.parametrize("world_size", [1, 3])
def test_tied_weights_are_one_parameter(world_size):
    run_ranks(_tied, world_size)


def _duplicates(rank, world_size):
    for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
        for shard in ("tensor", "element"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                twins = Twins(
                    lambda: parameters(SHAPES),
                    optimizer_class,
                    lambda p: [p[0], p[1], p[0], p[2], p[1], p[3], p[4]],
                    sharded={"shard": shard},
                    lr=0.1,
                )
            assert any("duplicate parameters" in str(warning.message) for warning in caught)
            twins.name = f"duplicates {optimizer_class.__name__} {shard}"
            twins.step(3)
            twins.check_weights()
            # torch numbers a duplicate by its last place, we by its first; a load takes either
            theirs = copy.deepcopy(twins.plain.state_dict())
            twins.opt.consolidate_state_dict()
            if rank == 0:
                twins.plain.load_state_dict(twins.opt.state_dict())
            twins.opt.load_state_dict(theirs)
            twins.step(2)
            twins.check_weights()


@pytest.mark.parametrize("world_size", [1, 3])
def test_duplicates_inside_a_group_warn_and_step_as_often_as_in_the_plain_optimizer(world_size):
    run_ranks(_duplicates, world_size)


def _all_empty(rank, world_size):
    opt = ZeroRedundancyOptimizer([{"params": []}, {"params": [], "lr": 0.5}], torch.optim.AdamW, lr=0.1)
    opt.step()
    opt.zero_grad()
    opt.check_replicas()
    opt.consolidate_state_dict()
    assert opt.state_dict()["state"] == {}
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.5]
    params, others = parameters(SHAPES), parameters(SHAPES)
    plain = torch.optim.AdamW([{"params": []}, {"params": [], "lr": 0.5}], lr=0.1)
    opt.add_param_group({"params": params})
    plain.add_param_group({"params": others})
    for step in range(2):
        for one, other in zip(params, others, strict=True):
            one.grad = other.grad = values(one.shape, step)
        opt.step()
        plain.step()
    assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_groups_may_be_empty_until_one_is_added(world_size):
    run_ranks(_all_empty, world_size)


# --- what is refused ----------------------------------------------------------------------------------------------


class NeedsLr(torch.optim.SGD):
    def __init__(self, params, lr, **options):
        super().__init__(params, lr=lr, **options)


def _functional_class():
    from torch.distributed.optim.functional_adam import _FunctionalAdam

    return _FunctionalAdam


def _refusals():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    sparse = torch.ones(3, 2).to_sparse()
    adam = torch.optim.Adam
    named = [("w", weight)]
    return {
        # what: (arguments, options, exception, words that the message has)
        "a tensor": ((weight, adam), {}, TypeError, ["params", "torch.FloatTensor", "[tensor]"]),
        "a plain tensor": ((torch.ones(2), adam), {}, TypeError, ["params", "torch.FloatTensor"]),
        "a number": ((3, adam), {}, TypeError, ["params", "int", "model.parameters()"]),
        "None": ((None, adam), {}, TypeError, ["params", "NoneType"]),
        "a module": ((torch.nn.Linear(2, 2), adam), {}, TypeError, ["params", "Linear", "model.parameters()"]),
        "an empty list": (([], adam), {}, ValueError, ["empty parameter list"]),
        "an empty generator": (((p for p in []), adam), {}, ValueError, ["empty parameter list"]),
        "tensors and dicts": (([weight, {"params": weight}], adam), {}, TypeError, ["params", "dict"]),
        "tensors and strings": (([weight, "w"], adam), {}, TypeError, ["params", "str"]),
        "a string": (("weights", adam), {}, TypeError, ["params", "str"]),
        "tensors and pairs": (([weight, ("w", torch.ones(2))], adam), {}, TypeError, ["params", "tuple"]),
        "pairs the wrong way": (([(weight, "w")], adam), {}, TypeError, ["params", "tuple"]),
        "a dict without params": (([{"lr": 0.1}], adam), {}, ValueError, ["'params'", "lr"]),
        "a set in a group": (([{"params": {weight}}], adam), {}, TypeError, ["set", "list"]),
        "a set": (({weight}, adam), {}, TypeError, ["set", "list"]),
        "strings in a group": (([{"params": ["w"]}], adam), {}, TypeError, ["str"]),
        "sparse first": (([sparse, weight], adam), {}, ValueError, ["only supports using the same dense type"]),
        "sparse later": (([weight, sparse], adam), {}, ValueError, ["only supports using the same dense type"]),
        "sparse in a group": (
            ([{"params": weight}, {"params": sparse}], adam),
            {},
            ValueError,
            ["only supports using the same dense type"],
        ),
        "sparse and named": (([("w", sparse)], adam), {}, ValueError, ["only supports using the same dense type"]),
        "a non-leaf": (([weight * 2], adam), {}, ValueError, ["non-leaf"]),
        "twice in two groups": (([{"params": weight}, {"params": weight}], adam), {}, ValueError, ["more than one"]),
        "named and unnamed groups": (
            ([{"params": named}, {"params": [torch.nn.Parameter(torch.ones(2))]}], adam),
            {},
            ValueError,
            ["names"],
        ),
        "a required option": (([weight], NeedsLr), {}, TypeError, ["lr"]),
        "an unknown option": (([weight], adam), {"no_such_option": 1}, TypeError, ["no_such_option"]),
        "a bad option": (([weight], adam), {"lr": -1.0}, ValueError, ["Invalid learning rate"]),
        "a functional class": (([weight], _functional_class()), {}, ValueError, ["_FunctionalAdam", "ordinary class"]),
        "another class": (([weight], torch.nn.Linear), {}, ValueError, ["optimizer_class", "Linear"]),
        "no class": (([weight], 3), {}, TypeError, ["optimizer_class", "3", "torch.optim"]),
        "an instance": (([weight], adam([weight])), {}, TypeError, ["optimizer_class", "torch.optim"]),
        "a factory of something else": (([weight], lambda params: 3), {}, ValueError, ["optimizer_class", "int"]),
        "shard": (([weight], adam), {"shard": "rows"}, ValueError, ["shard", "'rows'", "auto"]),
        "shard=None": (([weight], adam), {"shard": None}, ValueError, ["shard", "None", "auto"]),
        "a group's shard": (([{"params": weight, "shard": 1}], adam), {}, ValueError, ["shard", "1", "auto"]),
        "an unhashable shard": (([weight], adam), {"shard": ["auto"]}, ValueError, ["shard", "auto"]),
        "a cap of 0": (([weight], adam), {"bucket_cap_mb": 0}, ValueError, ["bucket_cap_mb", "0", "25"]),
        "a negative cap": (([weight], adam), {"bucket_cap_mb": -1.5}, ValueError, ["bucket_cap_mb", "-1.5"]),
        "a cap that is no number": (([weight], adam), {"bucket_cap_mb": "25"}, ValueError, ["bucket_cap_mb", "'25'"]),
        "a nan cap": (([weight], adam), {"bucket_cap_mb": float("nan")}, ValueError, ["bucket_cap_mb", "nan"]),
        "an infinite cap": (([weight], adam), {"bucket_cap_mb": float("inf")}, ValueError, ["bucket_cap_mb", "inf"]),
        "two who reduce": (
            ([weight], adam),
            {"overlap_with_ddp": True, "shard_gradients": True},
            ValueError,
            ["overlap_with_ddp", "shard_gradients", "Drop"],
        ),
        "lazy and within backward": (
            ([weight], adam),
            {"overlap_with_ddp": True, "lazy_gather": True},
            ValueError,
            ["overlap_with_ddp", "lazy_gather", "Drop"],
        ),
        "a reduce_dtype for nothing": (
            ([weight], adam),
            {"reduce_dtype": torch.float32},
            ValueError,
            ["reduce_dtype", "shard_gradients=True"],
        ),
        "an integer reduce_dtype": (
            ([weight], adam),
            {"reduce_dtype": torch.int32, "shard_gradients": True},
            ValueError,
            ["reduce_dtype", "int32"],
        ),
        "nothing in flight": (
            ([weight], adam),
            {"gradient_buckets_in_flight": 0, "shard_gradients": True},
            ValueError,
            ["gradient_buckets_in_flight", "0"],
        ),
    }


def _refuse(rank, world_size):
    problems = []
    for what, (args, options, exception, words) in _refusals().items():
        try:
            ZeroRedundancyOptimizer(*args, **options)
            problems.append(f"{what}: was not refused")
        except Exception as error:
            if type(error) is not exception:
                problems.append(f"{what}: expected {exception.__name__} but got {error!r}")
            problems += [f"{what}: {word!r} is not in {error!r}" for word in words if word not in str(error)]
            if what in ("a number", "None", "a module") and not isinstance(error.__cause__, TypeError):
                problems.append(f"{what}: is not chained from the original")
    assert not problems, "\n".join(problems)
    # and after all this the ranks still agree
    _train(Twins(lambda: parameters(SHAPES), torch.optim.Adam))


@pytest.mark.parametrize("world_size", [1, 3])
def test_bad_arguments_raise_the_right_exception_with_argument_value_and_remedy(world_size):
    run_ranks(_refuse, world_size)


TORCH_REFUSES_TOO = (
    "a tensor",
    "a number",
    "an empty list",
    "tensors and dicts",
    "a dict without params",
    "sparse first",
    "sparse later",
    "a non-leaf",
    "twice in two groups",
    "a required option",
    "an unknown option",
    "a bad option",
    "a functional class",
    "a set in a group",
)


def _as_torch(rank, world_size):
    for what in TORCH_REFUSES_TOO:
        raised = []
        for cls in (TorchZeroRedundancyOptimizer, ZeroRedundancyOptimizer):
            args, options, _, _ = _refusals()[what]
            with pytest.raises((TypeError, ValueError)) as caught:
                cls(*args, **options)
            raised.append(type(caught.value))
        assert raised[0] is raised[1], what


def test_the_exception_types_are_those_of_torch():
    run_ranks(_as_torch, 1)


def _refused_on_one_rank(rank, world_size):
    weight = parameters([(3, 2)])
    with pytest.raises(ValueError if rank == 1 else RuntimeError) as caught:
        ZeroRedundancyOptimizer(weight, torch.optim.Adam, bucket_cap_mb=-1 if rank == 1 else 25)
    assert "bucket_cap_mb" in str(caught.value)
    assert rank == 1 or "rank 1" in str(caught.value)
    with pytest.raises(TypeError if rank == 2 else RuntimeError) as caught:
        ZeroRedundancyOptimizer(weight[0] if rank == 2 else weight, torch.optim.Adam)
    assert rank == 2 or "rank 2" in str(caught.value)
    with pytest.raises(ValueError if rank == 0 else RuntimeError) as caught:
        ZeroRedundancyOptimizer(weight, torch.optim.Adam, reduce_dtype=torch.float32 if rank == 0 else None)
    assert rank == 0 or "rank 0" in str(caught.value)
    _train(Twins(lambda: parameters(SHAPES), torch.optim.Adam))


def test_what_one_rank_refuses_raises_on_all_ranks():
    run_ranks(_refused_on_one_rank, 3, pg_timeout=10)


def _dtensor(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    param = Parameter(distribute_tensor(torch.ones(6, 2), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"DTensor.*Shard\(dim=1\).*to_local\(\)"):
        ZeroRedundancyOptimizer([param], torch.optim.Adam)


def test_a_sharded_dtensor_is_refused_with_its_placement_and_the_remedy():
    run_ranks(_dtensor, 2)


def _outsider(rank, world_size):
    group = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match=r"process_group.*2"):
            ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.Adam, process_group=group)
        return
    twins = Twins(lambda: parameters(SHAPES), torch.optim.Adam, sharded={"process_group": group})
    assert twins.opt.process_group is group
    assert twins.opt.world_size == 2
    _train(twins)


def test_a_rank_outside_the_process_group_is_refused():
    run_ranks(_outsider, 3)


def test_without_a_process_group_it_is_a_value_error_if_several_processes_were_launched(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.Adam)


def _untouched(rank, world_size):
    params = parameters(SHAPES)
    groups = [
        {"params": params[:2], "lr": 0.5, "shard": "tensor"},
        {"params": (("a"), params[2])[1], "betas": (0.5, 0.6)},
        {"params": params[3:]},
    ]
    shape = [{key: list(v) if key == "params" and isinstance(v, list) else v for key, v in g.items()} for g in groups]
    lists = [group["params"] for group in groups]
    options = {"lr": 0.1, "betas": (0.9, 0.99)}
    typed = copy.deepcopy(options)
    memory = [p.data_ptr() for p in params]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    assert options == typed
    assert [list(group) for group in groups] == [list(group) for group in shape]
    for group, before, listed in zip(groups, shape, lists, strict=True):
        assert group["params"] is listed
        for key in before:
            if key == "params" and isinstance(before[key], list):
                assert [id(p) for p in group[key]] == [id(p) for p in before[key]]
            else:
                assert group[key] is before[key]
    assert [p.data_ptr() for p in params] == memory, "without views the parameters stay where they are"
    assert all(a is b for a, b in zip(opt._all_params, params, strict=True))
    given = {"params": [torch.nn.Parameter(torch.ones(3))], "shard": "tensor"}
    copied = dict(given)
    opt.add_param_group(given)
    assert given == copied


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_callers_dicts_and_lists_are_not_changed(world_size):
    run_ranks(_untouched, world_size)


# --- what it shows ------------------------------------------------------------------------------------------------


def _attributes(rank, world_size):
    params = parameters(SHAPES)
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.5)
    assert isinstance(opt, torch.optim.Optimizer)
    assert isinstance(opt, Joinable)
    assert type(opt.optim) is torch.optim.AdamW
    assert opt.process_group is dist.group.WORLD
    assert (opt.world_size, opt.rank, opt.global_rank) == (world_size, rank, rank)
    assert opt.initialized is True
    assert opt.parameters_as_bucket_view is False
    assert len(opt._all_params) == len(params)
    assert all(a is b for a, b in zip(opt._all_params, params, strict=True))
    plain = torch.optim.AdamW(parameters(SHAPES), lr=0.5)
    assert opt.defaults == plain.defaults
    assert list(opt.param_groups[0].keys() - {"params"}) == list(plain.param_groups[0].keys() - {"params"})
    for key in plain.param_groups[0].keys() - {"params"}:
        assert opt.param_groups[0][key] == plain.param_groups[0][key]
    assert set(opt.state) == set(params)
    assert all(not opt.state[p] for p in params)
    assert opt.state_dict() == plain.state_dict()
    assert opt.join_process_group is opt.process_group
    assert opt.join_device == torch.device("cpu")
    opt.any_attribute = 3  # torch's join test sets one
    assert opt.any_attribute == 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        opt.no_such_thing  # noqa: B018
    owned = sum(p.numel() for group in opt.optim.param_groups for p in group["params"])
    totals = [torch.zeros((), dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(totals, torch.tensor(owned))
    assert sum(map(int, totals)) == sum(p.numel() for p in params)
    views = ZeroRedundancyOptimizer(params, torch.optim.AdamW, parameters_as_bucket_view=True)
    assert views.parameters_as_bucket_view is True


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_attributes_of_torchs_class_are_there(world_size):
    run_ranks(_attributes, world_size)


def _subgroup(rank, world_size):
    group = dist.new_group([3, 1], use_local_synchronization=False)
    if rank in (1, 3):
        opt = ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.SGD, group, lr=0.1)
        assert opt.process_group is group
        assert opt.rank == dist.get_rank(group)
        assert opt.global_rank == rank
        assert opt.world_size == 2


def test_rank_is_the_rank_within_the_group():
    run_ranks(_subgroup, 4)


def _positional(rank, world_size):
    params = parameters(SHAPES)
    group = dist.new_group(list(range(world_size)))
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, group, True, False, lr=0.25)
    assert opt.process_group is group
    assert opt.parameters_as_bucket_view is True
    assert opt.param_groups[0]["lr"] == 0.25
    keyword = ZeroRedundancyOptimizer(
        params=params,
        optimizer_class=torch.optim.SGD,
        process_group=group,
        parameters_as_bucket_view=False,
        overlap_with_ddp=False,
        lr=0.5,
    )
    assert keyword.param_groups[0]["lr"] == 0.5


def test_arguments_may_be_positional_as_in_torchs_class():
    run_ranks(_positional, 2)


def _factory(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def _factories(rank, world_size):
    _train(Twins(lambda: parameters(SHAPES), _factory, lr=0.1))


def test_a_function_that_builds_an_optimizer_will_do_as_a_class():
    run_ranks(_factories, 3)
