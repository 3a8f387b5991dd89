"""Finding the first fact in which ranks differ, and saying it so that a person finds it too."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstep.comm.consensus import RankConsensus, RankFailed, first_difference
from shardstep.comm.process_group import Group
from shardstep.comm.store_watch import StoreWatch


def facts(*rows):
    return [(subject, dict(fields)) for subject, fields in rows]


BASE = facts(
    ("parameter 0 ('a')", {"shape": "[2, 3]", "dtype": "float32"}),
    ("parameter 1 ('b')", {"shape": "[4]", "dtype": "float32"}),
)


def changed(position: int, **fields: str):
    copy = facts(*BASE)
    copy[position][1].update(fields)
    return copy


def test_a_different_value_is_named_with_subject_field_values_and_ranks():
    found = first_difference([([0, 2], BASE), ([1], changed(1, shape="[5]"))])
    assert (found.subject, found.field) == ("parameter 1 ('b')", "shape")
    assert found.values == {"[4]": [0, 2], "[5]": [1]}
    assert str(found) == "parameter 1 ('b'): shape is [4] on ranks 0, 2 but [5] on rank 1"


def test_three_opinions_are_all_named_lowest_rank_first():
    found = first_difference(
        [([2], changed(0, dtype="bfloat16")), ([0, 4], BASE), ([1, 3], changed(0, dtype="float64"))]
    )
    assert found.values == {"float32": [0, 4], "float64": [1, 3], "bfloat16": [2]}
    assert str(found) == (
        "parameter 0 ('a'): dtype is float32 on ranks 0, 4 but float64 on ranks 1, 3 but bfloat16 on rank 2"
    )


def test_ranks_that_agree_in_the_first_difference_are_named_together():
    """Opinions 0 and 2 differ later; in the field that is reported they say the same."""
    found = first_difference([([0], BASE), ([1], changed(0, shape="[9]")), ([2, 3], changed(1, dtype="float64"))])
    assert found.values == {"[2, 3]": [0, 2, 3], "[9]": [1]}


def test_the_first_subject_wins_over_later_ones_and_the_first_field_over_later_ones():
    other = changed(0, shape="[1]", dtype="float64")
    other[1][1]["shape"] = "[7]"
    found = first_difference([([0], BASE), ([1], other)])
    assert (found.subject, found.field) == ("parameter 0 ('a')", "shape")


@pytest.mark.parametrize("longer", [0, 1])
def test_more_facts_on_one_rank_are_named_as_absent_on_the_other(longer):
    more = [*BASE, ("parameter 2 ('c')", {"shape": "[1]"})]
    both = [BASE, more] if longer else [more, BASE]
    found = first_difference([([0], both[0]), ([1], both[1])])
    assert found.subject == "parameter 2 ('c')"
    assert found.values == {"absent": [1 - longer], "parameter 2 ('c')": [longer]}
    assert f"absent on rank {1 - longer}" in str(found)


def test_nothing_at_all_on_one_rank_is_named():
    found = first_difference([([0], BASE), ([1], [])])
    assert found.values == {"parameter 0 ('a')": [0], "absent": [1]}


def test_another_order_names_both_subjects_and_their_ranks():
    found = first_difference([([0], BASE), ([1, 2], BASE[::-1])])
    assert found.values == {"parameter 0 ('a')": [0], "parameter 1 ('b')": [1, 2]}


@pytest.mark.parametrize("extra_on", [0, 1])
def test_a_field_that_only_one_rank_has_is_named_as_absent_on_the_other(extra_on):
    opinions = [BASE, BASE]
    opinions[extra_on] = changed(1, momentum="0.9")
    found = first_difference([([0], opinions[0]), ([1], opinions[1])])
    assert (found.subject, found.field) == ("parameter 1 ('b')", "momentum")
    assert found.values == {"0.9": [extra_on], "absent": [1 - extra_on]}


rows = st.tuples(
    st.sampled_from(["p0", "p1", "p2"]), st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(rows, max_size=4), min_size=2, max_size=4, unique_by=repr), st.randoms())
def test_every_rank_appears_once_and_what_is_named_is_what_it_stated(opinions, shuffle: random.Random):
    """Whenever two opinions differ in content (the order of fields is none), the difference found is real."""
    if any(a == b for i, a in enumerate(opinions) for b in opinions[:i]):
        return
    ranks = list(range(2 * len(opinions)))
    shuffle.shuffle(ranks)
    held = [(sorted(ranks[2 * i : 2 * i + 2]), opinion) for i, opinion in enumerate(opinions)]
    found = first_difference(held)
    assert len(found.values) > 1
    assert sorted(rank for named in found.values.values() for rank in named) == sorted(ranks)
    value_of = {rank: value for value, named in found.values.items() for rank in named}
    for holders, opinion in held:
        stated = {value_of[rank] for rank in holders}
        if found.field == "this position":
            assert stated <= {"absent", *(subject for subject, _ in opinion)}
        else:
            assert stated <= {fields.get(found.field, "absent") for s, fields in opinion if s == found.subject}


def test_a_failure_is_not_replaced_by_that_of_a_store_that_is_gone():
    """The host of the store may be the first to die; the user has to see what happened, not that nobody can be told."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    group = Group(SimpleNamespace(get_group_store=lambda: client), 0, 2, 0, {"cpu": "gloo"})
    consensus = RankConsensus(group)
    consensus.report_failure("step", ValueError("while the store lives"))
    assert client.check([consensus._key("verdict")])
    del host
    with pytest.raises(RuntimeError):
        client.add("is anybody there", 1)
    consensus.report_failure("step", ValueError("the real one"))


