"""Notices that nobody averages the gradients: a forgotten DDP wrapper, which nothing else would show.

Each rank would step its pieces with its own gradient, and the gather makes all ranks equal again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import Tensor

from shardstep.comm.consensus import RankConsensus
from shardstep.grads.norms import local_norm, wide_dtype

# Norms of averaged gradients are the same bits. Norms of different batches hardly ever agree to this.
_TOLERANCE = 1e-3


class AverageCheck:
    """Compares the norm of the first step's gradients with rank 0's, in the second step.

    Without waiting: by then the first gather is over, so rank 0 has said its own. On a mesh it may be in another
    replica, and slower: then a later step compares. It costs one read from the device.
    """

    def __init__(self, consensus: RankConsensus) -> None:
        self._consensus: RankConsensus | None = consensus if consensus.group.world_size > 1 else None
        self._norm: float | None = None  # of the first step

    def look(self, params: Iterable[Tensor]) -> None:
        """Before a step. Returns at once when all is said."""
        if self._consensus is None:
            return
        if self._norm is None:
            self._norm = _norm_of(params)
            self._consensus.leave_word("norm", repr(self._norm))
            return
        word, group = self._consensus.word_of(0, "norm"), self._consensus.group
        if word is None:
            return
        self._consensus = None
        if not _alike(self._norm, float(word)):
            warnings.warn(
                f"step expects gradients that are averaged over the ranks, but in the first step their norm was {word} "
                f"on {group.name_of(0)} and {self._norm!r} on {group.name_of(group.rank)}. Wrap the model in "
                "DistributedDataParallel, or pass shard_gradients=True.",
                stacklevel=5,
            )


def _norm_of(params: Iterable[Tensor]) -> float:
    gradients = [param.grad for param in params if param.grad is not None and not param.grad.is_sparse]
    if not gradients:
        return 0.0
    return local_norm(gradients, 2.0, gradients[0].device, wide_dtype(gradients)).item()


def _alike(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return True  # overflow is no sign of anything
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12)
