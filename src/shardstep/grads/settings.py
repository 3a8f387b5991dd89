"""The arguments of the optimizer that are about reducing gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ReduceSettings:
    """How gradients are reduced, with ``shard_gradients``."""

    reduce_dtype: torch.dtype | None = None
    in_flight: int | None = None  # None: as many as are of use where the gradients are
    overlap: bool = True
    find_unused: bool = False

    def check(self) -> None:
        """ValueError if an argument is invalid."""
        if self.reduce_dtype is not None and not getattr(self.reduce_dtype, "is_floating_point", False):
            raise ValueError(
                f"reduce_dtype expects a floating point dtype but got {self.reduce_dtype!r}. Use torch.float32."
            )
        if self.in_flight is not None and (not isinstance(self.in_flight, int) or self.in_flight < 1):
            raise ValueError(
                f"gradient_buckets_in_flight expects a number of at least 1 but got {self.in_flight!r}. Use 2."
            )

    def check_params(self, params: Iterable[Tensor]) -> None:
        """ValueError if gradients of these parameters cannot be reduced as wished."""
        if self.reduce_dtype is not None and any(isinstance(param, Tensor) and param.is_complex() for param in params):
            raise ValueError(
                f"reduce_dtype expects real parameters but got complex ones, of which {self.reduce_dtype} would lose "
                "the imaginary part. Drop reduce_dtype."
            )

    def facts(self) -> dict[str, str]:
        """What must be the same on every rank."""
        return {
            "reduce_dtype": str(self.reduce_dtype),
            "gradient_buckets_in_flight": str(self.in_flight),
            "find_unused_parameters": str(self.find_unused),
        }
