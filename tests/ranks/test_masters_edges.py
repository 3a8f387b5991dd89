"""float32 masters at the edges: reads between swaps, closures that are counted, inference mode, errors on one rank."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.ranks.test_masters import KEPT, SMALL, MasterTwins
from tests.ranks.test_masters_state import build, make_model, train
from tests.twins import values

pytestmark = pytest.mark.extended
SPACING = 2.0**-7  # of bfloat16, between 1 and 2


def _swapped(rank, world, mode):
    """Other weights are swapped in, a checkpoint is made of them, and the training weights come back."""
    twins = MasterTwins(torch.optim.AdamW, mode, lr=0.003)
    twins.step(3)
    trained = [param.detach().clone() for param in twins.ours]
    for param in twins.ours:
        param.data.mul_(1.5)
    for param in twins.ours:
        twins.opt.full_state(param)
    for param, value in zip(twins.ours, trained, strict=True):
        param.data.copy_(value)
    twins.check("swapped back")
    twins.step(2)
    twins.check("trained on")


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 3])
def test_reading_state_while_other_weights_are_swapped_in_leaves_masters_alone(world, mode):
    run_ranks(_swapped, world, mode)


def _lost_in_closures(rank, world, mode):
    param = Parameter(torch.ones(300, dtype=torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, master_weights=mode)

    def closure():
        param.grad = torch.full_like(param, -SPACING / 10)
        param.grad[200:] = 0

    with opt.count_lost_updates() as lost:
        for _ in range(3):
            opt.step(closure)
            opt.zero_grad()
    return lost.by_group


@pytest.mark.parametrize("mode", [None, *KEPT])
def test_updates_that_are_lost_in_steps_with_closures_are_counted(mode):
    for shares in run_ranks(_lost_in_closures, 3, mode):
        assert shares == [pytest.approx(2 / 3)]


def _evaluated_first(rank, world, mode):
    from schedulefree import AdamWScheduleFree

    twins = MasterTwins(AdamWScheduleFree, mode, lr=0.01)
    with torch.inference_mode():
        twins.opt.eval()
        twins.opt.train()
    twins.plain.train()
    twins.step(3)
    twins.check("after inference mode")


@pytest.mark.parametrize("mode", KEPT)
def test_masters_that_are_made_in_inference_mode_can_be_trained(mode):
    run_ranks(_evaluated_first, 3, mode)


def _sparse_on_its_owner(rank, world):
    """Of two parameters only the second has a sparse gradient, and only one rank has a master of it."""
    dense, sparse = (Parameter(torch.ones(40, 1, dtype=torch.bfloat16)) for _ in range(2))
    opt = ZeroRedundancyOptimizer(
        [dense, sparse], torch.optim.SGD, lr=1.0, master_weights=torch.float32, shard="tensor", bucket_cap_mb=1e-5
    )
    dense.grad, sparse.grad = torch.ones_like(dense), torch.ones_like(sparse).to_sparse()
    return str(error_of(opt.step))


def test_a_sparse_gradient_that_only_its_owner_sees_is_an_error_on_all():
    for text in run_ranks(_sparse_on_its_owner, 3, fresh=True):
        assert "expects dense gradients" in text


def _evaluated_while_frozen(rank, world, mode):
    """Frozen parameters with state are switched, too, as the plain optimizer does; without masters in float64."""
    from schedulefree import AdamWScheduleFree

    if mode is None:
        ours, theirs = ([Parameter(values((50,), i)) for i in range(4)] for _ in range(2))
        opt = ZeroRedundancyOptimizer(ours, AdamWScheduleFree, lr=0.01, bucket_cap_mb=SMALL)
        plain = AdamWScheduleFree(theirs, lr=0.01)
    else:
        twins = MasterTwins(AdamWScheduleFree, mode, lr=0.01)
        ours, theirs, opt, plain = twins.ours, twins.theirs, twins.opt, twins.plain
    opt.train()
    plain.train()
    for step in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = values(mine.shape, step, mine.dtype)
            other.grad = mine.grad.to(other.dtype, copy=True)  # its step writes into it
        opt.step()
        plain.step()
    opt.zero_grad()
    for param in ours[-2:]:
        param.requires_grad_(False)
    opt.eval()
    plain.eval()
    opt.check_replicas()
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        found = mine.detach() if mode is None else opt.full_state(mine)["master_weight"]
        assert torch.equal(found, other.detach()), position


@pytest.mark.parametrize("mode", [None, *KEPT])
@pytest.mark.parametrize("world", [1, 3])
def test_train_and_eval_switch_frozen_parameters_that_have_state(world, mode):
    run_ranks(_evaluated_while_frozen, world, mode)


def _told(rank, world):
    """Rank 0 owns the float32 parameter only."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    params = [Parameter(torch.ones(500)), Parameter(torch.ones(300, dtype=torch.bfloat16))]

    def build_with(mode):
        groups = [{"params": params[:1]}, {"params": params[1:], "master_weights": mode}]
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, shard="tensor")

    opt = build_with("remainder")
    assert [piece.param for piece in opt.layout.pieces(0)] == [0]
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    opt.consolidate_state_dict()
    box = [opt.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    logging.getLogger("shardstep").addHandler(handler)
    build_with(None).load_state_dict(box[0])
    logging.getLogger("shardstep").removeHandler(handler)
    return messages


def test_masters_that_are_left_out_are_told_if_rank_0_owns_none_of_them():
    told = [message for found in run_ranks(_told, 3) for message in found]
    assert len(told) == 1
    assert "keeps none for parameter 1" in told[0]


def _partly_loaded(rank, world, mode, path):
    """A checkpoint of DCP without masters, into an optimizer with them."""
    model = make_model()
    opt = build(model, None)
    train(model, opt, range(3))
    dcp.save({"optim": opt.sharded_state_dict(model)}, checkpoint_id=path)
    other = make_model()
    other.load_state_dict(model.state_dict())
    twin = build(other, mode)
    state = {"optim": twin.sharded_state_dict(other)}
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    twin.load_sharded_state_dict(state["optim"], other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(twin.full_state(two)["exp_avg"], opt.full_state(one)["exp_avg"].float())


@pytest.mark.parametrize("mode", KEPT)
def test_masters_that_dcp_does_not_find_begin_as_the_parameters(mode, tmp_path):
    run_ranks(_partly_loaded, 3, mode, tmp_path / "saved")


class FailsOnce(torch.optim.AdamW):
    """Raises when it has stepped, once told to."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            self.fails = False
            raise ValueError("failed as told")


def _failed(rank, world, mode):
    twins = MasterTwins(FailsOnce, mode, lr=0.01)
    twins.step(3)
    twins.opt.optim.fails = twins.plain.fails = True
    for mine, theirs in zip(twins.ours, twins.theirs, strict=True):
        mine.grad = values(mine.shape, 7, mine.dtype)
        theirs.grad = mine.grad.float()
    for optimizer in (twins.opt, twins.plain):
        # (With a closure all buckets are stepped at once, so that it fails at the same place on every rank.)
        assert "failed as told" in str(error_of(lambda optimizer=optimizer: optimizer.step(lambda: None)))
    twins.step(2)
    twins.check("after a step that failed")
    twins.opt.check_replicas()


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 3])
def test_after_an_exception_in_the_middle_of_a_step_masters_are_as_far_as_the_state(world, mode):
    run_ranks(_failed, world, mode)


def _scaled_without_gradients(rank, world):
    param = Parameter(torch.ones(30, dtype=torch.float16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, master_weights=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(opt)
    assert torch.equal(param.detach(), torch.ones(30, dtype=torch.float16))


def test_a_scaler_steps_float16_masters_without_any_gradient():
    run_ranks(_scaled_without_gradients, 2)


def _lost_around_switches(rank, world, mode):
    """Two steps that lose nothing; ``eval`` and ``train`` in between are no updates, whatever gradients lie around."""
    from schedulefree import AdamWScheduleFree

    param = Parameter(torch.ones(300, dtype=torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], AdamWScheduleFree, lr=0.5, master_weights=mode, shard="tensor")
    opt.train()
    with opt.count_lost_updates() as lost:
        for _ in range(2):
            param.grad = torch.ones_like(param)
            opt.step()
            opt.eval()
            opt.eval()
            opt.train()
    return lost.by_group


@pytest.mark.parametrize("mode", [None, torch.float32])
def test_train_and_eval_are_not_counted_as_updates(mode):
    for shares in run_ranks(_lost_around_switches, 3, mode):
        assert shares == [0.0]


def _lone(rank, world):
    """At 3 ranks each owns one of three parameters in a bucket, and the padding behind it: they begin at 64 bytes."""
    for shard in ("element", "tensor"):
        for views in (False, True):
            sharded = {"shard": shard, "parameters_as_bucket_view": views}
            twins = MasterTwins(torch.optim.AdamW, KEPT, shapes=[(17,)] * 3, sharded=sharded, lr=0.01)
            twins.step(3)
            twins.check(f"{shard} {views=}")
            twins.ours[0].data.mul_(2)
            changed = twins.opt.full_state(twins.ours[0])["master_weight"]
            assert torch.equal(changed, twins.ours[0].detach().float())
            twins.theirs[0].data.copy_(changed)
            twins.step(2)
            twins.check(f"{shard} {views=}, changed")


@pytest.mark.parametrize("world", [1, 3])
def test_masters_of_a_parameter_that_is_alone_in_a_padded_shard(world):
    run_ranks(_lone, world)


def _misshapen(rank, world, form):
    """Only the owner of a parameter has use for its master, so only it can see that it does not fit."""
    params = [Parameter(torch.ones(300, dtype=torch.bfloat16)) for _ in range(2)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1, master_weights=torch.float32, shard="tensor")
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    opt.consolidate_state_dict()
    box = [opt.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    before = [opt.full_state(param) for param in params]
    box[0]["state"][1]["master_weight"] = {"another shape": torch.ones(299), "no tensor": 1.0}[form]
    told = str(error_of(lambda: opt.load_state_dict(box[0])))
    for param, state in zip(params, before, strict=True):
        assert torch.equal(opt.full_state(param)["master_weight"], state["master_weight"])
        assert torch.equal(opt.full_state(param)["exp_avg"], state["exp_avg"])
    return told


@pytest.mark.parametrize("form", ["another shape", "no tensor"])
def test_a_loaded_master_that_does_not_fit_is_an_error_on_all_and_changes_nothing(form):
    for text in run_ranks(_misshapen, 3, form, fresh=True, pg_timeout=20):
        assert "the master_weight of parameter 1 expects a tensor" in text, text


def _scaled_without_masters(rank, world):
    """Of two groups in float16 one has masters: the other's gradients would be divided in float16."""
    params = [Parameter(torch.ones(30, dtype=torch.float16)) for _ in range(2)]
    groups = [{"params": params[:1], "master_weights": torch.float32}, {"params": params[1:]}]
    opt = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale((params[0] + params[1]).float().sum() * 2.0**-26).backward()
    error = error_of(lambda: scaler.step(opt))
    assert isinstance(error, ValueError)
    assert "parameter 1 has none" in str(error)
    assert all(torch.equal(param.detach(), torch.ones_like(param)) for param in params)
    assert all(torch.equal(param.grad, torch.full_like(param, 2.0**-10)) for param in params)


def test_a_scaler_refuses_float16_parameters_without_masters_beside_some_that_have_them():
    run_ranks(_scaled_without_masters, 2)


def _lost_of_sparse_gradients(rank, world):
    """Of 20 rows two have a gradient: one moves, one by too little."""
    table = torch.nn.Embedding.from_pretrained(torch.ones(20, 4, dtype=torch.bfloat16), freeze=False, sparse=True)
    opt = ZeroRedundancyOptimizer(table.parameters(), torch.optim.SGD, lr=1.0, shard="tensor")
    push = torch.tensor([[10 * SPACING], [SPACING / 10]], dtype=torch.bfloat16)
    (table(torch.tensor([3, 5])) * push).sum().backward()
    assert table.weight.grad.is_sparse
    with opt.count_lost_updates() as lost:
        opt.step()
    return lost.by_group


def test_lost_updates_of_sparse_gradients_are_counted():
    for shares in run_ranks(_lost_of_sparse_gradients, 2):
        assert shares == [pytest.approx(1 / 20)]


def _graph_before_a_step(rank, world, mode):
    """A graph from before a step needs a parameter that was frozen then: like others that the step leaves alone."""
    trained, frozen = (Parameter(torch.ones(30, dtype=torch.bfloat16)) for _ in range(2))
    opt = ZeroRedundancyOptimizer([trained, frozen], torch.optim.SGD, lr=0.5, master_weights=mode)
    inputs = torch.ones(30, dtype=torch.bfloat16, requires_grad=True)
    frozen.requires_grad_(False)
    losses = [(inputs * param).sum() for param in (frozen, trained)]
    trained.grad = torch.ones_like(trained)
    opt.step()
    losses[0].backward()
    assert "modified by an inplace operation" in str(error_of(losses[1].backward))  # the negative control


@pytest.mark.parametrize("mode", [None, *KEPT, "stochastic"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_leaves_frozen_parameters_to_graphs_that_need_them(world, mode):
    run_ranks(_graph_before_a_step, world, mode)


def _pickled(rank, world, mode):
    params = [Parameter(values((100,), i, torch.bfloat16)) for i in range(200)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, master_weights=mode)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    return len(pickle.dumps((params, opt)))


def test_a_pickled_optimizer_has_no_scratch_memory():
    """Pickle writes the whole memory behind every view. (Without masters: 0.4 MB; the masters themselves: 17 MB.)"""
    for mode, most in (("remainder", 3), ("stochastic", 3), (torch.float32, 22)):
        assert run_ranks(_pickled, 1, mode)[0] < most * 2**20, mode
