"""Checkpoints and state dicts of what is on a device: the same values as on the CPU, whoever writes meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.checkpoint.adapter import ShardedAdapter, adapter_of
from shardstep.checkpoint.contribution import Contribution, contribution_of
from shardstep.checkpoint.snapshot import Snapshot
from shardstep.checkpoint.storage import reader, writer
from shardstep.layout.boxes import Box
from shardstep.state.shard import Part, StateShard
from tests.accelerator import simulated
from tests.accelerator.devices import (
    DEVICE,
    device,
    host_reads,
    on_device,
    own_reads,
    run_ranks,
    same,
    simulation_only,
    sizes,
)
from tests.accelerator.simulated import Entry, Log
from tests.accelerator.timeline import Timeline
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model, train_plainly

STEPS = 2  # before the save; and as many after it
SUMMED_OTHERWISE = 1e-12  # gradients are added up rank by rank, and in one process by autograd


def _build(model: torch.nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    kind, options = OPTIMIZERS["AdamW"]
    return ZeroRedundancyOptimizer(model.parameters(), kind, **options, **settings)


def _train(model: torch.nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().cpu().clone() for param in model.parameters()]


def _set_window(window: int | None) -> None:
    """Let a tensor be many windows, and a buffer a few tensors."""
    if window is not None:
        writer.WINDOW_BYTES = reader.WINDOW_BYTES = window


@on_device
def _save(rank: int, world: int, folder: str, asynchronous: bool, window: int | None = None) -> Any:
    _set_window(window)
    model = small_model().to(DEVICE)
    optimizer = _build(model, shard_gradients=True)
    _train(model, optimizer, rank, range(STEPS))
    extra = {"random": torch.arange(5, device=DEVICE), "nested": {"mean": (torch.ones(3, device=DEVICE), 2)}}
    handle = checkpoint.save(folder, optimizer, model=model, extra=extra, asynchronous=asynchronous)
    _train(model, optimizer, rank, range(STEPS, 2 * STEPS))  # while it is written, if it is
    extra["random"].zero_()
    handle.wait()
    return _weights(model)


@on_device
def _load(rank: int, world: int, folder: str, place: str, parts: int, window: int | None = None) -> Any:
    _set_window(window)
    model = small_model().to(place)
    optimizer = _build(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    extra = checkpoint.load(folder, optimizer, model=model)
    loaded = _weights(model)
    optimizer.consolidate_state_dict(to=world - 1)
    state = optimizer.state_dict()["state"]
    for step in range(STEPS, 2 * STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, step, part) for part in range(parts)).div(parts).backward()  # type: ignore[union-attr]
        optimizer.step()
    return loaded, state, extra, _weights(model)


def _check_loaded(folder: Path, saved_at: int, world: int, place: str, window: int | None = None) -> None:
    before, state = train_plainly("AdamW", STEPS, range(saved_at))
    after, _ = train_plainly("AdamW", 2 * STEPS, range(saved_at))
    results = run_ranks(_load, world, str(folder), place, saved_at, window)
    for loaded, _, extra, weights in results:
        same(loaded, before, SUMMED_OTHERWISE)
        same(weights, after, SUMMED_OTHERWISE)
        assert extra["random"].tolist() == [0, 1, 2, 3, 4]
        assert extra["nested"]["mean"][0].tolist() == [1, 1, 1]
    found = results[-1][1]
    assert found.keys() == state["state"].keys()
    for index, entry in state["state"].items():
        same([found[index][key] for key in entry], list(entry.values()), SUMMED_OTHERWISE)


@pytest.mark.parametrize("world", sizes())
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_on_a_device_is_what_was_there_when_save_was_called(
    world: int, asynchronous: bool, tmp_path: Path
) -> None:
    """Steps right after an asynchronous save do not change what is written, and train as if nothing was saved."""
    after, _ = train_plainly("AdamW", 2 * STEPS, range(world))
    for weights in run_ranks(_save, world, str(tmp_path / "c"), asynchronous):
        same(weights, after, SUMMED_OTHERWISE)
    checkpoint.verify(tmp_path / "c")
    _check_loaded(tmp_path / "c", world, world, DEVICE)


@pytest.mark.parametrize(("saved_at", "world", "place"), [(3, 2, DEVICE), (1, 3, DEVICE), (2, 1, "cpu")])
def test_a_checkpoint_of_a_device_loads_at_another_number_of_ranks(
    saved_at: int, world: int, place: str, tmp_path: Path
) -> None:
    run_ranks(_save, saved_at, str(tmp_path / "c"), True)
    _check_loaded(tmp_path / "c", saved_at, world, place)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_that_pass_through_many_small_buffers_are_whole(asynchronous: bool, tmp_path: Path) -> None:
    run_ranks(_save, 1, str(tmp_path / "c"), asynchronous, 256)
    _check_loaded(tmp_path / "c", 1, 1, DEVICE, 256)


def _stage(optimizer: Any, model: torch.nn.Module | None) -> Contribution:
    """As an asynchronous save does, without the rest of it."""
    adapted = adapter_of(optimizer)
    contribution = contribution_of(adapted, model, None)
    contribution.stage(adapted.hold_state)
    return contribution


@on_device
def _save_in_background(rank: int, world: int, unguarded: str = "") -> list[str]:
    """Where the call that saves made the host wait. ``unguarded``: what nobody waits for."""
    if unguarded == "model":
        Snapshot.hold_back = lambda self: None  # type: ignore[method-assign]
    if unguarded == "state":
        ShardedAdapter.hold_state = lambda self, copies: None  # type: ignore[method-assign]
    model = _WithBuffers().to(DEVICE)
    optimizer = _build(model)
    _train(model, optimizer, 0, range(STEPS))
    with host_reads() as reads:
        copies = _stage(optimizer, None if unguarded == "state" else model)
    _train(model, optimizer, 0, range(STEPS, 2 * STEPS))
    del copies
    return [str(read) for read in reads]


class _WithBuffers(torch.nn.Module):
    """Its forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()
        self.register_buffer("mean", torch.zeros(7, dtype=torch.float64))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(data.mean(0), alpha=0.1)
        return self.net(data - self.mean)


