"""Training on several hosts: the weights of DDP, and the same bits whatever carries them. Real torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import add
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.hosts.launch import Arrangement, run_on_hosts
from tests.hosts.namespaces import PREFIX
from tests.hosts.training import MODES, SMALL_CAP, SUMMED, ddp, make_model, plain, train
from tests.oracle import assert_same

LAYOUTS: dict[str, Arrangement] = {  # the ranks of each host; "by hand": torchrun would number them otherwise
    "2+2": [[0, 1], [2, 3]],
    "1+1": [[0], [1]],
    "three hosts": [[0], [1, 2], [3]],
    "rank 0 on the second host, by hand": [[1, 3, 4], [0, 2]],
    "2+2 once more, by hand": [[0, 1], [2, 3]],
}
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}
# What must not show in the results: whether there is shared memory, and bucket_cap_mb.
VARIANTS = [(True, 25), (False, 25), (True, SMALL_CAP)]
Results = Callable[[str], list[dict[str, Any]]]


# --- on every rank ----------------------------------------------------------------------------------------------------


def trained(folder: Path, arrangement: Arrangement) -> dict[str, Any]:
    """Weights: of DDP, of every mode by dtype and variant, and by the definition of docs/design.md."""
    runs = [(mode, dtype) for mode in MODES for dtype in DTYPES if mode in SUMMED or dtype == "float64"]
    return {
        "host": socket.gethostname(),
        "ddp": train(ddp(make_model())),
        "ours": {one: [run(*one, *variant) for variant in VARIANTS] for one in runs},
        "by hand": {dtype: by_hand(dtype, arrangement) for dtype in DTYPES},
    }


def run(mode: str, dtype: str, shared_memory: bool, cap: float) -> list[Tensor]:
    os.environ["SHARDSTEP_SHARED_MEMORY"] = str(int(shared_memory))
    return train(MODES[mode](make_model(DTYPES[dtype]), bucket_cap_mb=cap))


def by_hand(dtype: str, arrangement: Arrangement) -> list[Tensor]:
    """The plain optimizer on sums in the promised order."""
    return train(plain(make_model(DTYPES[dtype])), lambda gradient: mean_by_host(gradient, arrangement))


def mean_by_host(gradient: Tensor, arrangement: Sequence[Sequence[int]]) -> Tensor:
    """The ranks of a host in order, then hosts by their lowest rank; half precision in float32, rounded once."""
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    wide = torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
    hosts = sorted(sorted(ranks) for ranks in arrangement)
    total = reduce(add, [reduce(add, [parts[rank].to(wide) for rank in ranks]) for ranks in hosts])
    return (total / len(parts)).to(gradient.dtype)


# --- what came out ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the ranks of a layout ended with, by rank. Each layout is one job, run once."""

    @cache
    def of(layout: str) -> list[dict[str, Any]]:
        folder, arrangement = tmp_path_factory.mktemp("layout"), LAYOUTS[layout]
        return run_on_hosts(trained, arrangement, folder, arrangement, by_torchrun="by hand" not in layout)

    return of


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_ddp_and_the_same_bits_on_all_ranks_transports_and_bucket_sizes(
    results: Results, layout: str, mode: str
) -> None:
    """float64. Gradients here are below 1, so sums of up to 5 of them in another order differ by some 1e-17 to 1e-16.
    AdamW divides by |g| + 1e-8 at least, so a step of lr = 1e-2 makes at most 1e-10 of that, and only where a gradient
    is nearly zero (seen: 1e-16). A rank that is missed or counted twice changes weights by 1e-3 and more."""
    ended = results(layout)
    expected = ended[0]["ours"][mode, "float64"][0]
    torch.testing.assert_close(expected, ended[0]["ddp"], rtol=0, atol=1e-10)
    for rank, result in enumerate(ended):
        for variant, weights in zip(VARIANTS, result["ours"][mode, "float64"], strict=True):
            assert_same(weights, expected, f"rank {rank}, {variant}:")


@pytest.mark.parametrize("mode", SUMMED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_summed_within_hosts_first_and_then_by_lowest_rank(
    results: Results, layout: str, dtype: str, mode: str
) -> None:
    """Bit for bit. (Half precision crosses as float32: rounded in between, the last bits would differ.)"""
    for rank, ended in enumerate(results(layout)):
        for variant, weights in zip(VARIANTS, ended["ours"][mode, dtype], strict=True):
            assert_same(weights, ended["by hand"][dtype], f"rank {rank}, {variant}:")


def test_another_run_of_the_same_arrangement_has_the_same_bits(results: Results) -> None:
    for one, other in zip(results("2+2"), results("2+2 once more, by hand"), strict=True):
        assert_same(one["ours"], other["ours"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_of_these_jobs_were_where_they_should_be(results: Results, layout: str) -> None:
    expected = {rank: f"{PREFIX}{host}" for host, ranks in enumerate(LAYOUTS[layout]) for rank in ranks}
    assert {rank: ended["host"] for rank, ended in enumerate(results(layout))} == expected
