"""What an optimizer holds on this rank, as state dicts and checkpoints see it: sharded parameters, or whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from shardstep.layout.specs import Layout
from shardstep.params.pieces import LocalPieces


class Builder(Protocol):
    """What is known of the optimizer class."""

    @property
    def has_eager_state(self) -> bool:
        """Whether the optimizer makes state when it is built."""

    def fresh_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """A new optimizer, built with the same arguments."""

    def given_options(self, position: int) -> Mapping[str, Any]:
        """The options that the user gave a group."""


class HeldParameters(Protocol):
    """Parameters, and this rank's pieces of them."""

    @property
    def layout(self) -> Layout: ...

    @property
    def given(self) -> Mapping[int, Tensor]:
        """The parameters as the user gave them."""

    @property
    def pieces(self) -> LocalPieces: ...

    @property
    def indices(self) -> Sequence[Sequence[int]]:
        """Per group, the parameters of which this rank has a piece."""

    @property
    def builder(self) -> Builder: ...

    def group_owners(self) -> list[list[int]]:
        """Per group, the ranks that have a piece of it."""

    def blank_state(self, index: int, param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state that the optimizer would make for this rank's piece of a parameter."""

    def master_weights(self, only: int | None = None) -> Mapping[int, Tensor]:
        """The float32 masters of this rank's pieces that were stepped, by parameter; ``only``: of one."""

    def keeps_master(self, index: int) -> bool:
        """Whether this rank keeps a float32 master of its piece of a parameter."""

    def find_state_class(self, index: int, name: str) -> type | None:
        """The tensor subclass of that name which the optimizer makes as state."""
