"""The contract of torch.optim.Optimizer, one claim at a time, against plain AdamW, torch's ZeRO and ours."""

from __future__ import annotations

import pytest
import torch

from tests.contract import claims
from tests.contract.subjects import SUBJECTS, new_params, owned_ranges, sharded, train, trained_oracle
from tests.harness import run_ranks

CLAIMS = [name.removeprefix("claim_") for name in vars(claims) if name.startswith("claim_")]

_EMPTY = "its state is empty until load_state_dict; the real one is in opt.optim.state"
_COPY = "a copy loses every attribute of its own, opt.optim among them"
_PARENT = "it edits the dict outside torch.optim's own method, which runs the hooks"
# Where torch's own class breaks the contract, and why.
TORCH_FAILS = {
    "defaults_are_the_full_defaults": "defaults holds only what the user typed",
    "named_parameters_keep_their_names": "(name, tensor) pairs are refused with a TypeError",
    "state_has_the_same_keys_on_every_rank": _EMPTY,
    "state_holds_the_values_of_the_plain_optimizer": _EMPTY,
    "state_holds_the_loaded_values": "after a load the state of foreign parameters is None",
    "state_moved_in_place_is_the_state_that_is_used": _EMPTY,
    "a_write_into_a_state_tensor_counts": _EMPTY,
    "state_may_be_filled_before_the_first_step": _EMPTY,
    "clearing_the_state_starts_it_anew": _EMPTY,
    "popping_the_state_of_a_parameter_starts_it_anew": _EMPTY,
    "assigning_a_new_state_starts_it_anew": _EMPTY,
    "a_step_is_profiled_once_under_the_name_of_the_class": "the local optimizer's step is profiled inside its own",
    "global_step_hooks_fire_once_per_step": "they fire for it and again for the local optimizer",
    "state_dict_hooks_fire_once_on_the_final_form": _PARENT,
    "a_state_dict_post_hook_may_replace_the_dict": _PARENT,
    "load_hooks_fire_once_around_the_load": _PARENT,
    "a_load_pre_hook_may_replace_the_dict": _PARENT,
    "a_load_post_hook_may_set_options": _PARENT,
    "an_added_group_is_trained_and_complete_at_once": "options from the inner defaults are missing until the next step",
    "the_state_dict_of_a_new_optimizer_is_empty_and_loads_back": "state_dict raises before a consolidation",
    "loading_leaves_the_callers_dict_as_it_was": "foreign entries of the caller's dict become None",
    "a_deep_copy_steps_its_own_parameters": _COPY,
    "a_deep_copy_of_model_and_optimizer_stays_tied": _COPY,
    "a_copy_before_the_first_step_is_whole": _COPY,
    "pickle_keeps_it_whole": _COPY,
    "torch_save_keeps_it_whole": _COPY,
    "hooks_and_schedulers_work_on_a_copy": _COPY,
    "dcp_gets_the_state_without_a_phantom_step": "its empty state makes DCP run a step",
    "dcp_sets_the_state_of_a_new_optimizer": "load_state_dict takes keys as positions, but those of DCP are names",
    "accelerate_prepares_and_trains_it": "prepare calls state_dict, which raises before a consolidation",
}

# Those that take a parameter of another rank.
TORCH_FAILS_WHEN_SHARDED = {
    "state_holds_the_loaded_values",
    "load_hooks_fire_once_around_the_load",
    "loading_leaves_the_callers_dict_as_it_was",
}

# Plain AdamW knows no ranks.
WORLD_SIZES = {"AdamW": (1,), "torch.ZeRO": (1, 3), "shardstep": (1, 3), "shardstep-tensor-views": (3,)}


def _cases():
    for claim in CLAIMS:
        for subject in SUBJECTS:
            for world_size in WORLD_SIZES[subject]:
                fails = claim in TORCH_FAILS and (world_size > 1 or claim not in TORCH_FAILS_WHEN_SHARDED)
                marks = []
                if subject == "torch.ZeRO" and fails:
                    marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=TORCH_FAILS[claim])]
                yield pytest.param(claim, subject, world_size, id=f"{subject}-{world_size}-{claim}", marks=marks)


