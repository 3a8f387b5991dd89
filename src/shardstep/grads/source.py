"""Where the gradients of a step come from: one interface, one implementation per mode.

A step is the same whoever has reduced the gradients (see ``engine.py``); a source gives the tensors of this rank's
pieces their gradients, and answers what users ask about gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from shardstep.grads.attendance import Call, Roll


class StepGradients(ABC):
    """The gradients of a step, as the engine sees them.

    It calls, on every rank: ``prepare`` (with a closure: ``prepare`` after it has run), ``bind``, then it
    updates and gathers, ``release``, ``stepped``.
    """

    may_be_lazy = True  # whether all ranks know, without asking, that a step may leave gathers under way

    def prepare(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Collective. The gradients of this step are complete: hand on what other ranks need of them."""
        return

    @abstractmethod
    def bind(self, positions: Iterable[int]) -> None:
        """Give the tensors of this rank's pieces of these buckets their gradients.

        Collective where we reduce them: reductions under way are finished first.
        """

    @abstractmethod
    def release(self) -> None:
        """Take the gradients off the pieces, so that ``zero_grad`` frees them."""

    def stepped(self) -> None:
        """A step was made of these gradients."""
        return


class GradientSource(StepGradients):
    """The gradients of one optimizer: for its steps, and for what users ask about gradients."""

    steps_in_backward = False  # whether the step has been made when backward is over
    may_step_in_backward = False  # whether that is known only after the first backward
    reduces_in_ddp = False  # whether gradients are reduced in DDP's hook, which ranks without inputs run, too
    may_be_replaced = False  # whether another source may take its place
    calls_roll = False  # whether ranks without inputs are called to take part in backward (see join.py)

    def extend(self) -> None:
        """Collective. Parameters were added, and placed."""

    @abstractmethod
    def follow(self) -> None:
        """Collective. If the parameters were moved to another device: follow them, with what is kept elsewhere."""

    def check_params(self, params: Iterable[Any]) -> None:
        """ValueError if gradients of these parameters cannot be reduced with these settings. Before they are added."""

    def adopt(self, params: Sequence[Tensor]) -> None:
        """Collective. Parameters were added: give them the values to start from."""

    @contextmanager
    def cleared(self, set_to_none: bool) -> Iterator[None]:
        """Around ``zero_grad`` of the parameters: forget what is kept elsewhere."""
        yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context backward adds to local gradients and sends nothing."""
        raise RuntimeError(
            "no_sync expects an optimizer that reduces the gradients itself. Use shard_gradients=True, or no_sync of "
            "DDP."
        )

    @abstractmethod
    def clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        """Scale all gradients if their norm exceeds ``max_norm``; the norm, the same bits on every rank."""

    @abstractmethod
    def full(self, index: int) -> Tensor | None:
        """The whole reduced gradient of a parameter; None if it has none."""

    # --- for ranks that have run out of inputs, see join.py ---------------------------------------------------------

    @property
    def sent(self) -> int:
        """How many buckets this rank has sent so far."""
        return 0

    def take_part(self, call: Call, roll: Roll, params: Sequence[Tensor]) -> None:
        """Collective. Do on a rank without inputs what the others do now, which is no step."""
        raise AssertionError(f"nobody announces {call} to {type(self).__name__}")

    def leave_join(self) -> None:
        """Collective. All ranks have run out of inputs."""
        return

    # --- other questions --------------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """The gradients that are kept elsewhere than on the parameters."""
        return []

    def buffers(self) -> list[Tensor]:
        """Memory that is kept between iterations and holds no gradient then."""
        return []
