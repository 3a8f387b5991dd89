"""The states of steps, iterations and hooks: what may follow what, and that anything else is an error."""

from __future__ import annotations

import pytest
import torch

from shardstep.grads.bucket_part import parts_of
from shardstep.grads.iteration import Iteration, IterationState, Round
from shardstep.layout.specs import Bucket
from shardstep.params.progress import Progress


def test_a_step_that_ended_leaves_no_failure():
    progress = Progress()
    progress.begin()
    assert progress.failure == "it did not end"
    progress.end()
    assert progress.failure == ""


def test_a_step_may_follow_one_that_failed_but_none_follows_a_failed_gather():
    progress = Progress()
    progress.begin()
    progress.fail()
    assert progress.failure == "it did not end"
    progress.begin()
    progress.break_off("gone")
    assert (progress.is_broken, progress.failure) == (True, "gone")
    with pytest.raises(AssertionError, match="BROKEN"):
        progress.begin()


def test_a_step_inside_another_one_does_not_end_it():
    progress = Progress()
    progress.begin()
    progress.begin()
    progress.end()
    assert progress.failure == "it did not end"
    progress.end()
    assert progress.failure == ""


def test_a_step_inside_of_which_one_failed_has_failed():
    progress = Progress()
    progress.begin()
    progress.begin()
    progress.fail()
    progress.end()
    assert progress.failure == "it did not end"


def test_a_step_that_was_not_begun_cannot_end():
    with pytest.raises(AssertionError, match="READY"):
        Progress().end()


def test_what_is_collected_is_stale_after_every_change():
    progress = Progress()
    progress.collected = "everything"
    progress.changed(has_state=False)
    assert progress.collected is None
    assert not progress.has_state


def test_an_iteration_stalls_and_goes_on():
    iteration = Iteration(3)
    iteration.become(IterationState.REDUCING)
    iteration.become(IterationState.STALLED)
    iteration.become(IterationState.REDUCING)
    iteration.become(IterationState.COLLECTING)
    assert not iteration.is_over


def test_an_iteration_that_is_lost_or_aborted_stays_so():
    lost, aborted = Iteration(1), Iteration(2)
    lost.arrived[0] = None  # type: ignore[assignment]
    lost.become(IterationState.LOST)
    lost.become(IterationState.REDUCING)
    assert (lost.state, lost.is_over, lost.arrived) == (IterationState.LOST, True, {})
    lost.become(IterationState.ABORTED)
    aborted.become(IterationState.ABORTED)
    for iteration in (lost, aborted):
        with pytest.raises(AssertionError, match="cannot become"):
            iteration.become(IterationState.REDUCING)


def test_an_iteration_is_open_while_its_round_has_buckets_to_send():
    iteration = Iteration(0)
    parts = [part for bucket in reversed(two_buckets()) for part in parts_of(bucket, 2, 16, torch.float32)]
    iteration.round = Round(sequence=parts, waiting=[1, 1], divisor=2)
    assert not iteration.is_open  # nobody has begun it
    iteration.become(IterationState.REDUCING)
    assert iteration.is_open
    assert [(part.bucket.position, part.number, part.is_last) for part in parts] == [
        (1, 0, True),
        (0, 0, False),  # which is larger than 16 bytes
        (0, 1, True),
    ]
    for part in parts:
        assert iteration.round.next is part
        assert iteration.round.has_sent(part.bucket.position) == (part.number > 0)
        iteration.round.mark_sent()
        assert iteration.round.has_sent(part.bucket.position)
    assert not iteration.is_open


def two_buckets() -> list[Bucket]:
    first = Bucket(0, "cpu#0", "float32", 4, (0,), (0,), (8,), 8, cuts=range(0, 9, 4))
    return [first, Bucket(1, "cpu#0", "float32", 4, (1,), (0,), (4,), 4, cuts=range(0, 5, 2))]


def test_the_next_iteration_takes_along_what_was_not_sent():
    iteration = Iteration(4, after_abort=True)
    iteration.arrived[7] = None  # type: ignore[assignment]
    iteration.fresh.add(7)
    following = iteration.continued()
    assert (following.number, set(following.arrived), following.fresh) == (5, {7}, {7})
    assert not following.after_abort