def test_an_asynchronous_save_does_not_make_the_host_wait_for_the_device() -> None:
    assert run_ranks(_save_in_background, 1) == [[]]


@simulation_only
@pytest.mark.parametrize("unguarded", ["model", "state"])
def test_whoever_would_not_wait_for_the_copies_is_caught(unguarded: str) -> None:
    """The negative controls of the tests above: what is still copied is written by forward, or by the next step."""
    with pytest.raises(AssertionError, match="A race on the simulated device"):
        run_ranks(_save_in_background, 1, unguarded)


@on_device
def _trace_after_a_save(rank: int, world: int, saves_model: bool) -> Log:
    model = _WithBuffers().to(DEVICE)
    optimizer = _build(model, shard_gradients=True)
    _train(model, optimizer, rank, range(STEPS))
    optimizer.zero_grad()
    with simulated.tracing() as log:
        copies = _stage(optimizer, model if saves_model else None)
        simulated.mark("forward")
        loss = loss_of(model, STEPS, rank)
        loss.backward()
        simulated.mark("step")
        optimizer.step()
        simulated.mark("end")
    del copies
    return log


@simulation_only
@pytest.mark.parametrize("saves_model", [False, True])
def test_forward_and_backward_run_while_the_state_is_copied_and_the_step_waits(saves_model: bool) -> None:
    logs = run_ranks(_trace_after_a_save, 2, saves_model)
    of_model = len(list(small_model().parameters()))

    def duration(entry: Entry) -> float:
        return 50.0 if "snapshot.py" in entry.line else 1.0

    for rank in range(2):
        timeline = Timeline(logs, duration, launching=0.0)
        copies = [one for one in timeline.of(rank, kind="copy") if "snapshot.py" in one.line]
        computed = timeline.of(rank, kind="kernel", stream="default", between=("forward", "step"))
        updated = timeline.of(rank, kind="kernel", stream="default", between=("step", "end"))
        first = computed[0].start
        early = [one for one in copies if one.end <= first]  # of the model: parameters, and of rank 0 the buffer
        assert bool(early) == saves_model
        assert len(early) <= of_model + 1
        assert computed[-1].end <= copies[-1].start < updated[0].start, "forward and backward run beside the rest"
        assert updated[0].start >= copies[-1].end, "which the step waits for"


