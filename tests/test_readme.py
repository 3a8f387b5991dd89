"""README answers in the order in which a visitor asks, and its table of memory is what real ranks hold."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.launch import ROOT
from tests.readme import EXAMPLE, README

ROW = re.compile(r"^\| (.+?) \| ([\d/ +]+) = ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
RANKS = 8


class Row(NamedTuple):
    name: str
    terms: list[Fraction]  # bytes per parameter: parameters, gradients, state (FSDP2: and gathered parameters)
    total: Fraction
    gigabytes: list[Fraction]  # 1B, 7B


ROWS = [
    Row(name, [Fraction(term.strip()) for term in terms.split("+")], Fraction(total), [Fraction(one), Fraction(seven)])
    for name, terms, total, one, seven in ROW.findall(README)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_sums_of_the_table_are_right(row: Row) -> None:
    assert sum(row.terms) == row.total
    assert row.gigabytes == [row.total, 7 * row.total]


WAYS: dict[str, tuple[torch.dtype, Any]] = {  # dtype of the model, and master_weights
    "float32": (torch.float32, None),
    "all in bfloat16": (torch.bfloat16, None),
    "bfloat16, float32 masters": (torch.bfloat16, torch.float32),
    'bfloat16, `"remainder"`': (torch.bfloat16, "remainder"),
}


def held(rank: int, world: int) -> dict[str, list[float]]:
    """Bytes per parameter that this rank holds, by row. Masters count as state, as in the table."""
    found = {}
    for name, (dtype, masters) in WAYS.items():
        for wrap in (True, False):
            model = torch.nn.Linear(255, 256, dtype=dtype)  # with its bias 65,536 parameters
            params = list(model.parameters())
            trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if wrap else model
            options: dict[str, Any] = {"lr": 1e-3, "shard_gradients": not wrap, "master_weights": masters}
            optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options)
            trained(torch.ones(2, 255, dtype=dtype)).sum().backward()
            optimizer.step()
            row = f"DDP + shardstep, {name}" if wrap else f"shardstep with `shard_gradients`, {name}"
            memory = optimizer.memory()
            kept = [memory.parameters, memory.gradients, memory.state + memory.masters]
            found[row] = [count / 65_536 for count in kept]
    return found


def test_our_rows_are_what_eight_ranks_hold() -> None:
    rows = {row.name: [float(term) for term in row.terms] for row in ROWS}
    per_rank = run_ranks(held, RANKS)
    assert len(per_rank[0]) == 2 * len(WAYS)
    for rank in per_rank:
        for name, measured in rank.items():
            # A percent: shares end on a multiple of elements, and AdamW has a counter per piece.
            assert measured == pytest.approx(rows[name], rel=0.01), name


def test_the_table_has_every_rival() -> None:
    names = " ".join(row.name for row in ROWS)
    assert all(rival in names for rival in ("DDP, float32", "FSDP2", "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2"))


def test_the_example_is_short() -> None:
    """(It is run as pasted, in processes of its own, by tests/package; every other snippet by test_snippets.py.)"""
    assert len(EXAMPLE.strip().splitlines()) <= 15


SECTIONS = [
    "Status",
    "Install",
    "Example",
    "Four ways for gradients to arrive",
    "Training in 16 bits",
    "Memory",
    "When to use something else",
]
SECTIONS += ["Checkpoints", "Measured", "Limits", "Links"]


def test_the_order_is_that_of_a_visitors_questions_and_the_first_screen_says_what_was_not_run() -> None:
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == SECTIONS
    assert "Not yet run on a GPU." in "\n".join(README.splitlines()[:25])


def test_there_are_ten_limits_at_most() -> None:
    limits = README[README.index("## Limits") : README.index("## Links")]
    assert 1 <= len(re.findall(r"^(?:\d+\.|-) ", limits, re.MULTILINE)) <= 10


def test_relative_links_lead_to_files() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link
