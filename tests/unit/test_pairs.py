"""Every pair of values meets in what is chosen of a product."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.pairs import covering


def rows_of(*sizes: int) -> list[dict[str, Any]]:
    return [dict(zip("abcdef", values, strict=False)) for values in product(*map(range, sizes))]


def pairs_of(rows: list[dict[str, Any]]) -> set:
    return {pair for row in rows for pair in combinations(sorted(row.items()), 2)}


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (3, 2, 30), (4, 3, 2, 2), (2, 2, 2, 2, 2, 2)])
def test_every_pair_of_values_is_in_a_chosen_row(sizes):
    rows = rows_of(*sizes)
    chosen = [rows[position] for position in covering(rows)]
    assert pairs_of(chosen) == pairs_of(rows)
    assert len(chosen) < len(rows) or len(sizes) == 2


def test_every_value_is_in_a_chosen_row_and_no_row_without_need():
    rows = rows_of(4, 3)
    chosen = [rows[position] for position in covering(rows, 1)]
    assert [{row[name] for row in chosen} for name in "ab"] == [{0, 1, 2, 3}, {0, 1, 2}]
    assert len(chosen) == 4
    assert covering(rows_of(5), 1) == list(range(5))


def test_of_two_parameters_everything_is_needed():
    assert covering(rows_of(4, 5)) == list(range(20))


def test_what_is_chosen_is_near_the_fewest_and_always_the_same():
    rows = rows_of(30, 3, 2)
    assert len(covering(rows)) <= 100  # 90 pairs of the first two; the product has 180
    assert covering(rows) == covering(list(rows))


def test_pairs_that_are_in_no_row_are_not_asked_for():
    rows = [row for row in rows_of(3, 3, 3) if row["a"] != row["b"]]
    chosen = [rows[position] for position in covering(rows)]
    assert pairs_of(chosen) == pairs_of(rows)