@on_device
def _change_the_state_after_a_save(rank: int, world: int, how: str) -> Any:
    """Whoever asks for the state may write to it: the copies come first. (Else that is a race.)"""
    model = small_model().to(DEVICE)
    optimizer = _build(model)
    _train(model, optimizer, 0, range(STEPS))
    before = optimizer.sharded_state_dict()
    copies = _stage(optimizer, None)
    if how == "state":
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].zero_()
    elif how == "values":
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()
    elif how == "sharded_state_dict":
        for entry in optimizer.sharded_state_dict()["state"].values():
            entry["exp_avg"].local.zero_()
    else:
        optimizer.load_sharded_state_dict(before)
        _train(model, optimizer, 0, range(1))
    assert copies.snapshot is not None
    copies.snapshot.wait_for_all()
    return [entry["exp_avg"].local.clone() for entry in copies.form["optim"]["state"].values()]


@pytest.mark.parametrize("how", ["state", "values", "sharded_state_dict", "load"])
def test_who_writes_to_the_state_after_an_asynchronous_save_does_not_change_what_is_saved(how: str) -> None:
    _, state = train_plainly("AdamW", STEPS)
    expected = [entry["exp_avg"].view(-1) for entry in state["state"].values()]
    for found in run_ranks(_change_the_state_after_a_save, 1, how):
        same([one.view(-1) for one in found], expected)


class _Scattered(torch.optim.SGD):
    """Whose state does not fill its memory."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                memory = torch.full((param.numel(), 2), 3.0, device=param.device)
                self.state[param]["scattered"] = memory[:, 0].view(param.shape)


@on_device
def _forget_the_state_after_a_save(rank: int, world: int) -> Any:
    """And write to what may be its memory."""
    params = [torch.nn.Parameter(torch.zeros(64, 8, device=device())) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(params, _Scattered, shard="tensor", lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    copies = _stage(optimizer, None)
    optimizer.state.clear()
    others = [torch.zeros(64 * 8, 2, device=device()) for _ in range(4)]
    assert copies.snapshot is not None
    copies.snapshot.wait_for_all()
    del others
    return [entry["scattered"].local.clone() for entry in copies.form["optim"]["state"].values()]


def test_state_that_does_not_fill_its_memory_is_held_until_it_is_copied() -> None:
    for found in run_ranks(_forget_the_state_after_a_save, 1):
        same(found, [torch.full((64, 8), 3.0)] * 2)


@on_device
def _replay_a_step_after_a_save(rank: int, world: int, asks: bool = True) -> None:
    """The kernels of a step that was captured come without a call of ours: here, by the local optimizer's own step."""
    if not asks:
        del torch.get_device_module(DEVICE).is_current_stream_capturing
    params = [torch.nn.Parameter(torch.zeros(64, device=device())) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=torch.tensor(0.1), capturable=True, foreach=True)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(3):
        optimizer.step()
    with simulated.captured() as forbidden:
        optimizer.step()
    assert forbidden == []
    copies = _stage(optimizer, None)
    optimizer.engine.source.bind(optimizer.engine.sharded.plan.active_buckets)
    optimizer.optim.step()
    del copies


@simulation_only
def test_a_captured_step_that_is_replayed_after_an_asynchronous_save_comes_after_the_copies() -> None:
    run_ranks(_replay_a_step_after_a_save, 1)


@simulation_only
def test_a_replayed_step_that_would_not_wait_for_the_copies_is_caught() -> None:
    """The negative control of the test above."""
    with pytest.raises(AssertionError, match="A race on the simulated device"):
        run_ranks(_replay_a_step_after_a_save, 1, False)


