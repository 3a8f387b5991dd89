"""Short messages between the ranks of a host: in order, in time, and an error at once if a rank is gone."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch.distributed as dist

from shardstep.comm import host_channel
from shardstep.comm.host_channel import HostChannel, open_channel
from shardstep.comm.process_group import open_group
from shardstep.comm.topology import Topology, find_topology
from tests.harness import run_ranks


def connect(path: str = "/dev/shm/shardstep-test-channel") -> tuple[HostChannel, Topology]:
    group = open_group(None)
    topology = find_topology(group)
    channel = open_channel(group, topology, f"{path}-{os.getppid()}", "secret")
    assert channel is not None
    return channel, topology


def _talk(rank: int, world_size: int) -> list[str]:
    channel, _ = connect()
    late = random.Random(rank)
    waiting = []
    for number in range(200):
        time.sleep(late.choice([0, 0, 0, 0.001]))
        waiting.append((number, channel.share(f"{rank}:{number}".encode())))
        while len(waiting) > late.randrange(5):  # some ranks are ahead by a few messages
            asked, shared = waiting.pop(0)
            shared.wait()
            assert shared.messages == [f"{other}:{asked}".encode() for other in range(world_size)]
    for asked, shared in reversed(waiting):  # and not always in order
        shared.wait()
        assert shared.messages[rank] == f"{rank}:{asked}".encode()
    return [name for name in os.listdir("/dev/shm") if name.startswith("shardstep-test-channel")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_nth_message_of_a_rank_meets_the_nth_of_the_others(world_size):
    assert run_ranks(_talk, world_size) == [[]] * world_size  # and no name is left behind


def _wait_in_a_signal_handler_too(rank: int, world_size: int) -> float:
    """The handler takes the message for which the program waits below it."""
    channel, _ = connect()
    if rank == 1:
        time.sleep(0.4)
        channel.share(b"here").wait()
        dist.barrier()
        return 0.0
    shared = channel.share(b"here")
    before = signal.signal(signal.SIGALRM, lambda *_: shared.wait())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    start = time.monotonic()
    shared.wait()
    seconds = time.monotonic() - start
    signal.signal(signal.SIGALRM, before)
    dist.barrier()
    return seconds


def test_who_waits_goes_on_if_a_signal_handler_has_taken_the_message():
    assert max(run_ranks(_wait_in_a_signal_handler_too, 2, pg_timeout=15)) < 10


def _wait_for_one_that_is_late(rank: int, world_size: int) -> None:
    channel, _ = connect()
    if rank == 1:
        dist.barrier()  # until the others have waited in vain
        channel.share(b"here").wait()
        return
    shared = channel.share(b"here")
    start = time.monotonic()
    assert not shared.wait_for(0.2)
    assert time.monotonic() - start >= 0.2
    dist.barrier()
    shared.wait()
    assert shared.messages == [b"here"] * world_size


def test_a_message_that_did_not_come_in_time_can_be_waited_for_again():
    run_ranks(_wait_for_one_that_is_late, 3)


def _leave(rank: int, world_size: int) -> str:
    channel, _ = connect()
    channel.share(b"1").wait()
    if rank == 1:
        return "left"
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        channel.share(b"2").wait()
    return "told"


def test_a_rank_that_is_gone_is_noticed_at_once():
    start = time.monotonic()
    assert run_ranks(_leave, 2, pg_timeout=60, fresh=True) == ["told", "left"]
    assert time.monotonic() - start < 50


def _cannot(rank: int, world_size: int) -> bool:
    group = open_group(None)
    path = "/nowhere/at/all" if rank == 1 else f"/dev/shm/shardstep-test-channel-{os.getppid()}"
    return open_channel(group, find_topology(group), path, "secret") is None


def test_if_one_rank_cannot_listen_nobody_has_a_channel():
    assert run_ranks(_cannot, 3) == [True] * 3


def _look_while_waiting(rank: int, world_size: int) -> None:
    host_channel._LOOK_AFTER = 0.05
    channel, _ = connect()
    looks = []
    if rank == 1:
        dist.barrier()  # until the others have looked
        channel.share(b"here").wait()
        return

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise ArithmeticError("it will not come")

    shared = channel.share(b"here")
    with pytest.raises(ArithmeticError, match="it will not come"):
        shared.wait(look)
    dist.barrier()
    shared.wait(look)  # it can be waited for again
    assert shared.messages == [b"here"] * world_size
    assert len(looks) >= 3


def test_who_waits_looks_now_and_then_and_may_give_up():
    run_ranks(_look_while_waiting, 3)
