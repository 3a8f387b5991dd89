"""Streams, memory and the host of the simulated device: what is in order passes, and what is not is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import simulated
from tests.accelerator.simulated import on_device
from tests.harness import run_ranks

# --- streams ----------------------------------------------------------------------------------------------------------


@on_device
def _race(rank: int, world: int) -> list[str]:
    sim = torch.get_device_module("sim")
    side, default = sim.Stream(), sim.current_stream()
    errors = []
    written = torch.ones(8, device="sim")
    with sim.stream(side), pytest.raises(RuntimeError) as raised:
        written + 1  # read after write
    errors.append(str(raised.value))
    side.wait_stream(default)
    with sim.stream(side):
        _kept = written + 1
    with pytest.raises(RuntimeError) as raised:
        written.zero_()  # write after read
    errors.append(str(raised.value))
    default.wait_stream(side)
    written.zero_()

    parts = torch.zeros(2, 64, device="sim")
    side.wait_stream(default)
    with sim.stream(side):
        parts[0].fill_(1)
    parts[1].fill_(2)  # other bytes of the same memory
    parts.t()[5:, 1].add_(1)
    with pytest.raises(RuntimeError) as raised:
        parts.sum()
    errors.append(str(raised.value))
    return errors


def test_a_read_without_a_wait_is_an_error_that_shows_both_lines() -> None:
    (errors,) = run_ranks(_race, 1, fresh=True)
    for error, (now, before) in zip(errors, [("add", "fill_"), ("zero_", "add"), ("sum", "fill_")], strict=True):
        assert "A race on the simulated device" in error
        assert error.count("test_simulated_order.py:") == 2
        assert error.count("in _race") == 2
        assert error.index(f"aten::{now} ") < error.index(f"aten::{before} ")
        assert 'stream "side 2"' in error
        assert 'stream "default"' in error


@on_device
def _a_hook_on_another_stream_is_caught(rank: int, world: int) -> None:
    sim = torch.get_device_module("sim")
    side, weight = sim.Stream(), torch.ones(4, device="sim", requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        with sim.stream(side):
            grad + 1

    weight.register_hook(hook)
    with pytest.raises(RuntimeError, match=r"(?s)A race.*in hook"):
        (weight * 3).sum().backward()


@on_device
def _copies_between_devices_are_in_order_and_each_device_has_its_streams(rank: int, world: int) -> None:
    sim = torch.get_device_module("sim")
    first = torch.ones(4, device="sim:0")
    second = first.to("sim:1", non_blocking=True) * 2  # both devices' streams are ordered by the copy
    first.zero_()
    side = sim.Stream(device="sim:1")
    with sim.stream(side), pytest.raises(RuntimeError, match=r"(?s)A race.*\"side 2\" of sim:1.*\"default\" of sim:1"):
        second + 1
    assert sim.current_device() == 0  # again
    with sim.device(1):
        assert torch.empty(1, device="sim").device.index == 1
    assert second.tolist() == [2.0] * 4


# --- lateness ---------------------------------------------------------------------------------------------------------


@on_device
def _what_a_collective_delivers_is_not_there_before_the_stream_has_waited(rank: int, world: int) -> None:
    gathering = "simccl::all_gather_into_tensor"
    mine, everyone = torch.full((3,), float(rank), device="sim"), torch.zeros(world * 3, device="sim")
    work = dist.all_gather_into_tensor(everyone, mine, async_op=True)
    with pytest.raises(RuntimeError, match=rf"(?s)A race.*aten::mul reads.*{gathering} writes"):
        everyone * 1
    with pytest.raises(RuntimeError, match=rf"(?s)A race.*aten::add writes.*{gathering} reads"):
        mine.add_(1)  # it is still being sent
    with simulated.races_ignored():
        early = everyone * 1
    work.wait()
    assert early.isnan().all().item()
    assert (everyone * 1).tolist() == [float(other) for other in range(world) for _ in range(3)]


@on_device
def _copies_to_pinned_memory_are_there_when_the_host_has_waited_and_not_before(rank: int, world: int) -> None:
    sim = torch.get_device_module("sim")
    source, target = torch.arange(4.0).pin_memory(), torch.zeros(4).pin_memory()
    assert target.is_pinned()
    assert not torch.zeros(4).is_pinned()
    with simulated.host_reads() as reads:
        data = source.to("sim", non_blocking=True)
        target.copy_(data * 2, non_blocking=True)
        event = sim.current_stream().record_event()
        assert target.isnan().all()
    assert reads == []
    event.synchronize()
    assert target.tolist() == [0.0, 2.0, 4.0, 6.0]
    late = source.to("sim", non_blocking=True)
    source.fill_(7)  # too early: the copy may not have read it
    assert late.tolist() == [7.0] * 4


@on_device
def _an_event_is_done_after_as_many_questions_as_the_seed_says(rank: int, world: int) -> None:
    for number in range(3):
        simulated.seed(number)
        torch.ones(1, device="sim")
        event, count = torch.accelerator.current_stream().record_event(), 0
        while not event.query():
            count += 1
        assert count == number


# --- host reads -------------------------------------------------------------------------------------------------------


@on_device
def _read(rank: int, world: int) -> list[tuple[str, str, str]]:
    sim = torch.get_device_module("sim")
    data = torch.ones(3, device="sim")
    with simulated.host_reads() as quiet:
        ones = torch.zeros(3, device="sim") + data * 2.0
        torch._foreach_mul_([ones, data], torch.ones((), device="sim"))
        ones.clone().view(-1)[1:].norm()
        torch.where(ones > 1, ones, data)
        sim.Stream().wait_stream(sim.current_stream())
    assert quiet == []
    with simulated.host_reads() as reads:
        data[0].item()
        data.tolist()
        data.nonzero()
        data.cpu()
        torch.zeros(3).copy_(data, non_blocking=True)  # the memory there is not pinned
        data[data > 2]
        bool(data.sum() > 2)
        torch.equal(data, ones)
        torch.tensor([1.0], device="sim")
        sim.synchronize()
        scaler = torch.amp.GradScaler("sim")
        weight = torch.ones(2, device="sim", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
    return [(read.kind, read.origin, read.line) for read in reads]


def test_whatever_makes_the_host_wait_is_counted_with_its_line() -> None:
    (reads,) = run_ranks(_read, 1, fresh=True)
    assert [kind for kind, origin, _ in reads if origin == "test"] == [
        "aten::_local_scalar_dense",
        "copy to the host",
        "aten::nonzero",
        "copy to the host",
        "copy to the host",
        "aten::nonzero",
        "aten::_local_scalar_dense",
        "aten::equal",
        "copy from the host",
        "synchronize",
    ]
    of_torch = [line for _, origin, line in reads if origin == "torch"]
    assert of_torch  # GradScaler's
    assert all("test_simulated_order.py" in line and line.endswith("in _read") for *_, line in reads)


# --- memory -----------------------------------------------------------------------------------------------------------


@on_device
def _memory_goes_back_to_its_stream_and_record_stream_holds_it(rank: int, world: int) -> None:
    sim = torch.get_device_module("sim")
    side, default = sim.Stream(), sim.current_stream()
    first = torch.zeros(1000, device="sim")
    address, held = first.data_ptr(), sim.memory_allocated()
    assert held >= 4000
    del first
    assert sim.memory_allocated() == held - 4096
    second = torch.empty(1000, device="sim")
    assert second.data_ptr() == address  # at once, in the order of the stream
    assert second.isnan().all().item()  # nothing is left of what was there
    with sim.stream(side):
        assert torch.empty(1000, device="sim").data_ptr() != address
    del second
    with sim.stream(side):
        assert torch.empty(1000, device="sim").data_ptr() != address  # it belongs to the other stream

    third = torch.ones(1000, device="sim")
    assert third.data_ptr() == address
    side.wait_stream(default)
    with sim.stream(side):
        total = third.sum()
    third.record_stream(side)
    del third
    assert sim.memory_held() == 4096
    fourth = torch.ones(1000, device="sim")
    assert fourth.data_ptr() != address  # held back
    default.wait_stream(side)
    fifth = torch.ones(1000, device="sim")
    assert fifth.data_ptr() == address
    assert (sim.memory_held(), total.item()) == (0, 1000.0)

    sim.reset_peak_memory_stats()
    before = sim.memory_allocated()
    torch.zeros(10_000, device="sim")
    assert sim.max_memory_allocated() == before + 40_448
    assert torch.accelerator.max_memory_allocated() == before + 40_448
    with simulated.tracing() as log:
        torch.zeros(10_000, device="sim")
        fresh = torch.zeros(50_000, device="sim")
    made = [one for one in log.entries if one.kind == "allocate"]
    assert [(one.bytes, one.name == "new") for one in made] == [(40_448, False), (200_192, True)]
    assert fresh.numel()
    assert "holds_it" in made[0].line
    assert log.streams[made[0].stream][1] == "default"
    assert log.kernels == {"aten::zero_": 2}


@on_device
def _free_early(rank: int, world: int, how: str) -> None:
    sim = torch.get_device_module("sim")
    side, default = sim.Stream(), sim.current_stream()
    used = torch.ones(1000, device="sim")
    side.wait_stream(default)
    with sim.stream(side):
        total = used.sum()
    if how == "resize":
        used.untyped_storage().resize_(0)
    else:
        del used
    torch.zeros(10, device="sim")
    default.wait_stream(side)
    assert total.item() == 1000


@pytest.mark.parametrize("how", ["forget", "resize"])
def test_a_missing_record_stream_is_caught(how: str) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)was freed.*_free_early.*aten::sum reads on stream \"side 2\".*_free_early"
    ):
        run_ranks(_free_early, 1, how, fresh=True)


@on_device
def _a_buffer_that_is_freed_under_a_collective_is_caught(rank: int, world: int) -> None:
    buffer = torch.ones(1000, device="sim")
    work = dist.all_reduce(buffer, async_op=True)
    del buffer  # the work holds it
    torch.ones(1000, device="sim")
    work.wait()
    buffer = torch.ones(1000, device="sim")
    work = dist.all_reduce(buffer, async_op=True)
    buffer.untyped_storage().resize_(0)  # this takes it away
    with pytest.raises(RuntimeError, match=r"(?s)was freed.*simccl::all_reduce writes"):
        torch.ones(1000, device="sim")
    work.wait()


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        (_a_hook_on_another_stream_is_caught, 1),
        (_copies_between_devices_are_in_order_and_each_device_has_its_streams, 1),
        (_what_a_collective_delivers_is_not_there_before_the_stream_has_waited, 2),
        (_copies_to_pinned_memory_are_there_when_the_host_has_waited_and_not_before, 1),
        (_memory_goes_back_to_its_stream_and_record_stream_holds_it, 1),
        (_a_buffer_that_is_freed_under_a_collective_is_caught, 2),
        (_an_event_is_done_after_as_many_questions_as_the_seed_says, 1),
    ],
)
def test_the_device_keeps_the_rule(rule: Any, ranks: int) -> None:
    run_ranks(rule, ranks, fresh=True)
