"""Training on several hosts: the weights of DDP, and the same bits whatever carries them. Real torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.hosts import training_worker
from tests.hosts.launch import Arrangement, rank_by_rank, torchrun
from tests.hosts.namespaces import PREFIX, open_hosts
from tests.hosts.training import MODES, SUMMED
from tests.oracle import assert_same

TIMEOUT = 150


class Layout(NamedTuple):
    """How a job is laid out over hosts, and who starts it."""

    arrangement: Arrangement
    by: str


LAYOUTS = {
    "2+2": Layout([[0, 1], [2, 3]], "torchrun"),
    "3+1": Layout([[0, 1, 2], [3]], "torchrun"),
    "1+1": Layout([[0], [1]], "torchrun"),
    "4+4": Layout([[0, 1, 2, 3], [4, 5, 6, 7]], "torchrun"),
    "not in host order": Layout([[0, 2], [1, 3]], "hand"),
    "rank 0 on the second host": Layout([[1, 3, 4], [0, 2]], "hand"),
    "three hosts": Layout([[0], [1, 2], [3]], "torchrun"),
    "2+2 once more": Layout([[0, 1], [2, 3]], "hand"),
}
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the ranks of a layout ended with, by rank. Each layout is one job, run once."""

    @cache
    def of(name: str) -> list[dict[str, Any]]:
        return run_job(LAYOUTS[name], tmp_path_factory.mktemp("layout"))

    return of


def run_job(layout: Layout, folder: Path) -> list[dict[str, Any]]:
    command = [Path(training_worker.__file__), folder, json.dumps(layout.arrangement)]
    counts = [len(ranks) for ranks in layout.arrangement]
    with open_hosts(len(counts), folder) as hosts:
        by_torchrun = layout.by == "torchrun"
        with (
            torchrun(hosts, counts, command, folder)
            if by_torchrun
            else rank_by_rank(hosts, layout.arrangement, command, folder) as job
        ):
            job.succeed(TIMEOUT)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(sum(counts))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_on_several_hosts_is_equal_to_ddp(results: Results, layout: str, mode: str) -> None:
    """float64. Gradients here are below 1, so sums of up to 8 of them in another order differ by some 1e-17 to 1e-16.
    AdamW divides by |g| + 1e-8 at least, so a step of lr = 1e-2 makes at most 1e-10 of that, and only where a gradient
    is nearly zero (seen: 1e-16). A rank that is missed or counted twice changes weights by 1e-3 and more."""
    for rank, ended in enumerate(results(layout)):
        for variant, weights in ended["modes"][mode].items():
            torch.testing.assert_close(
                weights, ended["ddp"], rtol=0, atol=1e-10, msg=lambda text, at=(rank, variant): f"{at}: {text}"
            )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_transports_and_bucket_sizes_have_the_same_bits(results: Results, layout: str, mode: str) -> None:
    ended = results(layout)
    expected = next(iter(ended[0]["modes"][mode].values()))
    for rank, result in enumerate(ended):
        for variant, weights in result["modes"][mode].items():
            assert_same(weights, expected, f"rank {rank}, {variant}:")


@pytest.mark.parametrize("mode", MODES)
def test_another_run_of_the_same_arrangement_has_the_same_bits(results: Results, mode: str) -> None:
    first, second = results("2+2"), results("2+2 once more")
    for one, other in zip(first, second, strict=True):
        assert_same(one["modes"][mode], other["modes"][mode], mode)


@pytest.mark.parametrize("mode", SUMMED)
@pytest.mark.parametrize("dtype", training_worker.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_summed_within_hosts_first_and_then_by_lowest_rank(
    results: Results, layout: str, dtype: str, mode: str
) -> None:
    """Bit for bit. (Half precision crosses as float32: rounded in between, the last bits would differ.)"""
    for rank, ended in enumerate(results(layout)):
        for variant, weights in ended["summed"][mode, dtype].items():
            assert_same(weights, ended["by hand"][dtype], f"rank {rank}, {variant}:")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_of_these_jobs_were_where_they_should_be(results: Results, layout: str) -> None:
    ended = results(layout)
    expected = {rank: f"{PREFIX}{host}" for host, ranks in enumerate(LAYOUTS[layout].arrangement) for rank in ranks}
    assert {rank: result["host"] for rank, result in enumerate(ended)} == expected
