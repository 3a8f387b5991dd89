"""Every optimizer trains as its plain self, or is refused by name."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.launch import ROOT
from tests.twins import Twins, assert_same, parameters, values
from tests.versions import Muon, needs_muon, with_muon_if_there

CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
REFUSED = {"LBFGS", "SparseAdam"}
WHOLE_ONLY = {"Adafactor", "Muon"}
TRAINED = sorted(CLASSES.keys() - REFUSED)
# Options that switch on more of a class than its defaults do.
EXTRA = {
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adagrad": {"lr_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
STEPS = 5
SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
MATRICES = [(7, 5), (4, 4), (3, 8), (11, 3)]
# A fused kernel steps the last (length modulo vector width) elements of a tensor with scalar code that rounds
# differently (a multiplication and an addition are fused or not). Where a cut is no multiple of the vector width,
# elements before it meet the scalar code, but not in the uncut tensor. One rounding per step.
FUSED_ROUNDING = {torch.float64: (1e-13, 1e-13), torch.float32: (2e-5, 2e-5)}


def _variants(cls) -> list[dict]:
    known = inspect.signature(cls).parameters
    return [{}] + [{flag: True} for flag in ("foreach", "fused") if flag in known]


def _two_groups(params):
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.02}]


def _params(name: str, dtype=torch.float64):
    return lambda: parameters(MATRICES if name == "Muon" else SHAPES, dtype)


def _groups(name: str):
    # Rprop is the one class without weight decay
    with_decay = "weight_decay" in inspect.signature(CLASSES[name]).parameters
    return _two_groups if with_decay else lambda params: [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]


def _train_class(rank, world_size, name, shards):
    cls = CLASSES[name]
    for variant in _variants(cls):
        fused = "fused" in variant
        for dtype in (torch.float64, torch.float32) if fused else (torch.float64,):
            for shard in shards:
                if shard == "element" and name in WHOLE_ONLY:
                    continue
                twins = Twins(
                    _params(name, dtype),
                    cls,
                    _groups(name),
                    name=f"{name} {variant} {shard} {dtype}",
                    sharded={"shard": shard},
                    close=FUSED_ROUNDING[dtype] if fused and shard != "tensor" else None,
                    **EXTRA.get(name, {}),
                    **variant,
                )
                twins.step(STEPS)
                twins.check(to=world_size - 1)


IN_MAKE_TEST = ("AdamW", "Adafactor", "Muon", "SGD")  # every class is in the next test, in its first variant


@pytest.mark.parametrize("name", with_muon_if_there(IN_MAKE_TEST))
def test_a_class_in_every_variant_ends_with_the_bits_of_the_plain_optimizer(name):
    run_ranks(_train_class, 3, name, ("tensor", "auto", "element"))


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in IN_MAKE_TEST])
def test_every_other_class_in_every_variant_ends_with_the_bits_of_the_plain_optimizer(name):
    run_ranks(_train_class, 3, name, ("tensor", "auto", "element"))


def _train_all(rank, world_size):
    for name in TRAINED:
        twins = Twins(_params(name), CLASSES[name], _groups(name), **EXTRA.get(name, {}))
        twins.step(STEPS)
        twins.check(to=0)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.again), 4])
def test_every_class_is_exact_at_any_number_of_ranks(world_size):
    run_ranks(_train_all, world_size)


def _fused_aligned(rank, world_size):
    for name in TRAINED:
        if "fused" not in inspect.signature(CLASSES[name]).parameters:
            continue
        for dtype in (torch.float64, torch.float32):
            twins = Twins(
                # two tensors of at least 64 * 256 elements per rank, with odd sizes
                lambda dtype=dtype: parameters([(251, 197), (64 * 256 * world_size + 3,)], dtype),
                CLASSES[name],
                name=f"{name} fused {dtype}",
                sharded={"shard": "element"},
                fused=True,
                **EXTRA.get(name, {}),
            )
            cut = [p for _, p in _cut_pieces(twins.opt)]
            assert cut, "nothing was cut"
            assert all(p.start % 64 == 0 for p in cut)
            twins.step(STEPS)
            twins.check()


def _cut_pieces(opt):
    layout = opt.layout
    return [(rank, piece) for rank in range(opt.world_size) for piece in layout.pieces(rank) if not piece.whole]


@pytest.mark.parametrize("world_size", [2, 3])
def test_fused_kernels_are_bit_equal_where_cuts_are_multiples_of_the_vector_width(world_size):
    """As the layout makes them from 64 * 256 elements per rank on; see FUSED_ROUNDING for the others."""
    run_ranks(_fused_aligned, world_size)


def _refused(rank, world_size, name):
    params = parameters(SHAPES)
    before = [p.detach().clone() for p in params]
    for shard in ("auto", "element") + (("tensor",) if name == "LBFGS" else ()):
        with pytest.raises(ValueError, match=f"{name} cannot be sharded: .+") as caught:
            ZeroRedundancyOptimizer(params, CLASSES[name], shard=shard)
        assert ("depends on the others" in str(caught.value)) == (name == "LBFGS")
        assert ("does not support dense gradients" in str(caught.value)) == (name == "SparseAdam")
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)
        assert param.grad is None


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("world_size", [1, 3])
def test_what_cannot_be_sharded_is_refused_by_name_with_a_reason(name, world_size):
    run_ranks(_refused, world_size, name)


def _sparse_adam(rank, world_size):
    """SparseAdam updates every tensor by itself: who vouches with shard='tensor' gets what the plain one does."""
    twins = Twins(lambda: parameters([(9, 4), (5, 3)]), torch.optim.SparseAdam, sharded={"shard": "tensor"}, lr=0.1)
    for step in range(3):
        for position, pair in enumerate(zip(twins.ours, twins.theirs, strict=True)):
            for param in pair:
                rows = torch.tensor([[0, 2 + step % 3]])
                param.grad = torch.sparse_coo_tensor(rows, values((2, param.shape[1]), step + position), param.shape)
        twins.opt.step()
        twins.plain.step()
    twins.check()


def test_sparse_adam_in_whole_tensors_is_exact_for_who_vouches_for_it():
    run_ranks(_sparse_adam, 3)


def _adafactor_cut(rank, world_size):
    with pytest.raises(ValueError, match=r"shard='element'.*Adafactor.*state '\w+'|parameter differs") as caught:
        ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.Adafactor, shard="element")
    text = str(caught.value)
    assert "shard='tensor'" in text
    assert any(word in text for word in ("another shape", "names of its states", "differs between whole and"))


def test_cutting_adafactor_is_an_error_that_says_what_differed():
    run_ranks(_adafactor_cut, 3)


def _caps(rank, world_size):
    outcomes = []
    for shard in ("tensor", "element"):
        for cap in (1e-6, 0.0002, 25):
            twins = Twins(
                _params("AdamW"), torch.optim.AdamW, _two_groups, sharded={"shard": shard, "bucket_cap_mb": cap}
            )
            twins.name = f"bucket_cap_mb={cap} shard={shard}"
            twins.step(STEPS)
            twins.check()
            outcomes.append(len(twins.opt.layout.buckets))
    assert outcomes[0] == outcomes[3] == len(SHAPES)  # one per parameter
    assert outcomes[2] == outcomes[5] == 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_do_not_depend_on_the_size_of_a_bucket(world_size):
    run_ranks(_caps, world_size)


# --- whole and cut parameters in one training loop ----------------------------------------------------------------


def _muon_groups(rank, world_size):
    twins = Twins(
        lambda: parameters(MATRICES),
        Muon,
        lambda p: [{"params": p[:2], "shard": "tensor"}, {"params": p[2:], "shard": "tensor", "lr": 0.05}],
        lr=0.02,
    )
    assert all("shard" not in group for group in twins.opt.param_groups + twins.opt.optim.param_groups)
    twins.step(STEPS)
    twins.check()
    matrices = Twins(lambda: parameters(MATRICES), Muon, lr=0.02)
    rest = Twins(lambda: parameters([(5,), (13,), (1,)]), torch.optim.AdamW, lr=0.1)
    for _ in range(STEPS):
        matrices.step()
        rest.step()
    matrices.check(to=world_size - 1)
    rest.check()
    assert not _cut_pieces(matrices.opt)
    assert world_size == 1 or _cut_pieces(rest.opt)


@needs_muon
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_muon_on_matrices_and_adamw_on_the_rest_in_one_loop(world_size):
    run_ranks(_muon_groups, world_size)


def _granularity_per_group(rank, world_size):
    twins = Twins(
        lambda: parameters(SHAPES),
        torch.optim.Adam,
        lambda p: [{"params": p[:2], "shard": "tensor"}, {"params": p[2:4], "shard": "element"}, {"params": p[4:]}],
    )
    whole = {spec.index for spec in twins.opt.layout.specs if spec.granularity == "tensor"}
    assert whole == {0, 1}
    assert {piece.param for _, piece in _cut_pieces(twins.opt)} <= {2, 3}
    twins.step(STEPS)
    twins.check()


def test_a_group_chooses_its_granularity():
    run_ranks(_granularity_per_group, 3)


# --- optimizers of others -----------------------------------------------------------------------------------------


def _hybrid_muon(rank, world_size):
    from pytorch_optimizer import Muon as HybridMuon

    twins = Twins(
        lambda: parameters([(6, 5), (7, 4), (5,), (13,)], torch.float32),
        HybridMuon,
        lambda p: [{"params": p[:2], "use_muon": True}, {"params": p[2:], "use_muon": False}],
    )
    kinds = [spec.granularity for spec in twins.opt.layout.specs]
    assert kinds == ["tensor", "tensor", "element", "element"]
    twins.step(STEPS)
    twins.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_muon_with_adamw_groups_is_cut_only_where_it_may_be(world_size):
    run_ranks(_hybrid_muon, world_size)


def _pytorch_optimizers(rank, world_size):
    import pytorch_optimizer

    for name, kinds in {"Lion": {"element"}, "AdaBelief": {"element"}, "Lamb": {"tensor"}}.items():
        twins = Twins(
            lambda: parameters(SHAPES),
            getattr(pytorch_optimizer, name),
            lambda p: [{"params": p[:3]}, {"params": p[3:], "lr": 0.003}],
            weight_decay=0.1,
        )
        assert {spec.granularity for spec in twins.opt.layout.specs} == kinds, name
        twins.step(STEPS)
        twins.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_lion_and_adabelief_are_cut_lamb_stays_whole_and_all_are_exact(world_size):
    run_ranks(_pytorch_optimizers, world_size)


def _schedule_free(rank, world_size, views):
    from schedulefree import AdamWScheduleFree

    twins = Twins(
        lambda: parameters(SHAPES),
        AdamWScheduleFree,
        lambda p: [{"params": p[:3]}, {"params": p[3:], "lr": 0.02}],
        sharded={"parameters_as_bucket_view": views},
        lr=0.1,
        warmup_steps=3,
    )
    for round_ in range(3):
        twins.opt.train()
        twins.plain.train()
        twins.step(2)
        twins.check(to=round_ % world_size)
        twins.opt.eval()
        twins.plain.eval()
        twins.check()  # the averaged weights, on every rank
        twins.opt.eval()  # twice in a row changes nothing
        twins.check_weights()
        with pytest.raises(Exception, match="train mode"):
            twins.opt.step()
        assert twins.opt.param_groups[1]["train_mode"] is False
    twins.opt.check_replicas()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_schedule_free_trains_and_evaluates_on_every_rank_as_the_plain_one(world_size, views):
    run_ranks(_schedule_free, world_size, views)


def _no_train(rank, world_size):
    opt = ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.Adam)
    assert not hasattr(opt, "train")
    assert not hasattr(opt, "eval")


def test_train_and_eval_exist_only_where_the_local_optimizer_has_them():
    run_ranks(_no_train, 1)


def _eight_bit(rank, world_size):
    import bitsandbytes

    twins = Twins(
        lambda: parameters([(70, 64), (33,), (67, 77), (4200,)], torch.float32), bitsandbytes.optim.AdamW8bit, lr=0.01
    )
    assert not _cut_pieces(twins.opt)
    twins.step(STEPS)
    twins.check_weights()
    for mine, theirs in zip(twins.ours, twins.theirs, strict=True):
        assert_same(twins.opt.full_state(mine), dict(twins.plain.state[theirs]), "full_state")
    first = twins.opt.full_state(twins.ours[0])
    assert first["absmax1"].numel() < first["state1"].numel() == 70 * 64  # the case this test is about
    # bitsandbytes' own state_dict() nests these entries under a key of its own; its load takes both forms
    twins.opt.consolidate_state_dict(to=0)
    full = twins.opt.state_dict()
    nested = twins.plain.state_dict()
    if rank == 0:
        twins.plain = bitsandbytes.optim.AdamW8bit(twins.theirs, lr=0.01)
        twins.plain.load_state_dict(full)
    twins.opt.load_state_dict(nested)
    twins.step(2)
    twins.check_weights()


@pytest.mark.parametrize("world_size", [2, 3])
def test_eight_bit_adamw_whose_state_has_other_shapes_is_exact(world_size):
    run_ranks(_eight_bit, world_size)


def test_the_page_about_optimizers_says_of_each_class_of_torch_what_becomes_of_it():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    rows = dict(re.findall(r"^\| (cut anywhere|kept whole|refused) \| ([^|]+) \|$", page, re.MULTILINE))
    said = {verdict: set(re.findall(r"\b[A-Z]\w+", classes)) for verdict, classes in rows.items()}
    assert said["refused"] == REFUSED
    assert said["kept whole"] == WHOLE_ONLY
    assert said["cut anywhere"] >= CLASSES.keys() - REFUSED - WHOLE_ONLY
    assert not said["cut anywhere"] & (REFUSED | WHOLE_ONLY)
