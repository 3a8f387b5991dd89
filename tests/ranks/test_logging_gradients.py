"""Lightning's ``grad_norm`` on sharded gradients: needs Lightning (``make test-frameworks``)."""

from __future__ import annotations

import pytest

from tests.beside import Beside
from tests.harness import run_ranks

pytestmark = pytest.mark.extra


def log(rank: int, world: int) -> None:
    from lightning.pytorch.utilities import grad_norm

    both = Beside()
    for side in both:
        side.backward(0)
    mine, theirs = ({key: float(norm) for key, norm in grad_norm(side.model, 2).items()} for side in both)
    assert mine == pytest.approx(theirs, rel=1e-6)  # it puts the norms into a tensor of float32


def test_lightnings_grad_norm_is_that_of_ddp() -> None:
    pytest.importorskip("lightning", reason="in the environment of make test-frameworks")
    run_ranks(log, 3, fresh=True)