@on_device
def _save_often(rank: int, world: int, folder: str) -> list[int]:
    """How many streams there are, after each save and load."""
    model = small_model().to(DEVICE)
    optimizer = _build(model)
    counts = []
    for step in range(4):
        _train(model, optimizer, 0, range(step, step + 1))
        checkpoint.save(f"{folder}/{step}", optimizer, model=model, asynchronous=step % 2 == 0).wait()
        checkpoint.load(f"{folder}/{step}", optimizer, model=model)
        counts.append(len(simulated.build().stream_names()))
    return counts


@simulation_only
def test_every_save_and_load_has_the_same_stream(tmp_path: Path) -> None:
    """CUDA has 32, and hands them out in turn: copies would soon stand before the gathers of a step."""
    for counts in run_ranks(_save_often, 2, str(tmp_path)):
        assert len(set(counts)) == 1, counts


@on_device
def _trace_a_save(rank: int, world: int, folder: str) -> Any:
    _set_window(256)
    model = small_model().to(DEVICE)
    kind, options = OPTIMIZERS[
        "SGD"
    ]  # whose state is all on the device: a buffer of counters from the CPU is not copied
    optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    _train(model, optimizer, 0, range(STEPS))
    with simulated.tracing() as log:
        checkpoint.save(folder, optimizer, model=model)
    return log


@simulation_only
def test_a_buffer_is_copied_while_the_one_before_it_is_written(tmp_path: Path) -> None:
    intervals = Timeline(run_ranks(_trace_a_save, 1, str(tmp_path / "c"))).intervals
    copies = [one for one in intervals if one.kind == "copy" and "host_copies" in one.line]
    waits = [one for one in intervals if one.kind == "host waits" and "streams.py" in one.line]
    assert len(waits) > 5
    for wait in waits[:-1]:  # when the host goes on to write a buffer, copies to the other one are launched already
        assert any(copy.at < wait.at and copy.end > wait.end for copy in copies)


@on_device
def _consolidate(rank: int, world: int, chunk_mb: float) -> Any:
    model = small_model().to(DEVICE)
    optimizer = _build(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=world - 1, chunk_mb=chunk_mb)
    plain = optimizer.state_dict()
    whole = [optimizer.full_state(param)["exp_avg"] for param in model.parameters()]
    again = [plain]
    dist.broadcast_object_list(again, src=world - 1)
    fresh = _build(small_model().to(DEVICE))
    fresh.load_state_dict(again[0])
    places = {value.device for entry in fresh.optim.state.values() for key, value in entry.items() if key != "step"}
    assert places <= {device()}
    return plain["state"], whole


@pytest.mark.parametrize("world", sizes())
@pytest.mark.parametrize("chunk_mb", [0.0005, 16])
def test_the_state_that_is_collected_from_devices_is_that_of_the_plain_optimizer(world: int, chunk_mb: float) -> None:
    _, expected = train_plainly("AdamW", STEPS)
    results = run_ranks(_consolidate, world, chunk_mb)
    found = results[-1][0]
    for index, entry in expected["state"].items():
        same([found[index][key] for key in entry], list(entry.values()))
        assert all(value.device.type == "cpu" for value in found[index].values())
    for _, whole in results:
        same(whole, [entry["exp_avg"] for entry in expected["state"].values()])


class _Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("on purpose")


@on_device
def _fail_to_stage(rank: int, world: int, of_state: bool, hold_back: bool = True) -> float:
    """The first tensor is still copied, and has no other owner, when the second leaf raises."""
    if not hold_back:
        Snapshot.hold_back = lambda self: None  # type: ignore[method-assign]

    def fail() -> None:
        values = {"first": torch.ones(4096, device=device()), "second": _Uncopyable()}
        form = {"optim": {"state": values if of_state else {}, "param_groups": []}, "extra": {} if of_state else values}
        Contribution(form).stage(lambda copies: None)

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    return torch.zeros(4096, device=device()).sum().item()  # in the memory of that copy


@pytest.mark.parametrize("of_state", [False, True])
def test_a_save_that_fails_does_not_give_away_memory_that_is_still_copied(of_state: bool) -> None:
    assert run_ranks(_fail_to_stage, 1, of_state) == [0.0]


