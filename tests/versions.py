"""What this version of torch lacks. A test of it is skipped, and the reason names the version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

Muon: Any = getattr(torch.optim, "Muon", None)  # torch >= 2.9
needs_muon = pytest.mark.skipif(Muon is None, reason=f"torch {torch.__version__} has no torch.optim.Muon")

needs_copies_of_async_save = pytest.mark.skipif(
    torch.__version__ < "2.7",
    reason=f"dcp.async_save of torch {torch.__version__} copies no tensor that is on the CPU: they change meanwhile",
)

needs_complex_ddp = pytest.mark.skipif(
    torch.__version__ < "2.9", reason=f"DDP of torch {torch.__version__} with gloo takes no complex parameters"
)


def _adagrad_grows() -> bool:
    """Whether Adagrad can step groups that are added later: not with torch 2.6 and 2.9, with 2.13 it can."""
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.Adagrad([first])
    optimizer.add_param_group({"params": [second]})
    second.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:  # it has no state
        return False
    return True


needs_adagrad_that_grows = pytest.mark.skipif(
    not _adagrad_grows(), reason=f"Adagrad of torch {torch.__version__} makes no state for groups added later"
)


def with_muon_if_there(names: Iterable[str]) -> list[Any]:
    """For ``parametrize``: the cases of Muon are skipped if there is none."""
    return [pytest.param(name, marks=needs_muon) if "muon" in name.lower() else name for name in names]
