"""The virtual clock: logs and durations give times, and the times that overlap is read from are right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import simulated
from tests.accelerator.simulated import Entry, Log, on_device
from tests.accelerator.timeline import Timeline, balanced, overlaps
from tests.harness import run_ranks

STREAMS = [(0, "default"), (1, "default"), (0, "simccl 0")]
COMPUTE, COMMUNICATE = 0, 2


def _kernel(number: int, duration: int) -> Entry:
    return Entry("kernel", COMPUTE, number, f"k{number}", duration, "", "", -1)


def _collective(order: int, duration: int, group: str = "0") -> Entry:
    return Entry("collective", COMMUNICATE, order + 1, f"c{order}", duration, "", group, order)


def _wait(waiting: int, stream: int, number: int) -> Entry:
    return Entry("wait", stream, number, "", 0, "", "", waiting)


def _host_wait(stream: int, number: int) -> Entry:
    return Entry("host waits", stream, number, "synchronize", 0, "", "", -1)


def _times(logs: list[list[Entry]], *, launching: float = 0.0) -> list[dict[str, tuple[float, float]]]:
    timeline = Timeline([Log(STREAMS, log) for log in logs], lambda entry: entry.bytes, launching=launching)
    return [{one.name: (one.start, one.end) for one in timeline.of(rank)} for rank in range(len(logs))]


def test_a_stream_runs_in_order_and_waits_for_what_it_is_told_to() -> None:
    log = [
        _kernel(1, 10),
        _wait(COMMUNICATE, COMPUTE, 1),
        _collective(0, 30),
        _kernel(2, 20),
        _wait(COMPUTE, COMMUNICATE, 1),
        _kernel(3, 5),
    ]
    (times,) = _times([log])
    assert times == {"k1": (0, 10), "c0": (10, 40), "k2": (10, 30), "k3": (40, 45)}
    timeline = Timeline([Log(STREAMS, log)], lambda entry: entry.bytes, launching=0)
    assert timeline.hidden() == pytest.approx(20 / 30)


def test_launching_takes_time_and_a_host_that_waits_launches_late() -> None:
    (times,) = _times([[_kernel(1, 10), _host_wait(COMPUTE, 1), _kernel(2, 10)]], launching=1)
    assert times == {"k1": (1, 11), "k2": (12, 22)}
    (times,) = _times([[_kernel(1, 10), _kernel(2, 10)]], launching=1)
    assert times == {"k1": (1, 11), "k2": (11, 21)}


def test_a_collective_starts_when_the_last_rank_is_ready() -> None:
    def log(duration: int) -> list[Entry]:
        wait = [_wait(COMMUNICATE, COMPUTE, 1), _collective(0, 7), _collective(1, 7), _wait(COMPUTE, COMMUNICATE, 2)]
        return [_kernel(1, duration), *wait, _kernel(2, 1)]

    fast, slow = _times([log(10), log(50)])
    assert fast["k1"] == (0, 10)
    assert fast["c0"] == slow["c0"] == (50, 57)
    assert fast["c1"] == (57, 64)
    assert fast["k2"] == slow["k2"] == (64, 65)


def test_ranks_that_would_wait_for_each_other_for_ever_are_an_error() -> None:
    def log(*groups: str) -> list[Entry]:
        return [Entry("collective", COMMUNICATE, at + 1, "c", 1, "", group, 0) for at, group in enumerate(groups)]

    _times([log("a", "b"), log("a", "b")])
    with pytest.raises(AssertionError, match="wait for each other"):
        _times([log("a", "b"), log("b", "a")])


@on_device
def _compute(rank: int, world: int, waits_at_once: bool) -> tuple[Log, list[float]]:
    data, gradients = torch.ones(4000, device="sim"), [torch.ones(4000, device="sim") for _ in range(6)]
    with simulated.tracing() as log:
        simulated.mark("start")
        works = []
        for gradient in gradients:
            data = data * 2
            works.append(dist.all_reduce(gradient, async_op=True))
            if waits_at_once:
                works[-1].wait()
        for work in works:
            work.wait()
        simulated.mark("end")
        torch._foreach_mul_(gradients, 0.5)
    return log, torch.stack(gradients)[:, 0].tolist()


def test_what_is_waited_for_at_once_is_not_hidden_and_what_is_waited_for_later_is() -> None:
    hidden = {}
    for waits_at_once in (False, True):
        results = run_ranks(_compute, 2, waits_at_once, fresh=True)
        logs = [log for log, _ in results]
        assert all(sums == [1.0] * 6 for _, sums in results)
        timeline = Timeline(logs, balanced(logs))
        hidden[waits_at_once] = timeline.hidden()
        reductions = timeline.of(kind="collective", name="all_reduce", stream="simccl", between=("start", "end"))
        products = timeline.of(kind="kernel", name="mul", between=("start", "end"))
        assert (len(reductions), len(products)) == (6, 6)
        assert overlaps(reductions[0], products[1]) == (not waits_at_once)
        assert all(one.bytes == 16000 for one in reductions)
        assert all("test_timeline.py" in one.line for one in reductions)
    assert hidden[True] == 0
    assert hidden[False] > 0.5
