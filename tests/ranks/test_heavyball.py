"""Every optimizer of heavyball trains as its plain self, or is refused by name with what differed."""

from __future__ import annotations

import inspect

import pytest
import torch

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.twins import Twins, parameters

pytestmark = pytest.mark.optimizers

heavyball = pytest.importorskip("heavyball")

CLASSES = {
    name: cls
    for name, cls in vars(heavyball).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and not name.endswith("Base")
}
RANDOM = ["Muon", "MuonAdamW", "MuonLaProp", "Scion", "PSGDKron", "PSGDPRO", "QSGD", "LATHER"]
# SOAP and what is made of it: heavyball keeps the schedule of the preconditioner beside the state.
SCHEDULED = [name for name in CLASSES if any(part in name for part in ("SOAP", "SOLP", "Shampoo"))]
REFUSED = dict.fromkeys(RANDOM, "its steps draw random numbers .*differs by up to")
REFUSED |= dict.fromkeys(SCHEDULED, "its state dict keeps 'heavyball' beside state .*differs by up to")
REFUSED["SAMWrapper"] = "a state dict expects state and param_groups but it has 'wrapped', 'ball'"
# Built from parameters, not from groups of them, or from groups with an optimizer each.
OTHERWISE_BUILT = ["PSGDLRA", "SplitOpt"]
TRAINED = sorted(CLASSES.keys() - REFUSED.keys() - set(OTHERWISE_BUILT))
SHAPES = [(7, 5), (5,), (7, 5), (3, 2, 2), (11, 3), (1,), (66, 64)]
STEPS = 4


def _groups(params):
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.02}]


def _twins(name: str, **options) -> Twins:
    return Twins(lambda: parameters(SHAPES, torch.float32), CLASSES[name], _groups, **options)


def test_every_class_is_expected_to_train_or_to_be_refused():
    assert len(TRAINED) >= 16
    assert {"AdamW", "SFAdamW", "SGD", "LaProp", "ADOPT", "NAdam"} <= set(TRAINED)


def _train(rank, world_size, names):
    torch.compiler.set_stance("force_eager")  # compiling takes a minute per class
    for name in names:
        twins = _twins(name)
        assert {spec.granularity for spec in twins.opt.layout.specs} == {"tensor"}, name
        twins.step(STEPS)
        twins.check_weights()
        _change_places(twins, rank)
        twins.step(STEPS)
        twins.check_weights()


def _change_places(twins: Twins, rank: int) -> None:
    """The sharded optimizer's state goes into a new plain one, and the plain one's into a new sharded one."""
    twins.opt.consolidate_state_dict(to=0)
    ours, theirs = twins.opt.state_dict(), twins.plain.state_dict()
    cls = type(twins.plain)
    twins.opt = ZeroRedundancyOptimizer(_groups(twins.ours), cls, shard="tensor")
    twins.opt.load_state_dict(theirs)
    if rank == 0:
        twins.plain = cls(_groups(twins.theirs))
        twins.plain.load_state_dict(ours)


@pytest.mark.parametrize("part", range(3))
def test_what_is_not_refused_ends_with_the_bits_of_the_plain_optimizer_and_its_state_goes_on_in_the_other(part):
    run_ranks(_train, 3, TRAINED[part::3])


def _refused(rank, world_size):
    params = parameters([(24, 16), (16,)], torch.float32)
    before = [param.detach().clone() for param in params]
    for name, told in REFUSED.items():
        with pytest.raises(ValueError, match=f"^{name} cannot be sharded: .*(?i:{told})"):
            ZeroRedundancyOptimizer(params, CLASSES[name])
    with pytest.raises(ValueError, match=r"^SplitOpt cannot be sharded: .*it has 'optimizers'"):
        ZeroRedundancyOptimizer([{"params": params, "optimizer": heavyball.AdamW}], heavyball.SplitOpt)
    reasons = "its steps draw random numbers|the update of one parameter depends on the others"  # it draws when built
    with pytest.raises(ValueError, match=rf"^PSGDLRA cannot be sharded: ({reasons})"):
        ZeroRedundancyOptimizer(params, heavyball.PSGDLRA, rank=4)
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))


def test_what_would_end_with_other_weights_or_could_not_go_on_is_refused_by_name_with_what_differed():
    run_ranks(_refused, 1)


def _vouched(rank, world_size):
    torch.compiler.set_stance("force_eager")
    twins = _twins("Muon", sharded={"shard": "tensor"})
    twins.step(STEPS)
    for mine, theirs in zip(twins.ours, twins.theirs, strict=True):
        # bfloat16 within, rounded at random: as far apart as two runs of the plain optimizer are
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.01)
    twins.opt.check_replicas()
    _change_places(twins, rank)
    twins.step(STEPS)


def test_muon_trains_and_is_saved_for_who_accepts_other_random_numbers():
    run_ranks(_vouched, 3)


def _checkpointed(rank, world_size, path):
    from shardstep import checkpoint

    torch.compiler.set_stance("force_eager")

    def groups(params):
        return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]  # one rank has nothing of the first

    twins = Twins(lambda: parameters(SHAPES, torch.float32), heavyball.AdamW, groups)
    twins.step(STEPS)
    assert all("param_count" not in group for group in twins.opt.param_groups)  # it differs from rank to rank
    checkpoint.save(path, twins.opt)
    twins.opt = ZeroRedundancyOptimizer(groups(twins.ours), heavyball.AdamW)
    checkpoint.load(path, twins.opt)
    twins.step(STEPS)
    twins.check_weights()


def test_a_checkpoint_carries_states_in_dicts_with_sets(tmp_path):
    run_ranks(_checkpointed, 3, str(tmp_path / "checkpoint"))


def _compiled(rank, world_size):
    twins = _twins("AdamW")
    twins.step(STEPS)
    twins.check_weights()


def test_compiled_steps_of_other_groupings_end_with_the_same_bits():
    """The probe does not compile. What is compiled has other last bits, but the same ones in every grouping."""
    run_ranks(_compiled, 3, timeout=170, pg_timeout=170)