@pytest.mark.parametrize(("claim", "subject", "world_size"), list(_cases()))
def test_the_optimizer_contract_is_kept(claim, subject, world_size):
    if claim.startswith("accelerate"):
        pytest.importorskip("accelerate", reason="accelerate is not in the environment of make test-torch")
    # The memory profiler reads Python's objects from C++, where a process that was used before may have left something:
    # torch's own class crashed there once.
    fresh = "profiler" in claim
    run_ranks(claims.keep, world_size, claim, subject, timeout=60, pg_timeout=30, fresh=fresh)


def test_every_expected_failure_is_a_claim():
    assert set(TORCH_FAILS) <= set(CLAIMS)
    assert set(TORCH_FAILS) >= TORCH_FAILS_WHEN_SHARDED


# --- what the contract means for a sharded optimizer --------------------------------------------------------------


def _entries_before_the_first_step(rank, world_size):
    params = new_params()
    optimizer = sharded(params)
    assert all(a is b for a, b in zip(optimizer.state, params, strict=True))
    assert len(optimizer.state) == len(params)
    assert bool(optimizer.state)
    for param in params:  # looking must not make entries
        optimizer.state.get(param)
        assert param in optimizer.state
    assert dict(optimizer.optim.state) == {}
    stranger = torch.nn.Parameter(torch.zeros(3))
    assert stranger not in optimizer.state


def test_state_has_an_empty_entry_for_every_parameter_on_every_rank_from_the_start():
    run_ranks(_entries_before_the_first_step, 3)


def _consolidate_in_a_hook(rank, world_size):
    params = new_params()
    optimizer = sharded(params)
    train(optimizer, params, range(2))
    optimizer.register_state_dict_pre_hook(lambda each: each.consolidate_state_dict(to=1))
    saved = optimizer.state_dict()
    expected = trained_oracle(2)[0].state_dict()
    assert sorted(saved["state"]) == (sorted(expected["state"]) if rank == 1 else [])


def test_a_state_dict_pre_hook_may_consolidate():
    run_ranks(_consolidate_in_a_hook, 3)


def _hooks_of_the_local_optimizer(rank, world_size):
    params = new_params()
    optimizer = sharded(params, bucket_cap_mb=0.001)
    seen = []
    optimizer.optim.register_step_pre_hook(lambda each, args, kwargs: seen.append(("pre", each)))
    optimizer.optim.register_step_post_hook(lambda each, args, kwargs: seen.append(("post", each)))
    train(optimizer, params, range(2))
    assert seen == [("pre", optimizer.optim), ("post", optimizer.optim)] * 2


def test_step_hooks_that_the_optimizer_class_registers_on_itself_fire_once_per_step():
    """Optimizers that use their own hooks exist; dropping them would be silently wrong."""
    run_ranks(_hooks_of_the_local_optimizer, 3)


def _write_after_consolidation(rank, world_size):
    params = new_params()
    optimizer = sharded(params)
    train(optimizer, params, range(2))
    optimizer.consolidate_state_dict(to=0)
    for param, entry in optimizer.state.items():
        optimizer.state[param] = {key: value * 0 for key, value in entry.items()}
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()


def test_assigning_to_state_makes_a_consolidated_state_stale():
    run_ranks(_write_after_consolidation, 3)


def _write_before_the_first_step(rank, world_size):
    params = new_params()
    optimizer = sharded(params)
    ranges = owned_ranges(optimizer, params)
    for param in ranges:
        size = ranges[param].stop - ranges[param].start
        zeros = torch.zeros(size, dtype=param.dtype)
        optimizer.state[param] = {"step": torch.tensor(5.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()


def test_state_assigned_before_the_first_step_is_not_forgotten_by_state_dict():
    run_ranks(_write_before_the_first_step, 3)
