"""Parameters that were moved to another device after the optimizer was built: everything that is ours follows them.

Frameworks build the optimizer first and move the model afterwards (Accelerate does). The parameters stay the same
objects, so the plain optimizer goes on, as long as it has no state. Here buckets, pieces and transports belong to a
device; and state moves along, too, so that training may go on elsewhere, or after loading.

[Note: when it is noticed]
At the next use of the parameters that all ranks make: a step, a round of reductions, a question about sharded
gradients. The ranks compare where their parameters are, and only then does anything move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm.consensus import RankConsensus
from shardstep.params import groups
from shardstep.params.model_search import check_ddp_was_not_moved
from shardstep.params.sharded_parameters import ShardedParameters

CALL = "going on after the model was moved"


class Relocation:
    """Notices that the parameters of one optimizer are on another device, has the ranks agree, and follows."""

    def __init__(self, sharded: ShardedParameters, consensus: RankConsensus) -> None:
        self._sharded, self._consensus = sharded, consensus

    @property
    def is_due(self) -> bool:
        """Whether the parameters have left the device on which they were. Passes in C: it runs in every step."""
        return self._sharded.has_left_its_device()

    def agree(self) -> None:
        """Collective. An error on every rank unless all of them have moved the model, to where it can be trained."""
        sharded = self._sharded
        self._consensus.note(f"the parameters are on {_places(sharded)} now on {sharded.group.name_of(sharded.rank)}")
        with self._consensus.reporting(CALL):
            error = sharded.kind_error() or _place_error(sharded)
            if error is not None:
                raise error
            check_ddp_was_not_moved(sharded.params.values())
            sharded.builder.examine_again(_by_group(sharded))
        labels = groups.device_labels(sharded.params.values())
        facts = [(spec.label, {"device": labels[sharded.params[spec.index].device]}) for spec in sharded.layout.specs]
        self._consensus.check_equal(CALL, facts)

    def follow(self) -> None:
        """Collective, after ``agree``. What belongs to the parameters is where they are. (State: ``bring_state``.)"""
        self._sharded.relocate()


def _by_group(sharded: ShardedParameters) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[] for _ in sharded.indices]
    for spec in sharded.layout.specs:
        found[spec.group].append(sharded.params[spec.index])
    return found


def _places(sharded: ShardedParameters) -> str:
    return ", ".join(sorted({str(param.device) for param in sharded.params.values()}))


def _place_error(sharded: ShardedParameters) -> RuntimeError | None:
    """What to raise if the parameters cannot be trained where they are now."""
    group, params = sharded.wire, sharded.params
    for spec in sharded.layout.specs:
        kind = params[spec.index].device.type
        if group.world_size > 1 and kind not in group.backends:
            served = ",".join(f"{device}:{backend}" for device, backend in group.backends.items())
            return RuntimeError(
                f"step expects parameters on a device that the process group serves ({served!r}), but {spec.label} was "
                f"moved to {kind}. Start the group with one for each, as in init_process_group('cpu:gloo,cuda:nccl')."
            )
    for bucket in sharded.layout.buckets:
        first, *others = ((index, params[index].device) for index in bucket.params)
        for index, device in others:
            if device != first[1]:
                one, other = sharded.layout.spec_of[first[0]].label, sharded.layout.spec_of[index].label
                return RuntimeError(
                    f"step expects parameters that were on one device to be moved together, but {one} is on {first[1]} "
                    f"now and {other} on {device}. Spread the model over devices first, and build the optimizer then."
                )
    return None


# --- state ------------------------------------------------------------------------------------------------------------


def bring_state(sharded: ShardedParameters, optimizer: Optimizer) -> None:
    """Move the state of this rank's pieces to where the optimizer itself would have made it."""
    homes = _Homes(sharded, optimizer)
    for index, tensor in sharded.pieces.tensors.items():
        state = optimizer.state.get(tensor)
        if state:
            homes.move(index, tensor, state)


class _Homes:
    """Where an optimizer keeps which state: beside the parameter, or (Adam's step, if not capturable) on the CPU.

    It is asked: it makes the state of one parameter of every kind anew.
    """

    def __init__(self, sharded: ShardedParameters, optimizer: Optimizer) -> None:
        self._sharded, self._optimizer = sharded, optimizer
        self._blanks: dict[Any, Mapping[str, Any]] = {}

    def move(self, index: int, piece: Tensor, state: dict[str, Any]) -> None:
        blank = self._blank(index, piece, state)
        for key, value in state.items():
            state[key] = _beside(value, blank.get(key), piece.device)

    def _blank(self, index: int, piece: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = self._sharded.layout.spec_of[index].group, piece.device, piece.dim(), frozenset(state)
        if kind not in self._blanks:
            try:
                made = self._sharded.blank_state(index, self._optimizer.param_groups)
            except Exception:  # it cannot be asked so: its tensors go along, but for numbers
                made = {}
            self._blanks[kind] = {key: _device_of(value) for key, value in made.items()}
        return self._blanks[kind]


def _device_of(value: Any) -> Any:
    """A tree with devices for tensors."""
    if isinstance(value, Tensor):
        return value.device
    if isinstance(value, Mapping):
        return {key: _device_of(item) for key, item in value.items()}
    return [_device_of(item) for item in value] if isinstance(value, (list, tuple)) else None


def _beside(value: Any, home: Any, device: torch.device) -> Any:
    """A tree with its tensors on ``device``, the parameter's, unless their ``home`` is elsewhere."""
    if isinstance(value, Tensor):
        if isinstance(home, torch.device):
            return value.to(home)
        return value.to(device) if value.dim() else value
    if isinstance(value, dict):
        inner = home if isinstance(home, Mapping) else {}
        return {key: _beside(item, inner.get(key), device) for key, item in value.items()}
    if type(value) in (list, tuple):
        inner = home if isinstance(home, list) and len(home) == len(value) else [None] * len(value)
        return type(value)(_beside(item, at, device) for item, at in zip(value, inner, strict=True))
    return value
