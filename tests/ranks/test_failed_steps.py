"""Steps that fail at different places on the ranks: all are told who failed and how, soon, and nothing goes on.

A rank whose local optimizer raises leaves the step. What of it the others have updated, it has not; so parameters and
states do not fit together any more. Nobody may train, compare or collect them as if they did, and nobody may wait for
long: here the process group waits for a minute, and all of it is over in a few seconds. Two cannot be ended early, and
end with the process group's time-out: DDP's own reductions, and messages through sockets.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardstep.comm import host_channel
from shardstep.params.all_gather import BucketAllGather
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.ranks.test_masters import rounded
from tests.ranks.test_masters_modes import connect
from tests.surroundings import choose
from tests.twins import values

LONG = 60  # seconds: the time-out of the process group
SHORT = 3  # ... where that is what ends it
SOON = 15
STEPPING_HOOKS = ("hook", "scattering hook")


class Fragile(torch.optim.AdamW):
    """Raises at one of its calls, of which there is one per bucket: before it has updated that, or after."""

    calls, fails_at, fails_late = 0, 0, False

    def step(self, closure=None):
        type(self).calls += 1
        if self.calls == self.fails_at and not self.fails_late:
            raise ArithmeticError("broken on purpose")
        super().step(closure)
        if self.calls == self.fails_at:
            raise ArithmeticError("broken on purpose")


class Program:
    """Six buckets, of which every rank owns a part."""

    def __init__(self, way, mode, **options):
        torch.manual_seed(3)
        self.model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6))).to(torch.bfloat16)
        self.net, self.opt = connect(
            way,
            self.model,
            self.model.named_parameters(),
            Fragile,
            ddp={"bucket_cap_mb": 0.002},
            master_weights=mode,
            bucket_cap_mb=1500 / 2**20,
            **options,
        )
        assert len(self.opt.layout.buckets) == 6

    def iterate(self, step):
        self.opt.zero_grad()
        batch = values((4, 24), 1000 * step + dist.get_rank(), torch.bfloat16)
        self.net(batch).float().pow(2).mean().backward()
        self.opt.step()

    def outcomes(self, calls):
        """What each call ends with: its error, or nothing."""
        found = {}
        for name, call in calls.items():
            try:
                call()
                found[name] = ""
            except (ArithmeticError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found


def _differently(rank, world, way, mode, places, late, options, transport="shared memory"):
    """``places``: the call at which the optimizer of each rank raises; 0: at none."""
    choose(transport)
    host_channel._LOOK_AFTER = 0.1
    program = Program(way, mode, **options)
    saved = program.opt.state_dict()
    program.iterate(0)
    program.iterate(1)
    Fragile.fails_at, Fragile.fails_late = Fragile.calls + places[rank] if places[rank] else 0, late
    opt, param = program.opt, next(program.model.parameters())
    start = time.monotonic()
    told = program.outcomes(
        {
            "iterate": lambda: program.iterate(2),
            "check_replicas": opt.check_replicas,
            "full_state": lambda: opt.full_state(param),
            "consolidate_state_dict": opt.consolidate_state_dict,
            "load_state_dict": lambda: opt.load_state_dict(saved),
            "step": opt.step,
            "zero_grad and iterate": lambda: program.iterate(3),
        }
    )
    return told, time.monotonic() - start


COLLECTIVES = ("check_replicas", "full_state", "consolidate_state_dict", "load_state_dict")


def check_told(way, places, results):
    first = min(range(len(places)), key=lambda rank: places[rank] or 100)
    for rank, (told, seconds) in enumerate(results):
        assert seconds < SOON, told
        assert "ArithmeticError: broken on purpose" in told["iterate"], told
        if not places[rank]:
            assert f"rank {first} failed" in told["iterate"], told
        for name in COLLECTIVES:
            assert "Start the processes again, from a checkpoint" in told[name], (rank, name, told)
            assert f"rank {first} failed before, in step: ArithmeticError: broken on purpose" in told[name], told
        if way in STEPPING_HOOKS:  # the step was made in backward, and after an error in its hook DDP goes no further
            assert told["zero_grad and iterate"]
        else:
            assert "Start the processes again, from a checkpoint" in told["step"], told
            assert "Start the processes again, from a checkpoint" in told["zero_grad and iterate"], told


OTHERS = ("under ddp", "hook", "scattering hook")


@pytest.mark.parametrize("mode", [None, torch.float32])
@pytest.mark.parametrize("way", ["ddp", "sharded", *(pytest.param(way, marks=pytest.mark.extended) for way in OTHERS)])
def test_ranks_that_raise_at_different_buckets_are_all_told_and_nothing_goes_on(way, mode):
    for places, late in (((2, 5), False), ((4, 0, 2), True)):
        results = run_ranks(_differently, len(places), way, mode, places, late, {}, pg_timeout=LONG, fresh=True)
        check_told(way, places, results)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("way", "transport"),
    [("interleaved", "shared memory"), ("scattering interleaved", "shared memory"), ("sharded", "sockets")],
)
def test_what_cannot_be_ended_early_ends_with_the_time_out_on_all_ranks(way, transport):
    for told, seconds in run_ranks(
        _differently, 3, way, "remainder", (2, 5, 0), False, {}, transport, pg_timeout=SHORT, fresh=True
    ):
        assert seconds < SOON, told
        assert told["iterate"]
        assert all(told[name] for name in COLLECTIVES), told
        assert told["zero_grad and iterate"], told


@pytest.mark.extended
@pytest.mark.parametrize("options", [{"lazy_gather": True}, {"parameters_as_bucket_view": True}], ids=str)
def test_ranks_that_raise_at_different_buckets_with_lazy_gathers_and_bucket_views(options):
    for way in ("ddp", "sharded"):
        places = (2, 5, 0)
        results = run_ranks(_differently, 3, way, "remainder", places, False, options, pg_timeout=LONG, fresh=True)
        check_told(way, places, results)


def _unsendable(rank, world, way):
    """On one rank a bucket cannot be sent: there is no memory to pack it, say."""
    host_channel._LOOK_AFTER = 0.1
    program = Program(way, None)
    program.iterate(0)
    start_gather = BucketAllGather.start

    def start(gather):
        BucketAllGather.calls -= 1
        if rank == 1 and BucketAllGather.calls == 0:
            raise RuntimeError("broken on purpose")
        return start_gather(gather)

    BucketAllGather.calls, BucketAllGather.start = 3, start
    begin = time.monotonic()
    told = program.outcomes({"iterate": lambda: program.iterate(1), "check_replicas": program.opt.check_replicas})
    seconds, store = time.monotonic() - begin, dist.distributed_c10d._get_default_store()
    store.set(f"told {rank}", "")
    store.wait([f"told {other}" for other in range(world)])  # nobody hears of it by a connection that is closed
    return told, seconds


@pytest.mark.parametrize("way", ["ddp", "sharded"])
def test_a_bucket_that_a_rank_cannot_send_is_told_to_those_who_wait_for_it(way):
    for told, seconds in run_ranks(_unsendable, 3, way, pg_timeout=LONG, fresh=True):
        assert seconds < SOON, told
        assert "broken on purpose" in told["iterate"], told
        assert "Start the processes again, from a checkpoint" in told["check_replicas"], told


def _alike(rank, world, way, mode, late):
    """All ranks raise at the same bucket: the next step goes on, and ends with the same parameters everywhere."""
    program = Program(way, mode)
    program.iterate(0)
    Fragile.fails_at, Fragile.fails_late = Fragile.calls + 3, late
    opt, param = program.opt, next(program.model.parameters())
    told = program.outcomes({"iterate": lambda: program.iterate(1)})
    assert "broken on purpose" in told["iterate"]
    if not late:  # else the bucket was updated by its owners, and not sent
        opt.check_replicas()
    steps = opt.full_state(param)["step"]
    program.iterate(2)
    opt.check_replicas()
    assert opt.full_state(param)["step"] == steps + 1
    for place, one in enumerate(program.model.parameters() if mode is not None else ()):
        assert torch.equal(one.detach(), rounded(opt.full_state(one)["master_weight"], torch.bfloat16)), place


@pytest.mark.extended
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", [None, torch.float32, "remainder"])
@pytest.mark.parametrize("way", ["ddp", "sharded", "under ddp"])
def test_after_ranks_raised_at_the_same_bucket_training_goes_on_in_every_mode(way, mode, late):
    run_ranks(_alike, 3, way, mode, late, pg_timeout=20)


def _in_one_replica(rank, world):
    """Of a mesh (2, 2) the first shard group fails, at different buckets."""
    return _differently(rank, world, "ddp", torch.float32, (2, 5, 0, 0), False, {"process_group": mesh_of((2, 2))})


def test_a_shard_group_that_fails_is_told_at_once_and_the_other_replica_at_its_next_collective():
    results = run_ranks(_in_one_replica, 4, pg_timeout=LONG, fresh=True)
    for rank, (told, seconds) in enumerate(results):
        assert seconds < SOON, told
        assert bool(told["iterate"]) == (rank < 2), told
        for name in COLLECTIVES:
            assert "did not call it" in told[name] or "Start the processes again" in told[name], (rank, name, told)
            assert "ArithmeticError: broken on purpose" in told[name], (rank, name, told)


def _out_of_memory(rank, world, mode):
    """One rank has no memory for the masters of its first step."""
    host_channel._LOOK_AFTER = 0.1
    program = Program("ddp", mode)

    def allocate(*arguments):
        raise ArithmeticError("broken on purpose")

    if rank == 1:
        program.opt.engine.sharded.masters._place = allocate
    start = time.monotonic()
    told = program.outcomes({"iterate": lambda: program.iterate(0)})
    return told["iterate"], time.monotonic() - start


@pytest.mark.parametrize("mode", [torch.float32, "stochastic"])
def test_a_rank_without_memory_for_masters_is_told_to_all(mode):
    for rank, (told, seconds) in enumerate(run_ranks(_out_of_memory, 3, mode, pg_timeout=LONG, fresh=True)):
        assert "broken on purpose" in told, told
        assert rank == 1 or "rank 1 failed" in told, told
        assert seconds < SOON
