"""What ranks report with a part of a bucket, as bytes."""

from __future__ import annotations

import pytest

from shardstep.grads import reports


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
def test_flags_come_back_as_they_were(count):
    for seed in range(20):
        flags = [(seed >> place % 5 ^ place) % 3 == 0 for place in range(count)]
        told = reports.report(3, 4, flags, count)
        assert len(told) == reports.report_bytes(count)
        assert reports.present_anywhere([told], count) == flags


def test_a_parameter_is_present_if_any_rank_has_it():
    told = [reports.report(0, 0, flags, 3) for flags in ([True, False, False], [False, False, True])]
    assert reports.present_anywhere(told, 3) == [True, False, True]
    assert reports.present_anywhere([*told, reports.report(0, 0, None, 3)], 3) == [True] * 3


def test_iterations_are_told_apart_also_when_their_numbers_begin_again():
    told = [reports.report(number, 0, None, 1) for number in (250, 251, 252)]
    assert reports.distances(told, 251) == [250, 0, 1]
    assert not reports.are_about_the_same(told)
    assert reports.are_about_the_same([reports.report(7, 2, [False], 1), reports.report(7, 2, None, 1)])
    assert not reports.are_about_the_same([reports.report(7, 2, None, 1), reports.report(7, 3, None, 1)])
    assert reports.parts([reports.report(7, 2, None, 1), reports.report(7, 253, None, 1)]) == [2, 2]