@simulation_only
@pytest.mark.parametrize("of_state", [False, True])
def test_memory_that_is_given_away_while_it_is_copied_is_caught(of_state: bool) -> None:
    """The negative control of the test above."""
    with pytest.raises(AssertionError, match="on the simulated device"):
        run_ranks(_fail_to_stage, 1, of_state, False)


@on_device
def _save_to_a_full_disk(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    """The error, and so everything that was there when it was raised, is kept while training goes on."""
    _set_window(256)
    model = small_model().to(DEVICE)
    optimizer = _build(model)
    _train(model, optimizer, 0, range(STEPS))
    write_all, left = writer._write_all, [4]

    def write(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        write_all(*arguments)

    writer._write_all = write
    with pytest.raises(OSError, match="No space left") as kept:
        checkpoint.save(folder, optimizer, model=model)
    _train(model, optimizer, 0, range(STEPS, 2 * STEPS))
    del kept
    return _weights(model)


def test_training_goes_on_after_a_save_that_stopped_half_way(tmp_path: Path) -> None:
    expected, _ = train_plainly("AdamW", 2 * STEPS)
    for weights in run_ranks(_save_to_a_full_disk, 1, str(tmp_path / "c")):
        same(weights, expected)


class _Tied(torch.nn.Module):
    """One parameter under two names, one that is not contiguous, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(6, 6).double(), torch.nn.Linear(6, 6).double()
        self.second.weight = self.first.weight
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False).double().to(memory_format=torch.channels_last)
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(data)).sum() + self.conv.weight.sum()


def _fit(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 6, dtype=torch.float64, device=next(model.parameters()).device)).backward()
    optimizer.step()


@on_device
def _load_a_model(rank: int, world: int, folder: str, fails: bool) -> Any:
    """What a load made the host wait for, without the rest of it; the model's values before, saved, and now."""
    model = _Tied().to(device())
    optimizer = _build(model, shard_gradients=True)
    _fit(model, optimizer)
    saved = [value.cpu() for value in model.state_dict().values()]
    checkpoint.save(folder, optimizer, model=model)
    _fit(model, optimizer)
    with torch.no_grad():
        model.mean.fill_(7)
    before = [value.cpu() for value in model.state_dict().values()]
    if fails:
        type(optimizer).load_sharded_state_dict = _raise  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="on purpose"):
            checkpoint.load(folder, optimizer, model=model)
        return [], before, before, [value.cpu() for value in model.state_dict().values()]
    with host_reads() as reads:
        checkpoint.load(folder, optimizer, model=model)
    return own_reads(reads), before, saved, [value.cpu() for value in model.state_dict().values()]


def _raise(*arguments: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("world", sizes(1, 2))
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_loaded_through_pinned_memory_and_put_back_if_the_rest_fails(
    fails: bool, world: int, tmp_path: Path
) -> None:
    for reads, _, expected, loaded in run_ranks(_load_a_model, world, str(tmp_path / "c"), fails):
        same(loaded, expected)
        blocking = [read for read in reads if "copy" in read]  # (what kind of wait it is only the simulation tells)
        assert len(blocking) == (2 if DEVICE == "sim" and not fails else 0), blocking  # of the tied weight, both ways
        assert len(reads) - len(blocking) <= 4  # waits for buffers, which hold many tensors


@on_device
def _load_boxes(rank: int, world: int, folder: str) -> Any:
    """Columns of what was saved as rows: no range of memory."""
    rows = torch.arange(48.0).view(6, 8)
    dcp.save({"rows": rows}, checkpoint_id=folder)
    target = torch.zeros(6, 3, device=device())
    part = Part(Box((0, 2), (6, 3)), target)
    with host_reads() as reads:
        form = {"rows": StateShard((6, 8), [part], target)}
        dcp.load(form, storage_reader=checkpoint.Reader(folder), planner=checkpoint.SafeLoadPlanner(), no_dist=True)
    return own_reads(reads), target.cpu()


def test_a_box_that_is_no_range_of_a_file_is_loaded_through_pinned_memory(tmp_path: Path) -> None:
    for reads, found in run_ranks(_load_boxes, 1, str(tmp_path / "c")):
        same([found], [torch.arange(48.0).view(6, 8)[:, 2:5]])
        assert reads == []
