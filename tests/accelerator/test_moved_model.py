"""The model is moved after the optimizer was built: to the device, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices
from tests.accelerator.devices import DEVICE, device, on_device, run_ranks, same, simulation_only, sizes
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model, train_plainly

WORLDS = sizes(1, 2, 3)
# By step: where the model is. It starts on the CPU, where the optimizer is built.
JOURNEYS = {
    "before there is state": ["device", "device", "device"],
    "with state": ["cpu", "cpu", "device", "device"],
    "there and back": ["device", "cpu", "device", "second", "cpu"],
}
# Sums of three or more ranks have another order than the oracle's mean, and the device's backend chooses its own: some
# roundings of float64 in numbers of the order of 1, over at most five steps.
SUMMED_OTHERWISE = 1e-12


def _place(name: str, world: int) -> torch.device:
    """Of a journey. Where GPUs are too few for a second one, the model stays on the first."""
    if name == "cpu":
        return torch.device("cpu")
    return devices.second_device() if name == "second" and devices.has_two(world) else device()


def _build(name: str, model: torch.nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    kind, options = OPTIMIZERS[name]
    # Buckets of a few parameters each, so that some are cut, some are whole, and ranks own something of each.
    return ZeroRedundancyOptimizer(model.parameters(), kind, bucket_cap_mb=1e-3, **settings, **options)


def _outcome(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> tuple[list[Tensor], dict[str, Any]]:
    optimizer.check_replicas()
    optimizer.consolidate_state_dict(to=0)
    return [param.detach().cpu() for param in model.parameters()], optimizer.state_dict()


def _places_of_state(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> set[tuple[str, str]]:
    """Kinds of state, and where they are: "device" is the one of this rank."""
    return {
        (key, "device" if value.device == device() else str(value.device))
        for param in model.parameters()
        for key, value in optimizer.state[param].items()
        if isinstance(value, Tensor)
    }


@on_device
def _train(rank: int, world: int, name: str, journey: list[str], views: bool) -> Any:
    model = small_model()
    params = list(model.parameters())
    optimizer = _build(name, model, parameters_as_bucket_view=views)
    for step, place in enumerate(_place(stop, world) for stop in journey):
        model.to(place)
        optimizer.zero_grad()
        loss_of(model, step).backward()  # the same on every rank, as DDP leaves gradients
        optimizer.step()
        assert {param.device for param in params} == {place}
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        assert optimizer.engine.sharded.shares_memory == (world > 1 and place.type == "cpu")
    return _outcome(model, optimizer), _places_of_state(model, optimizer)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("journey", list(JOURNEYS))
def test_a_moved_model_trains_on_with_the_bits_of_the_plain_optimizer(
    world: int, views: bool, name: str, journey: str
) -> None:
    steps = JOURNEYS[journey]
    results = run_ranks(_train, world, name, steps, views)
    expected, state = train_plainly(name, len(steps))
    for (weights, _), _ in results:
        same(weights, expected)
    got = results[0][0][1]["state"]
    for index, entry in state["state"].items():
        tensors = [key for key in entry if isinstance(entry[key], Tensor)]
        same([got[index][key] for key in tensors], [entry[key] for key in tensors])
    last = steps[-1]
    homes = {"AdamW": {("exp_avg", last), ("exp_avg_sq", last), ("step", "cpu")}, "SGD": {("momentum_buffer", last)}}
    assert set().union(*(places for _, places in results)) == homes[name]


# --- sharded gradients ------------------------------------------------------------------------------------------------


@on_device
def _train_sharded(rank: int, world: int, journey: list[str], views: bool, when: str) -> Any:
    model = small_model()
    optimizer = _build("AdamW", model, shard_gradients=True, parameters_as_bucket_view=views)
    for step, place in enumerate(_place(stop, world) for stop in journey):
        if when == "before backward":
            model.to(place)
        optimizer.zero_grad()
        with optimizer.no_sync():
            (loss_of(model, step, rank) / 2).backward()
        if when == "between backwards":
            model.to(place)
        (loss_of(model, step, rank) / 2).backward()
        if when == "before step":
            model.to(place)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # asks every gradient
        assert norm.isfinite()
        assert norm.device == next(model.parameters()).device
        optimizer.step()
        if when == "before zero_grad":
            model.to(place)
        for param in model.parameters():
            assert optimizer.full_grad(param).device == param.device  # type: ignore[union-attr]
    return _outcome(model, optimizer), optimizer.memory()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("when", ["before backward", "between backwards", "before step", "before zero_grad"])
@pytest.mark.parametrize("journey", list(JOURNEYS))
def test_sharded_gradients_follow_a_moved_model(world: int, views: bool, when: str, journey: str) -> None:
    steps = JOURNEYS[journey]
    results = run_ranks(_train_sharded, world, steps, views, when)
    expected, _ = train_plainly("AdamW", len(steps), range(world))
    whole = sum(param.numel() * 8 for param in expected)
    for (weights, _), memory in results:
        same(weights, expected, SUMMED_OTHERWISE)
        assert memory.gradients < whole / world + 64 * 8 * 6  # its share, and padding


@on_device
def _clear_elsewhere(rank: int, world: int) -> list[Tensor]:
    """What stood for the gradients moves with the model, comes off its parameters there, and is wanted back here."""
    model = small_model()
    optimizer = _build("AdamW", model, shard_gradients=True)
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
        model.to(device())
        optimizer.zero_grad()
        model.to("cpu")
    return _outcome(model, optimizer)[0]


def test_gradients_that_were_cleared_elsewhere_are_collected_where_the_model_is_now() -> None:
    expected, _ = train_plainly("AdamW", 3, range(2))
    for weights in run_ranks(_clear_elsewhere, 2):
        same(weights, expected, SUMMED_OTHERWISE)


@on_device
def _train_without_a_group(rank: int, world: int) -> Any:
    dist.destroy_process_group()
    outcomes = []
    for settings in ({}, {"shard_gradients": True}, {"parameters_as_bucket_view": True}):
        model = small_model()
        optimizer = _build("AdamW", model, **settings)
        for step, place in enumerate(_place(stop, 1) for stop in JOURNEYS["there and back"]):
            model.to(place)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        outcomes.append(_outcome(model, optimizer)[0])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness leaves
    return outcomes


def test_a_model_is_moved_in_a_process_without_a_group() -> None:
    ((*outcomes,),) = run_ranks(_train_without_a_group, 1)
    expected, _ = train_plainly("AdamW", 5)
    assert len(outcomes) == 3
    for weights in outcomes:
        same(weights, expected)


# --- loading before the move ------------------------------------------------------------------------------------------


@on_device
def _load_then_move(rank: int, world: int, way: str, folder: str) -> Any:
    from shardstep import checkpoint

    before = small_model()
    optimizer = _build("AdamW", before)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(before, step).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states, src=0)
    checkpoint.save(folder, optimizer, model=before)

    model = small_model()
    optimizer = _build("AdamW", model, parameters_as_bucket_view=way == "checkpoint.load")
    if way == "checkpoint.load":
        checkpoint.load(folder, optimizer, model=model)
        model.to(device())
    else:
        model.load_state_dict(before.state_dict())
        if way == "load_state_dict":
            optimizer.load_state_dict(states[0])
        model.to(device())
        if way == "load_state_dict after the move":
            optimizer.load_state_dict(states[0])
    for step in range(2, 4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return _outcome(model, optimizer), _places_of_state(model, optimizer)


@pytest.mark.parametrize("world", sizes(1, 3))
@pytest.mark.parametrize("way", ["load_state_dict", "checkpoint.load", "load_state_dict after the move"])
def test_what_was_loaded_before_the_move_moves_along(world: int, way: str, tmp_path: Any) -> None:
    results = run_ranks(_load_then_move, world, way, str(tmp_path / "saved"))
    expected, _ = train_plainly("AdamW", 4)
    for (weights, _), places in results:
        same(weights, expected)
        assert places <= {("exp_avg", "device"), ("exp_avg_sq", "device"), ("step", "cpu")}


# --- where state belongs ----------------------------------------------------------------------------------------------


@on_device
def _move_capturable(rank: int, world: int) -> Any:
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, fused=True)
    for place in ("cpu", device()):
        model.to(place)
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()
    return _places_of_state(model, optimizer)


def test_a_step_counter_moves_along_if_the_optimizer_keeps_it_beside_the_parameter() -> None:
    (places,) = run_ranks(_move_capturable, 1)
    assert ("step", "device") in places
    assert not any(place == "cpu" for _, place in places)


# --- what is refused --------------------------------------------------------------------------------------------------


def _error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@on_device
def _move_one_rank(rank: int, world: int, shard_gradients: bool) -> str:
    model = small_model()
    optimizer = _build("AdamW", model, shard_gradients=shard_gradients)

    def iterate() -> None:
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()

    iterate()
    if rank == 1:
        model.to(device())
    return _error_of(iterate)


@pytest.mark.parametrize("shard_gradients", [False, True])
def test_a_model_that_is_moved_on_one_rank_only_is_an_error_on_all(shard_gradients: bool) -> None:
    errors = run_ranks(_move_one_rank, 2, shard_gradients, pg_timeout=4 if DEVICE == "sim" else 20)
    place = "sim:0" if DEVICE == "sim" else "cuda:1"  # of rank 1
    assert f"rank 1 waits in going on after the model was moved (the parameters are on {place} now" in errors[0]
    assert "expects a call on every rank of the group, but rank 0 did not call it" in errors[1]


@on_device
def _move_apart(rank: int, world: int) -> list[str]:
    model = small_model()
    optimizer = _build("AdamW", model)
    model.to(device() if rank == 0 else "cpu")
    if rank == 1:
        model.to(torch.device(DEVICE, 1 - device().index))  # of the other rank, on CUDA: nothing is sent from there
        model[0].to(device())
    loss = _error_of(lambda: [optimizer.zero_grad(), optimizer.step()])

    model = small_model()
    optimizer = _build("AdamW", model)
    model.to(device(), torch.float32)
    return [loss, _error_of(optimizer.step)]


def test_models_that_cannot_be_followed_are_an_error_on_every_rank_that_says_why() -> None:
    for apart, converted in run_ranks(_move_apart, 2, pg_timeout=20):
        assert "to be moved together" in apart
        assert "Spread the model over devices first" in apart
        assert "expects to stay as it was when the optimizer was built (shape (13, 7), float64)" in converted
        assert "float32" in converted


def _move_without_a_backend(rank: int, world: int) -> str:
    from tests.accelerator.simulated import load

    load()
    model = small_model()
    optimizer = _build("AdamW", model)
    model.to(device())
    return _error_of(optimizer.step)


@simulation_only  # the group of other tests serves CUDA
def test_a_device_that_the_process_group_does_not_serve_is_named() -> None:
    for error in run_ranks(_move_without_a_backend, 2):
        assert "a device that the process group serves ('cpu:gloo" in error
        assert "moved to sim" in error


# --- DDP --------------------------------------------------------------------------------------------------------------


@on_device
def _move_ddp(rank: int, world: int, mode: str) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    import shardstep

    model = small_model()
    optimizer = _build("AdamW", model, overlap_with_ddp=mode == "stepping hook")

    def wrapped() -> DistributedDataParallel:
        ddp = DistributedDataParallel(model)
        if mode == "sharded":
            shardstep.shard_ddp_gradients(ddp, optimizer)
        elif mode == "stepping hook":
            ddp.register_comm_hook(None, shardstep.hook_with_zero_step(allreduce_hook, ddp, optimizer))
        return ddp

    def iterate(ddp: DistributedDataParallel, step: int) -> None:
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()

    ddp = wrapped()
    iterate(ddp, 0)
    model.to(device())
    error = _error_of(lambda: iterate(ddp, 1))
    del ddp
    if mode != "stepping hook":  # one hook for one optimizer
        ddp = wrapped()
        for step in (1, 2):
            iterate(ddp, step)
    return error, _outcome(model, optimizer)


@pytest.mark.parametrize("mode", ["plain", "sharded", "stepping hook"])
def test_ddp_cannot_be_moved_and_says_so_and_a_model_that_is_wrapped_again_trains_on(mode: str) -> None:
    results = run_ranks(_move_ddp, 2, mode)
    expected, _ = train_plainly("AdamW", 1 if mode == "stepping hook" else 3, range(2))
    for error, (weights, _) in results:
        assert "DistributedDataParallel cannot be moved" in error
        assert "wrap it (again) afterwards" in error
        same(weights, expected, SUMMED_OTHERWISE)
