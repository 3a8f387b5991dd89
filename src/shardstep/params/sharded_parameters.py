"""Where everything of one optimizer is on this rank: layout, pieces, bucket views, exchanges.

The layout says who owns what; a placement is the layout made real on one rank, and kept real when groups are added,
parameters are frozen, or their memory is replaced.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm import collectives
from shardstep.comm.codec import dtype_name
from shardstep.comm.collectives import Group
from shardstep.comm.shared_memory import MAX_IN_FLIGHT, Mailboxes, open_mailboxes
from shardstep.layout import partition
from shardstep.layout.specs import Bucket, Layout
from shardstep.params import groups as group_forms
from shardstep.params import tensor_subclasses
from shardstep.params.all_gather import BucketViews, Exchange, Shard
from shardstep.params.local_optimizer import (
    inner_optimizers,
    options_of,
    run_step,
    step_subset,
    undisturbed,
    unhooked_step,
)
from shardstep.params.probe import Verdict, examine

_requires_grad = attrgetter("requires_grad")


class Placement:
    """The layout of one optimizer and what this rank holds of it."""

    def __init__(
        self,
        group: Group,
        optimizer_class: Callable[..., Optimizer],
        defaults: dict[str, Any],
        granularity: str,
        bucket_cap_mb: float,
        views: bool,
        apart: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        _check_optimizer_class(optimizer_class)
        if not isinstance(bucket_cap_mb, (int, float)) or not 0 < bucket_cap_mb < float("inf"):
            raise ValueError(f"bucket_cap_mb expects a size above 0 in MiB but got {bucket_cap_mb!r}. Use 25.")
        self._group: Group = group
        self.wire: Group = group  # through which parameters are gathered
        self._optimizer_class = optimizer_class
        self._defaults = defaults
        self._bucket_bytes = max(int(bucket_cap_mb * 2**20), 1)
        self._reduce_itemsize = reduce_dtype.itemsize if reduce_dtype is not None else None
        self.default_granularity = granularity
        self.layout = Layout(group.world_size)
        self.params: dict[int, Tensor] = {}
        self.index_of: dict[Tensor, int] = {}
        self.shard = Shard(group.rank, apart)
        self.active: list[bool] = []
        self.exchanges: list[Exchange | None] = []
        self.started = 0  # exchanges so far
        self.active_buckets: list[int] = []
        self.indices: list[list[int]] = []  # per group: the parameters whose piece the local optimizer steps
        self._verdicts: list[Verdict] = []  # per group
        self._views = BucketViews() if views else None
        self._mailboxes: Mailboxes | None = None
        self._subsets: list[dict[int, dict[str, list]]] = []
        self._owns_active = False
        self._in_module = False  # known with bucket views only
        self._matrices: list[Tensor] = []  # parameters of which the strides can change
        self._pointers: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        self._orders: dict[int, tuple[int, ...] | None] = {}  # how parameters lay in memory when they were placed
        self._probed: dict[str, Verdict] = {}
        self._options: list[dict[str, Any]] = []  # per group, as the user gave them
        self._state_classes: dict[str, type] = {}  # tensor subclasses that the optimizer makes as state, by name

    # --- making and extending -------------------------------------------------------------------------------------

    def build(
        self,
        param_groups: Sequence[dict[str, Any]],
        granularities: Sequence[str],
        given: Sequence[dict[str, Any]],
    ) -> Optimizer:
        """Place all groups and make the local optimizer over this rank's pieces.

        ``given``: the groups as the user gave them. What a group does not say, the optimizer itself fills in: some have
        other defaults for some groups (Muon).
        """
        self._options = options = [options_of(group) for group in given]
        rows = zip(param_groups, granularities, options, strict=True)
        self._place(param_groups, [self._choose(group, wish, said) for group, wish, said in rows])
        local_groups = [self._local_group(group, said) for group, said in zip(param_groups, options, strict=True)]
        try:
            optimizer = self._optimizer_class(local_groups, **self._defaults)
        except (AttributeError, IndexError, KeyError) as error:  # not about what the user chose, which it would tell
            raise ValueError(
                f"{getattr(self._optimizer_class, '__name__', self._optimizer_class)} cannot be sharded: building it "
                f"over parameter groups failed ({type(error).__name__}: {error}). Use an optimizer that takes groups."
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer_class expects to build a torch.optim.Optimizer but built a {type(optimizer).__qualname__}. "
                "Pass the class of an optimizer, e.g. torch.optim.AdamW."
            )
        for name, inner in inner_optimizers(optimizer):
            raise ValueError(
                f"{type(optimizer).__qualname__} cannot be sharded: it has a {type(inner).__qualname__} of its own "
                f"inside (.{name}), whose state would not be sharded and not be saved. Use another optimizer."
            )
        return optimizer

    def extend(
        self,
        optimizer: Optimizer,
        param_groups: Sequence[dict[str, Any]],
        granularity: str,
        given: dict[str, Any],
    ) -> None:
        """Place the last group of ``param_groups`` and give this rank's pieces of it to the local optimizer."""
        position, options = len(param_groups) - 1, options_of(given)
        chosen = self._choose(param_groups[position], granularity, options)
        self._options.append(options)
        self._place(param_groups, [chosen] * len(param_groups))
        optimizer.add_param_group(self._local_group(param_groups[position], options))

    def retract(self, optimizer: Optimizer, count: int) -> None:
        """Undo ``extend``: keep the first ``count`` groups. Nothing was moved yet, so nothing moves back."""
        del optimizer.param_groups[count:], self.indices[count:], self._verdicts[count:], self._options[count:]
        kept = tuple(spec for spec in self.layout.specs if spec.group < count)
        gone = [spec.index for spec in self.layout.specs if spec.group >= count]
        buckets = tuple(bucket for bucket in self.layout.buckets if not set(bucket.params) & set(gone))
        self.layout = replace(self.layout, specs=kept, buckets=buckets)
        for index in gone:
            if index in self.shard.tensors:
                optimizer.state.pop(self.shard.tensors[index], None)
            self.index_of.pop(self.params.pop(index))
            self._orders.pop(index)
        self.shard.forget(gone)

    def gather_through(self, group: Group) -> None:
        """Gather through another process group of the same ranks."""
        self.wire = group

    def settle(self) -> None:
        """After all ranks agreed: move the parameters into their views and plan the exchanges."""
        self.active = self.active_now()
        self._open_mailboxes()
        if self._views is not None:
            self._views.extend(self.layout, self.params)
            self._in_module = bool(self.params) and _is_in_a_module(next(iter(self.params.values())))
        self.bind()

    def _open_mailboxes(self) -> None:
        """Shared memory for the buckets that no single parameter makes larger than the cap."""
        group = self.wire
        if group.world_size == 1 or not all(collectives.sends_pairwise(group, p.device) for p in self.params.values()):
            return
        small = [bucket.numel * bucket.itemsize for bucket in self.layout.buckets if self.is_small(bucket)]
        if not small:
            return
        in_flight, boxes = min(len(small), MAX_IN_FLIGHT), self._mailboxes
        if boxes is None or boxes.slot_bytes < max(small) or boxes.in_flight < in_flight:
            self._mailboxes = open_mailboxes(group, in_flight, max(small))

    def is_small(self, bucket: Bucket) -> bool:
        """Whether the bucket is not larger than the cap. (Padding may exceed it a little.)"""
        return bucket.numel * bucket.itemsize <= self._bucket_bytes * 1.01

    def _choose(self, group: dict[str, Any], wish: str, options: dict[str, Any]) -> str:
        """The granularity of a group: what the user wished, checked, or what the probe says."""
        like = group_forms.first_floating(group["params"])
        if like is None:
            self._verdicts.append(Verdict(False, True, "it has nothing to probe"))
            return "tensor"
        key = repr((_shape_of_options(options), like.dtype, like.device, wish == "tensor"))
        if key not in self._probed:
            self._probed[key] = examine(self._optimizer_class, self._defaults, options, like, vouched=wish == "tensor")
        verdict = self._probed[key]
        if wish == "element" and not verdict.elementwise:
            raise ValueError(
                f"shard='element' expects an element-wise optimizer, but for {self._optimizer_class.__name__} "
                f"{verdict.reason}. Use shard='tensor' or 'auto'."
            )
        self._verdicts.append(verdict)
        return "element" if verdict.elementwise and wish != "tensor" else "tensor"

    def _place(self, param_groups: Sequence[dict[str, Any]], granularities: Sequence[str]) -> None:
        found = group_forms.specs_of(param_groups, granularities, list(self.params.values()))
        group_forms.check_apart({**self.params, **{index: param for index, (_, param) in found.items()}})
        specs = [spec for spec, _ in found.values()]
        self.layout = partition.extend(self.layout, specs, self._bucket_bytes, self._reduce_itemsize)
        self.params.update((index, param) for index, (_, param) in found.items())
        self.index_of.update((param, index) for index, (_, param) in found.items())
        self._orders.update((index, memory_order(param)) for index, (_, param) in found.items())
        self.shard.extend(self.layout, self.params)

    def _local_group(self, group: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        indices = [self.index_of[param] for param in group["params"]]
        owned = [index for index in indices if index in self.shard.tensors]
        self.indices.append(owned)
        local = {**options, "params": [self.shard.tensors[index] for index in owned]}
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
        return f"requires_grad of {spec.label} went from {before} to {after} on rank {self._group.rank}"

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
        """Whether a parameter has other memory than at the last ``bind``, or lies otherwise in it. Passes in C."""
        return (
            list(map(Tensor.data_ptr, self.params.values())) != self._pointers
            or list(map(Tensor.stride, self._matrices)) != self._strides
        )

    def check_still_trained(self) -> None:
        """Raise if the model was given new parameters (``load_state_dict(assign=True)``) and trains without ours.

        Only with bucket views, where it would go unnoticed that the model no longer is what is gathered, and only
        when no parameter has a gradient: the search through the interpreter's objects is slow.
        """
        if not self._in_module or any(param.grad is not None for param in self.params.values()):
            return
        if not _is_in_a_module(next(iter(self.params.values()))):
            raise RuntimeError(
                "step expects gradients on the parameters that the optimizer was built with, but none has one and "
                "their module now holds other parameters (load_state_dict(assign=True) replaces them). Build the "
                "optimizer again after replacing parameters, or load with assign=False."
            )

    def bind(self) -> None:
        """Follow the parameters to the memory that they have now, or bring them back into their bucket views."""
        error = self.kind_error()
        if error is not None:
            raise error
        if self._views is not None:
            self._views.bind(self.params)
        for index in self.layout.cut_params:  # on every rank alike: a range of elements must be a range of memory
            if not self.params[index].is_contiguous():
                self.params[index].data = self.params[index].data.contiguous()
        self.shard.bind()
        self._plan()

    def kind_error(self) -> RuntimeError | None:
        """What to raise if a parameter has another shape, dtype or device type than when it was placed."""
        for spec in self.layout.specs:
            param = self.params[spec.index]
            now = tuple(param.shape), dtype_name(param.dtype), param.device.type
            then = spec.shape, spec.dtype, spec.device.split("#")[0]
            if now != then:
                return RuntimeError(
                    f"{spec.label} expects to stay as it was when the optimizer was built (shape {then[0]}, {then[1]}, "
                    f"{then[2]}), but it is now (shape {now[0]}, {now[1]}, {now[2]}). Convert the model first and "
                    "build the optimizer afterwards."
                )
        return None

    def _plan(self) -> None:
        """What a step has to do, bucket by bucket."""
        active = dict(zip(self.params, self.active, strict=True))
        buckets = self.layout.buckets
        buffers = self._views.buffers if self._views is not None else [None] * len(buckets)
        self.active_buckets = [b.position for b in buckets if any(active[index] for index in b.params)]
        self.exchanges = [None] * len(buckets)
        if self._group.world_size > 1:
            for position in self.active_buckets:
                exchange = Exchange(
                    buckets[position], self.params, active, self.wire, buffers[position], self._mailboxes
                )
                self.exchanges[position] = None if exchange.empty else exchange
        self._subsets = self._divide_by_bucket()
        self._owns_active = any(self._subsets[position] for position in self.active_buckets)
        self._pointers = list(map(Tensor.data_ptr, self.params.values()))
        self._matrices = [param for param in self.params.values() if param.dim() > 1]
        self._strides = list(map(Tensor.stride, self._matrices))

    def _divide_by_bucket(self) -> list[dict[int, dict[str, list]]]:
        """By bucket: this rank's pieces, and their names, of the groups that have some in it.

        A group of which this rank has nothing comes along empty in the first step: some optimizers write into it.
        """
        subsets: list[dict[int, dict[str, list]]] = [{} for _ in self.layout.buckets]
        for position, indices in enumerate(self.indices):
            named = any(self.layout.spec_of[index].name is not None for index in indices)
            for index in indices:
                new: dict[str, list] = {"params": [], "param_names": []} if named else {"params": []}
                part = subsets[self.shard.pieces[index].bucket].setdefault(position, new)
                part["params"].append(self.shard.tensors[index])
                if named:
                    part["param_names"].append(self.layout.spec_of[index].name)
        first = next((subsets[bucket] for bucket in self.active_buckets if subsets[bucket]), None)
        if first is not None:
            first |= {position: {"params": []} for position, indices in enumerate(self.indices) if not indices}
        return subsets

    @property
    def has_eager_state(self) -> bool:
        """Whether the optimizer makes state when it is built."""
        return any(verdict.eager for verdict in self._verdicts)

    def group_owners(self) -> list[list[int]]:
        """Per group, the ranks that have a piece of it: what a step writes into a group is written there."""
        owners: list[list[int]] = [[] for _ in self.indices]
        for rank in range(self.layout.world_size):
            for position in {self.layout.spec_of[piece.param].group for piece in self.layout.pieces(rank)}:
                owners[position].append(rank)
        return owners

    def given_options(self, position: int) -> set[str]:
        """The options that the user gave a group."""
        return set(self._options[position])

    @property
    def consumes(self) -> bool:
        """Whether a step of the optimizer takes the gradients away."""
        return any(verdict.consumes for verdict in self._verdicts)

    @property
    def moves_first(self) -> bool:
        """Whether a step moves the parameters before it calls the closure."""
        return any(verdict.moves_first for verdict in self._verdicts)

    @property
    def notes(self) -> set[str]:
        """Options in which the optimizer notes which parameters it has: each rank's own."""
        return {key for verdict in self._verdicts for key in verdict.notes}

    @property
    def splits(self) -> bool:
        """Whether a step goes bucket by bucket. A rank that owns nothing active steps its empty groups once instead."""
        return self._owns_active and self.splittable

    @property
    def splittable(self) -> bool:
        """Whether the optimizer may be stepped bucket by bucket: the same on every rank."""
        return all(verdict.splittable for verdict in self._verdicts)

    def lies_as_placed(self) -> bool:
        """Whether all parameters lie in memory in the order in which they did when they were placed."""
        if all(map(Tensor.is_contiguous, self.params.values())) and not any(self._orders.values()):
            return True
        return all(memory_order(param) == self._orders[index] for index, param in self.params.items())

    def params_of(self, position: int) -> list[Tensor]:
        """The parameters of one bucket."""
        return [self.params[index] for index in self.layout.buckets[position].params]

    # --- stepping -------------------------------------------------------------------------------------------------

    def update_bucket(self, optimizer: Optimizer, position: int) -> None:
        """Step this rank's pieces of one bucket."""
        subset = self._subsets[position]
        if subset:
            with step_subset(optimizer, subset):
                unhooked_step(optimizer)()

    # --- agreement, copies ----------------------------------------------------------------------------------------

    def facts(
        self, param_groups: Sequence[dict[str, Any]], further: dict[str, str] | None = None
    ) -> list[tuple[str, dict[str, str]]]:
        """What must be the same on every rank."""
        settings = {
            "optimizer_class": getattr(self._optimizer_class, "__qualname__", repr(self._optimizer_class)),
            "bucket_cap_mb": str(self._bucket_bytes / 2**20),
            "parameters_as_bucket_view": str(self._views is not None),
            "number of groups": str(len(param_groups)),
            **(further or {}),
        }
        return [("argument", settings), *group_forms.facts_of(param_groups, self.layout.specs)]

    def fresh_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """The local optimizer as it would be newly built: for optimizers that make state when they are built."""
        return self._optimizer_class([dict(group) for group in param_groups], **copy.deepcopy(self._defaults))

    def blank_state(self, index: int, like: Tensor, param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state that the optimizer would make for a parameter, or a piece, like ``like``.

        A twin of the optimizer makes it, for a copy that is thrown away.
        """
        spec = self.layout.spec_of[index]
        scratch = torch.nn.Parameter(torch.zeros_like(like))
        scratch.grad = torch.zeros_like(scratch)
        options = {**copy.deepcopy(options_of(param_groups[spec.group])), "params": [scratch]}
        if spec.name is not None:
            options["param_names"] = [spec.name]
        with undisturbed(like.device):
            twin = self.fresh_optimizer([options])
            run_step(twin, lambda: scratch.grad.sum())  # type: ignore[union-attr]
        return dict(twin.state.get(scratch, {}))

    def find_state_class(self, index: int, name: str) -> type | None:
        """The tensor subclass of that name which the optimizer makes as state: of a parameter, if no other."""
        for found in (kind for verdict in self._verdicts for kind in verdict.subclasses):
            self._state_classes[tensor_subclasses.name_of(found)] = found
        if name not in self._state_classes:
            try:
                blank = self.blank_state(index, self.params[index], self._options)
            except Exception:  # it cannot be asked so: then it is not known to make any
                return None
            for found in tensor_subclasses.classes_in(blank):
                self._state_classes[tensor_subclasses.name_of(found)] = found
        return self._state_classes.get(name)

    def portable(self) -> Placement:
        """A twin without the process group and what hangs on it, for copy and pickle."""
        twin = copy.copy(self)
        twin._group = twin.wire = None  # type: ignore[assignment]
        twin.exchanges, twin._subsets = [], []
        twin._matrices, twin.index_of = [], {}
        twin._mailboxes = None  # a copy may be made on one rank only, so it cannot open any
        twin._views = BucketViews() if self._views is not None else None  # made anew: copies share no memory
        return twin

    def revive(self, group: Group) -> None:
        """After copy or pickle: bind the copied pieces to the copied parameters."""
        if group.world_size != self.layout.world_size:
            raise RuntimeError(
                f"a pickled optimizer expects the {self.layout.world_size} ranks it was made on but got "
                f"{group.world_size}. Use consolidate_state_dict and load_state_dict to change the number of ranks."
            )
        self._group = self.wire = group
        self.index_of = {param: index for index, param in self.params.items()}
        if self._views is not None:
            self._views.extend(self.layout, self.params)
        self.bind()


def memory_order(param: Tensor) -> tuple[int, ...] | None:
    """How the elements of a parameter lie in memory; None: in their own order."""
    if param.is_contiguous():
        return None
    return tuple(stride for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)


def _check_optimizer_class(optimizer_class: Any) -> None:
    if isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer):
        raise ValueError(
            f"optimizer_class expects a subclass of torch.optim.Optimizer but got {optimizer_class.__qualname__}. "
            "Functional optimizers are not needed here: pass the ordinary class."
        )
    if not callable(optimizer_class):
        raise TypeError(f"optimizer_class expects a class but got {optimizer_class!r}. Pass e.g. torch.optim.AdamW.")


def _is_in_a_module(param: Tensor) -> bool:
    """Whether some module has ``param`` as its parameter."""
    for holder in gc.get_referrers(param):
        if isinstance(holder, dict):
            for owner in gc.get_referrers(holder):
                # The attributes of an object are found as the object itself or as their dict.
                attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
                if attributes.get("_parameters") is holder:
                    return True
    return False


def _shape_of_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options with numbers reduced to zero or not: groups that differ in a learning rate need one probe."""

    def reduce(value: Any) -> Any:
        if isinstance(value, float):
            return value != 0
        return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value

    return {key: reduce(value) for key, value in options.items()}
