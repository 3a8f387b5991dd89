"""Finding the first fact in which ranks differ, and saying it so that a person finds it too."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shardstep.comm.consensus import first_difference

BASE = [("parameter 0", {"shape": "[2, 3]", "dtype": "float32"}), ("parameter 1", {"shape": "[4]", "dtype": "float32"})]


def test_the_first_difference_is_told_with_subject_field_values_and_ranks():
    wider = [("parameter 0", {"shape": "[2, 3]", "dtype": "float64"}), BASE[1]]
    found = first_difference([([2], wider), ([0, 4], BASE), ([1, 3], [wider[0]])])
    assert str(found) == "parameter 0: dtype is float32 on ranks 0, 4 but float64 on ranks 1, 2, 3"
    found = first_difference([([0], BASE), ([1], BASE[:1])])
    assert found.values == {"parameter 1": [0], "absent": [1]}


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
