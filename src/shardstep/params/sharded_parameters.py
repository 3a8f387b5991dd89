"""The layout made real on one rank: parameters, this rank's pieces of them, bucket views, the plan of a step.

It is kept real when groups are added, parameters are frozen or moved, or their memory is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm import collectives
from shardstep.comm.byte_views import dense_stride
from shardstep.comm.process_group import Group
from shardstep.comm.rank_groups import RankGroups
from shardstep.comm.shared_memory import SharedMemoryRing, open_ring
from shardstep.comm.streams import SideStreams, has_streams, is_capturing
from shardstep.comm.topology import Topology, find_topology
from shardstep.layout import partition
from shardstep.layout.bucket_size import checked_bucket_bytes, chosen_bucket_bytes
from shardstep.layout.specs import Layout
from shardstep.params import groups as group_forms
from shardstep.params.bucket_views import BucketViews
from shardstep.params.builder import OptimizerBuilder
from shardstep.params.dtensors import LocalParameter, have_moved, local_parameter
from shardstep.params.local_optimizer import options_of
from shardstep.params.master_modes import MasterMode, MasterSettings
from shardstep.params.masters import Masters
from shardstep.params.memory_watch import MemoryWatch
from shardstep.params.model_search import check_in_a_module, is_in_a_module
from shardstep.params.pieces import LocalPieces
from shardstep.params.step_plan import StepPlan, make_plan

# Gathers under way at the same time, if it is the host that waits for them: enough to keep the wire busy while the next
# bucket is updated, and a bound on the memory for staging.
MAX_IN_FLIGHT = 4
_LEAST_PART_BYTES = 64 * 1024  # smaller parts cost more than they save
_requires_grad = attrgetter("requires_grad")
_device = attrgetter("device")


class ShardedParameters:
    """The parameters of one optimizer and what this rank holds of them."""

    def __init__(
        self,
        ranks: RankGroups,
        builder: OptimizerBuilder,
        granularity: str,
        bucket_cap_mb: float | None,
        views: bool,
        apart: bool = False,
        reduce_dtype: torch.dtype | None = None,
        plain_only: str = "",
        masters: MasterSettings | None = None,
    ) -> None:
        """``apart``: pieces are tensors of their own, see ``LocalPieces``. ``plain_only``: why DTensors are refused."""
        self.ranks = ranks
        self.group = group = ranks.shard
        self.topology = Topology(group.rank, (tuple(range(group.world_size)),))  # known when settled
        self.wire = group  # through which parameters are gathered
        self.builder = builder
        self._bucket_bytes = checked_bucket_bytes(bucket_cap_mb) or 0  # 0: chosen when the parameters are known
        self._reduce_itemsize = reduce_dtype.itemsize if reduce_dtype is not None else None
        self.default_granularity = granularity
        self.layout = Layout(group.world_size)
        self.given: dict[int, Tensor] = {}  # the user's own
        self.params: dict[int, Tensor] = {}  # the same, or what stands for a DTensor
        self.index_of: dict[Tensor, int] = {}  # of the user's
        self._dtensors: list[LocalParameter] = []
        self._plain_only = plain_only or ("parameters_as_bucket_view" if views else "")
        self.masters = Masters(group.rank, masters or MasterSettings())
        self.pieces = LocalPieces(group.rank, apart, self.masters)
        self.indices: list[list[int]] = []  # per group: the parameters whose piece the local optimizer steps
        self.active: list[bool] = []
        self.plan = StepPlan([], [], [], False)
        self._views = BucketViews() if views else None
        self._in_module = False  # known with bucket views only
        self._memory = MemoryWatch()
        self._ring: SharedMemoryRing | None = None
        self.gather_streams = SideStreams()
        self.state_is_behind = False  # whether parameters were moved and their state was not yet

    @property
    def rank(self) -> int:
        return self.group.rank

    # --- placing --------------------------------------------------------------------------------------------------

    def build(
        self,
        param_groups: Sequence[dict[str, Any]],
        granularities: Sequence[str],
        given: Sequence[dict[str, Any]],
        modes: Sequence[MasterMode],
    ) -> Optimizer:
        """Place all groups and make the local optimizer over this rank's pieces.

        ``given``: the groups as the user gave them. ``modes``: what masters each has.
        """
        self.masters.modes = list(modes)
        rows = zip(param_groups, granularities, given, modes, strict=True)
        choose = self.builder.choose
        self._place(param_groups, [choose(group, wish, options_of(said), mode) for group, wish, said, mode in rows])
        if "auto" in granularities and self.rank == 0:
            self.builder.log_what_was_not_checked()
        local_groups = [self._local_group(group, position) for position, group in enumerate(param_groups)]
        local = self.builder.build(local_groups, param_groups)
        self.masters.complete_options(local.param_groups)
        return local

    def extend(
        self,
        optimizer: Optimizer,
        param_groups: Sequence[dict[str, Any]],
        granularity: str,
        given: dict[str, Any],
        mode: MasterMode,
    ) -> None:
        """Place the last group of ``param_groups`` and give this rank's pieces of it to the local optimizer."""
        position = len(param_groups) - 1
        self.masters.modes.append(mode)
        chosen = self.builder.choose(param_groups[position], granularity, options_of(given), mode)
        self._place(param_groups, [chosen] * len(param_groups))
        optimizer.add_param_group(self._local_group(param_groups[position], position))
        self.masters.complete_options(optimizer.param_groups)

    def retract(self, optimizer: Optimizer, count: int) -> None:
        """Undo ``extend``: keep the first ``count`` groups. Nothing was moved yet, so nothing moves back."""
        del optimizer.param_groups[count:], self.indices[count:], self.masters.modes[count:]
        self.builder.forget(count)
        kept = tuple(spec for spec in self.layout.specs if spec.group < count)
        gone = [spec.index for spec in self.layout.specs if spec.group >= count]
        buckets = tuple(bucket for bucket in self.layout.buckets if not set(bucket.params) & set(gone))
        self.layout = replace(self.layout, specs=kept, buckets=buckets)
        for index in gone:
            if index in self.pieces.tensors:
                optimizer.state.pop(self.pieces.tensors[index], None)
            del self.params[index]
            self.index_of.pop(self.given.pop(index))
            self._memory.forget(index)
        self.pieces.forget(gone)
        self.masters.forget(gone)

    def gather_through(self, group: Group) -> None:
        """Gather through another process group of the same ranks."""
        self.wire = group

    def settle(self) -> None:
        """Collective. After all ranks agreed: move the parameters into their views and plan the steps."""
        self.active = self.active_now()
        self.topology = find_topology(self.wire)
        self._open_ring()
        if self._views is not None:
            self._views.extend(self.layout, self.params)
            self._in_module = bool(self.params) and is_in_a_module(next(iter(self.params.values())))
        self.bind()

    def _open_ring(self) -> None:
        """Slots of shared memory for buckets, or for parts of parameters that are larger than one."""
        group = self.wire
        if group.world_size == 1 or not all(collectives.sends_pairwise(group, p.device) for p in self.params.values()):
            self._ring = None
            return
        sizes = [bucket.numel * bucket.itemsize for bucket in self.layout.buckets]
        slot_bytes = min(max(sizes, default=0), self.part_bytes)
        in_flight, ring = min(sum(-(-size // self.part_bytes) for size in sizes), MAX_IN_FLIGHT), self._ring
        if in_flight and (ring is None or ring.slot_bytes < slot_bytes or ring.in_flight < in_flight):
            self._ring = open_ring(group, self.topology, in_flight, slot_bytes)

    @property
    def shares_memory(self) -> bool:
        """Whether parameters are gathered through memory that the ranks share."""
        return self._ring is not None

    @property
    def part_bytes(self) -> int:
        """A bucket that is larger than this is one parameter, and travels in parts. (Padding may exceed the cap.)"""
        return max(int(self._bucket_bytes * 1.01), _LEAST_PART_BYTES)

    def _place(self, param_groups: Sequence[dict[str, Any]], granularities: Sequence[str]) -> None:
        found = group_forms.specs_of(param_groups, granularities, list(self.given.values()), self.masters.modes)
        given = {index: param for index, (_, param) in found.items()}
        params = {index: local_parameter(param, self._plain_only) for index, param in given.items()}
        group_forms.check_apart({**self.params, **params})
        specs = [spec for spec, _ in found.values()]
        if not self._bucket_bytes:
            total = sum(spec.numel * spec.itemsize for spec in specs)
            on_cpu = all(param.device.type == "cpu" for param in params.values())
            self._bucket_bytes = chosen_bucket_bytes(total, on_cpu)
        self.layout = partition.extend(self.layout, specs, self._bucket_bytes, self._reduce_itemsize)
        self.given.update(given)
        self.params.update(params)
        self.index_of.update((param, index) for index, param in given.items())
        self._dtensors = [param for param in self.params.values() if isinstance(param, LocalParameter)]
        self._memory.place(params)
        self.masters.extend(self.layout, self.params)
        self.pieces.extend(self.layout, self.params)

    def _local_group(self, group: dict[str, Any], position: int) -> dict[str, Any]:
        indices = [self.index_of[param] for param in group["params"]]
        owned = [index for index in indices if index in self.pieces.tensors]
        self.indices.append(owned)
        options = self.builder.given_options(position)
        local = {**options, "params": [self.pieces.tensors[index] for index in owned]}
        if "param_names" in group:
            names = dict(zip(indices, group["param_names"], strict=True))
            local["param_names"] = [names[index] for index in owned]
        return local

    # --- following changes ----------------------------------------------------------------------------------------

    def active_now(self) -> list[bool]:
        """Which parameters a step may change: those that require a gradient, or hold one all the same."""
        active = list(map(_requires_grad, self.params.values()))
        if False in active:
            pairs = zip(active, self.params.values(), strict=True)
            active = [wants or param.grad is not None for wants, param in pairs]
        return active

    def describe_change(self, active: Sequence[bool]) -> str:
        """The first parameter whose activity changed, for messages on other ranks."""
        changes = zip(self.layout.specs, self.active, active, strict=True)
        spec, before, after = next(change for change in changes if change[1] != change[2])
        where = self.group.name_of(self.rank)
        return f"requires_grad of {spec.label} went from {before} to {after} on {where}"

    def activity_facts(self, active: Sequence[bool]) -> list[tuple[str, dict[str, str]]]:
        """What the ranks have to agree on after a change of requires_grad."""
        return [
            (spec.label, {"requires_grad": str(is_active)})
            for spec, is_active in zip(self.layout.specs, active, strict=True)
        ]

    def activate(self, active: list[bool]) -> None:
        """Send these parameters from now on and no others."""
        self.active = active
        self._plan()

    def moved(self) -> bool:
        """Whether a parameter has other memory than at the last ``bind``, or lies otherwise in it, on its device."""
        return self._memory.moved(self.params.values()) or have_moved(self._dtensors)

    def has_left_its_device(self) -> bool:
        """Whether a parameter is on another device than at the last ``bind`` (see ``relocation.py``)."""
        if self._dtensors and have_moved(self._dtensors):
            for param in self._dtensors:
                param.follow()
        return self._memory.changed_device(self.params.values())

    def relocate(self) -> None:
        """Collective. After all ranks agreed: follow the parameters to another device."""
        labels = group_forms.device_labels(self.params.values())
        self.layout = self.layout.on_devices({index: labels[param.device] for index, param in self.params.items()})
        self._open_ring()
        if self._views is not None:
            self._views.relocate(self.layout, self.params)
        self.bind()
        self.state_is_behind = True

    def lies_as_placed(self) -> bool:
        """Whether all parameters lie in memory in the order in which they did when they were placed."""
        return self._memory.lies_as_placed(self.params)

    def check_lies_as_placed(self, call: str) -> None:
        """ValueError if not: DDP lays gradients out as the parameters lie when it is built, and so do pieces."""
        if self.lies_as_placed():
            return
        why = "a memory format was changed since. Call model.to(memory_format=...)"
        if self._views is not None and all(map(Tensor.is_contiguous, self.params.values())):
            why = "parameters_as_bucket_view made some contiguous. Drop it, or call model.to(memory_format="
            why += "torch.contiguous_format)"
        raise ValueError(
            f"{call} expects parameters that lie in memory as they did when the optimizer was built, but {why} before "
            "you build DDP and the optimizer."
        )

    def check_still_trained(self) -> None:
        """Raise if the model was given new parameters (``load_state_dict(assign=True)``) and trains without ours.

        Only with bucket views, where it would go unnoticed that the model no longer is what is gathered, and only
        when no parameter has a gradient: the search through the interpreter's objects is slow.
        """
        if self._in_module and not any(param.grad is not None for param in self.params.values()):
            check_in_a_module(next(iter(self.params.values())))

    def bind(self) -> None:
        """Follow the parameters to the memory that they have now, or bring them back into their bucket views."""
        for param in self._dtensors:
            param.follow()
        error = self.kind_error()
        if error is not None:
            raise error
        if self._views is not None:
            self._views.bind(self.params)
        for index in self.layout.cut_params:  # on every rank alike: a range of elements must be a range of memory
            if not self.params[index].is_contiguous():
                self.params[index].data = self.params[index].data.contiguous()
        self.pieces.bind()
        self.masters.bind(self.params, self._buffers)
        self._plan()

    def kind_error(self) -> RuntimeError | None:
        """What to raise if a parameter has another shape or dtype than when it was placed."""
        return group_forms.kind_error(self.layout.specs, self.params)

    def _plan(self) -> None:
        active = dict(zip(self.params, self.active, strict=True))
        self.plan = make_plan(
            self.layout, self.params, active, self.pieces, self.indices, self._buffers, self.wire, self._ring
        )
        self._memory.bind(self.params.values())

    @property
    def _buffers(self) -> Sequence[Tensor | None]:
        """Of bucket views, by bucket."""
        return self._views.buffers if self._views is not None else [None] * len(self.layout.buckets)

    # --- questions ------------------------------------------------------------------------------------------------

    def group_owners(self) -> list[list[int]]:
        """Per group, the ranks that have a piece of it: what a step writes into a group is written there."""
        owners: list[list[int]] = [[] for _ in self.indices]
        for rank in range(self.layout.world_size):
            for position in {self.layout.spec_of[piece.param].group for piece in self.layout.pieces(rank)}:
                owners[position].append(rank)
        return owners

    def devices_with_streams(self) -> list[torch.device]:
        """The devices of the parameters on which calls only enqueue."""
        return [device for device in dict.fromkeys(map(_device, self.params.values())) if has_streams(device)]

    def is_captured(self) -> bool:
        """Whether what is done with the parameters now goes into a graph."""
        first = next(iter(self.params.values()), None)
        return first is not None and is_capturing(first.device)

    def params_of(self, position: int) -> list[Tensor]:
        """The parameters of one bucket."""
        return list(map(self.params.__getitem__, self.layout.buckets[position].params))

    def blank_state(self, index: int, param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state that the optimizer would make for this rank's piece of a parameter."""
        tensor = self.pieces.tensors[index]
        blank = self.builder.blank_state(self.layout.spec_of[index], tensor, param_groups)
        return {**blank, "master_weight": torch.zeros_like(tensor)} if self.masters.keeps(index) else blank

    def master_weights(self, only: int | None = None) -> dict[int, Tensor]:
        """The float32 masters of this rank's pieces that were stepped, by parameter; ``only``: of one."""
        if self.masters and self.moved() and not self.has_left_its_device():
            self.bind()
        return self.masters.weights(only)

    def keeps_master(self, index: int) -> bool:
        """Whether this rank keeps a float32 master of its piece of a parameter."""
        return self.masters.keeps(index)

    def find_state_class(self, index: int, name: str) -> type | None:
        """The tensor subclass of that name which the optimizer makes as state: of a parameter, if no other."""
        like = self.params[index]
        if self.layout.spec_of[index].master != MasterMode.NONE.value:
            like = torch.empty_like(like, dtype=torch.float32)
        return self.builder.find_state_class(self.layout.spec_of[index], like, name)

    def facts(
        self, param_groups: Sequence[dict[str, Any]], further: dict[str, str] | None = None
    ) -> list[tuple[str, dict[str, str]]]:
        """What must be the same on every rank."""
        settings = {
            "optimizer_class": self.builder.class_name,
            "bucket_cap_mb": str(self._bucket_bytes / 2**20),
            "parameters_as_bucket_view": str(self._views is not None),
            "number of groups": str(len(param_groups)),
            "mesh": self.ranks.describe(),
            "rounding_seed": str(self.masters.settings.seed),
            **(further or {}),
        }
        if self._views is not None:  # what lies in its order in one buffer is gathered as it lies
            strides = ((index, dense_stride(param)) for index, param in self.params.items())
            settings["memory format of parameters"] = str({index: stride for index, stride in strides if stride})
        return [("argument", settings), *group_forms.facts_of(param_groups, self.layout.specs)]