def test_a_rank_that_said_why_it_failed_but_gave_no_verdict_is_quoted_not_counted_as_present():
    """The waiting rank's time ends between the two writes of the failing one."""
    store = dist.HashStore()
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=0.2)))
    raw = SimpleNamespace(get_group_store=lambda: store, _get_backend=lambda device: backend)
    failing, waiting = (RankConsensus(Group(raw, rank, 3, rank, {"cpu": "gloo"})) for rank in (1, 2))
    failing._enter("step", {"error": "ValueError: no", "kind": "ValueError"})
    with pytest.raises(RankFailed, match="rank 1 did not call it: it was in step, which failed there: ValueError: no"):
        waiting.check_equal("add_param_group", [])


def test_who_waits_hears_of_ranks_that_failed_before_its_place_and_of_no_others():
    store = dist.HashStore()
    raw = SimpleNamespace(get_group_store=lambda: store)
    failing, other, waiting = (RankConsensus(Group(raw, rank, 3, rank, {"cpu": "gloo"})) for rank in range(3))
    everyone = range(3)
    assert waiting.failure_before(5, everyone, has_reported=False) is None  # nobody has failed
    failing.report_failure("step", ValueError("no"), place=3)
    other.report_failure("step", ValueError("me neither"), place=6)
    assert waiting.failure_before(3, everyone, has_reported=False) is None  # what it waits for has come, or will
    found = waiting.failure_before(4, everyone, has_reported=False)
    assert found is not None
    assert str(found) == "rank 0 failed before, in step: ValueError: no"
    assert waiting.failure_before(4, [1, 2], has_reported=False) is None  # rank 0 is no part of that collective
    waiting.report_failure("step", found, place=4)
    assert waiting.failure_before(4, everyone, has_reported=True) is not None
    assert waiting.failure_before(4, everyone, has_reported=False) is None  # of the next step nobody has said anything


def test_a_glance_at_a_busy_store_says_nothing_about_it():
    """A gather that takes long looks every second: one that gets no answer leaves one thread behind, not one each."""
    watch, answer = StoreWatch(), threading.Event()
    before = threading.active_count()
    assert [watch.glance(answer.wait, 0.01) for _ in range(5)] == [None] * 5
    assert threading.active_count() == before + 1
    assert not watch.is_lost
    answer.set()
    assert watch.ask(lambda: "there", 5) == "there"
    while threading.active_count() > before:
        time.sleep(0.01)
    assert watch.glance(lambda: "there", 5) == "there"
