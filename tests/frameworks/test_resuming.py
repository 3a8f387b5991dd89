"""Programs of each framework train, clip, accumulate, schedule, save in its own way, and go on in another process.

Oracle: plain AdamW under the same framework and plain DDP, never interrupted, at the same number of ranks. The programs
run in as few processes as can be: a start costs seconds.

Tolerance: everything is float64, and only the order in which gradients are added up differs: by about 1e-16 of the
largest one. AdamW divides an element's gradient by its own size. Were one a thousandth of the largest, its steps (of
0.01 and less) would differ by 1e-15, and eight of them by 1e-14: 1e-12 is safe. (Measured: 6e-17.) Losing the state on
the way moves the weights by 9e-3, which the control shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.frameworks import worker
from tests.frameworks.launch import start
from tests.frameworks.work import HOOK, PLAIN, ZERO1, ZERO2

pytestmark = pytest.mark.timeout(400)

TOLERANCE = 1e-12
PACKAGES = {
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
    "fabric": "lightning",
    "ignite": "ignite",
    "dcp": "torch",
}
RANKS = (2, 3)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    weights, others = one["weights"], other["weights"]
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name]).abs().max()) for name in weights)


def check(report: dict[str, Any], plain: dict[str, Any], mode: str, claim: str) -> None:
    """As plain AdamW, with a share of the state."""
    ranks = report["ranks"]
    assert distance(report, plain) < TOLERANCE, claim
    assert {rank["lr"] for rank in ranks} == {plain["ranks"][0]["lr"]}, claim
    # Two moments of every parameter; a piece more or less has a step counter.
    moments = 2 * sum(value.numel() * 8 for value in report["weights"].values())
    assert sum(rank["state_bytes"] for rank in ranks) == pytest.approx(moments, rel=0.05), claim
    assert max(rank["state_bytes"] for rank in ranks) < 1.1 * moments / len(ranks), claim
    kind = {"ShardedGradient"} if mode in (HOOK, ZERO2) else {"Tensor"}
    assert {rank["gradient"] for rank in ranks} == kind, claim


@pytest.mark.parametrize("framework", PACKAGES)
def test_a_program_goes_on_at_any_number_of_ranks_from_what_the_framework_saved(framework, tmp_path):
    pytest.importorskip(PACKAGES[framework], reason="in the environment of make test-frameworks")
    for phase in ("train", "resume"):
        for ranks in RANKS:
            start(ranks, str(worker.__file__), framework, phase, str(tmp_path))
    plain = {ranks: torch.load(tmp_path / f"trained-{ranks}-{PLAIN}.pt") for ranks in RANKS}
    modes = [mode for mode in (ZERO1, HOOK, ZERO2) if (tmp_path / f"trained-2-{mode}.pt").exists()]
    assert modes == ([ZERO1, HOOK] if framework == "transformers" else [ZERO1, HOOK, ZERO2])
    for ranks in RANKS:
        for mode in modes:
            check(torch.load(tmp_path / f"trained-{ranks}-{mode}.pt"), plain[ranks], mode, f"{mode} at {ranks}")
            for before in RANKS:
                resumed = torch.load(tmp_path / f"resumed-{ranks}-from-{before}-{mode}.pt")
                check(resumed, plain[ranks], mode, f"{mode}, saved at {before}, resumed at {ranks}")
        if framework in ("lightning", "fabric"):  # whose strategies of ours do what DDP does for buffers
            seen = [rank["seen_before"] for rank in torch.load(tmp_path / f"trained-{ranks}-{ZERO2}.pt")["ranks"]]
            assert len(set(map(float, seen))) == 1, f"buffers before the last forward: {seen}"
    if framework == "accelerate":
        for ranks in RANKS:
            early = torch.load(tmp_path / f"loaded-early-{ranks}.pt")
            check(early, plain[ranks], ZERO1, f"loaded before prepare at {ranks}")
    if framework == "dcp":
        for ranks in RANKS:
            lost = torch.load(tmp_path / f"stateless-{ranks}.pt")
            assert distance(lost, plain[ranks]) > 1e9 * TOLERANCE, "the control: what losing the state does"
