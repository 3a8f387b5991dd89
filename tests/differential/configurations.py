"""In which surroundings a program runs: a value for each axis, and arrays of them that cover all pairs or triples."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.differential.eight_bits import EightBits

HOOKS = ("hook", "interleaved", "hook scattering", "interleaved scattering")  # the step is made in backward
REDUCING = ("sharded", "under DDP", "bare hook", "hook scattering", "interleaved scattering")  # we reduce gradients
MODES = ("default", "views", "lazy", "sharded", "sharded lazy", "under DDP", "bare hook", *HOOKS)
SIXTEEN = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE = ("Adafactor", "Packed", "Peculiar")  # classes that need whole tensors
MASTERS: dict[str, Any] = {"float32": torch.float32, "remainder": "remainder", "stochastic": "stochastic"}


class Fails:
    """For an optimizer: its step raises when it is told to, before or after it has changed anything."""

    told = ""  # or "before", "after"

    def step(self, closure: Callable[[], Any] | None = None, **arguments: Any) -> Any:
        if Fails.told == "before":
            raise RuntimeError("the optimizer's own step failed")
        loss = super().step(closure, **arguments)  # type: ignore[misc]
        if Fails.told == "after":
            raise RuntimeError("the optimizer's own step failed")
        return loss


class Failing(Fails, torch.optim.AdamW):
    pass


class _Tempered(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


class Tempered(Fails, _Tempered):
    """SGD whose step takes an argument: no class of torch's."""


class Handmade(Optimizer):
    """An optimizer of the user's own: ``update`` changes the parameters of a group."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.update(group, [param for param in group["params"] if param.grad is not None])
        return loss

    def update(self, group: dict[str, Any], used: list[Tensor]) -> None:
        raise NotImplementedError


class SignMomentum(Handmade):
    """Has a count that is no tensor in its state."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def update(self, group: dict[str, Any], used: list[Tensor]) -> None:
        for param in used:
            state = self.state[param]
            state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 1 - group["beta"])
            state["count"] = state.get("count", 0) + 1
            param.sub_(state["mean"] * (group["lr"] / state["count"] ** 0.5))


class Packed(Handmade):
    """Its momentum is a tensor subclass, as torchao has: 8 bits and a scale for each row of elements."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, group: dict[str, Any], used: list[Tensor]) -> None:
        for param in used:
            state = self.state[param]
            before = state.get("momentum")
            full = before.unpacked() if isinstance(before, EightBits) else before
            momentum = param.grad.clone() if full is None else full * 0.9 + param.grad
            state["momentum"] = EightBits.of(momentum)
            param.sub_(momentum, alpha=group["lr"])


class Peculiar(Handmade):
    """Habits of other packages: whole tensors, numbers in groups, keys that are no texts, gradients taken away."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, group: dict[str, Any], used: list[Tensor]) -> None:
        if group["params"]:  # into an empty group it writes nothing
            group["steps"] = group.get("steps", 0) + 1
        for param in used:
            state = self.state[param]
            mean = state.setdefault(0, torch.zeros_like(param)).mul_(0.9).add_(param.grad)
            state["history"] = [*state.get("history", []), group["steps"]][-2:]
            param.sub_(mean * (group["lr"] / (1 + mean.abs().amax())))
            param.grad = None


# Class, options, options of the second group. Weight decay moves also what has a gradient of zero: a parameter that
# must be left alone shows.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.01, "betas": (0.8, 0.9)}),
    # (With foreach, the default on accelerators, Nesterov's momentum is added to the gradients of the pieces in place.)
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "foreach": False}, {"weight_decay": 0.05}),
    "Adam": (torch.optim.Adam, {"lr": torch.tensor(0.02), "foreach": False, "amsgrad": True}, {}),
    "fused": (torch.optim.AdamW, {"lr": 0.02, "fused": True}, {"weight_decay": 0.0}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}, {"lr": 0.03}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}, {"momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}, {"rho": 0.8, "weight_decay": 0.1}),
    "Failing": (Failing, {"lr": 0.02}, {"betas": (0.8, 0.9)}),
    "Tempered": (Tempered, {"lr": 0.05, "momentum": 0.8}, {"lr": 0.02}),
    "SignMomentum": (SignMomentum, {"lr": 0.05}, {"beta": 0.5}),
    "Packed": (Packed, {"lr": 0.05}, {"lr": 0.03}),
    "Peculiar": (Peculiar, {"lr": 0.05}, {"lr": 0.03}),
}


FAILING = ("Failing", "Tempered")


def optimizer_of(name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Class, options, options of the second group: copies, because options may be tensors."""
    if name == "ScheduleFree":
        import schedulefree

        return schedulefree.AdamWScheduleFree, {"lr": 0.02, "foreach": False}, {"weight_decay": 0.1}
    kind, options, others = OPTIMIZERS[name]
    return kind, copy.deepcopy(options), copy.deepcopy(others)


@dataclass(frozen=True)
class Configuration:
    """One value of every axis. The first of each is the default, which ``repr`` leaves out."""

    mode: str = "default"
    optimizer: str = "AdamW"
    precision: str = "float64"  # or "bfloat16 float32": the parameters, and the masters
    model: str = "plain"
    ranks: int = 2
    group: str = "first"  # of the processes: the first ones, the last ones, a mesh
    shard: str = "auto"
    cap: float | None = None  # MiB
    names: bool = False
    static_graph: bool = False
    find_unused: bool = False
    gradient_views: bool = False
    ddp_cap: float | None = None  # MiB
    memory_format: str = "contiguous"
    transport: str = "shared memory"
    reducing: str = "as it is"  # with sharded gradients: "one in flight", "six in flight", "at the end", "float32"
    groups: str = "two"  # of parameters, or "one"
    built: str = "last"  # or "first": before the model is wrapped and moved
    pace: str = "even"  # or "uneven": now and then a rank is late
    watch: str = "all"  # or "weights": ask for nothing that might help a step along; "time": monitors.py
    device: str = "cpu"

    def __repr__(self) -> str:
        changed = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if self._differs(one)]
        return f"Configuration({', '.join(changed)})"

    def _differs(self, field: Any) -> bool:
        return getattr(self, field.name) != field.default

    @property
    def uses_ddp(self) -> bool:
        return self.mode not in ("sharded", "sharded lazy")

    @property
    def steps_in_backward(self) -> bool:
        return self.mode in HOOKS

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed by us and not by DDP."""
        return self.mode in REDUCING or self.mode == "sharded lazy"

    @property
    def finds_unused(self) -> bool:
        """Whether a backward may leave parameters out."""
        return self.find_unused if self.uses_ddp or self.device != "cpu" else True

    @property
    def dtype(self) -> torch.dtype:
        return SIXTEEN.get(self.precision.split()[0], getattr(torch, self.precision.split()[0]))

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return torch.float32 if self.reducing == "float32" else None

    @property
    def masters(self) -> Any:
        """The argument ``master_weights``."""
        return MASTERS[self.precision.split()[1]] if " " in self.precision else None

    @property
    def mesh(self) -> tuple[int, ...] | None:
        """Its shape, if the ranks are a mesh."""
        if not self.group.startswith("mesh"):
            return None
        return {"mesh": (self.ranks,), "mesh replicated": (2, self.ranks // 2)}[self.group]

    # --- which operations it has: what is refused instead is in refusals.py ---------------------------------------

    @property
    def sixteen(self) -> bool:
        return self.precision.split()[0] in SIXTEEN

    @property
    def may_skip(self) -> bool:
        """Leave parts of the model out of a backward."""
        return self.finds_unused and not self.static_graph and self.model != "single"

    @property
    def may_accumulate(self) -> bool:
        return not self.static_graph  # (DDP does not know in no_sync that its first iteration is over)

    @property
    def may_clip(self) -> bool:
        return not self.steps_in_backward and not (self.sixteen and self.reduces)

    @property
    def may_scale(self) -> bool:
        return not self.steps_in_backward and not self.sixteen

    @property
    def may_join(self) -> bool:
        """A mesh of some of the processes does not go with DDP in Join; a schedule-free step is no plain one."""
        mesh = self.mesh is not None and self.uses_ddp and self.ranks < 4
        # (What a step of a rank without inputs writes into a group is lost with the next one: until issue 28.)
        steps = self.optimizer not in ("ScheduleFree", "Peculiar")
        return self.ranks > 1 and not mesh and not self.static_graph and steps

    @property
    def may_edit(self) -> bool:
        return self.masters in (None, torch.float32)  # "remainder" keeps the lower bits of what is changed

    @property
    def may_save_beside(self) -> bool:
        """Not parameters that are not contiguous: the thread that writes reads them before they are copied (a bug)."""
        return self.device == "cpu" or self.model != "odd"

    def bit_equal(self) -> bool:
        """Where the weights of DDP are promised to the bit.

        Gradients that we sum are added rank by rank, and gloo adds them in another order: two ranks are the most for
        which that is the same. (The simulated device adds rank by rank, whoever sums.) Fused kernels have a scalar
        tail that rounds otherwise; in 16 bits so have others.
        """
        sums = not self.reduces or (self.ranks <= 2 and self.mesh is None and self.reducing != "float32")
        sums = sums and not (self.reduces and self.precision.startswith("float16"))  # halves that underflow
        sums = sums and (self.device == "cpu" or self.ranks <= 2)
        rows = self.optimizer == "Adafactor" and self.memory_format == "channels_last"  # sums in the order of memory
        # A format that changes after the optimizer was built is undone by its step: convolutions then add otherwise.
        changed = self.built == "first" and self.memory_format != "contiguous"
        return sums and self.optimizer != "fused" and not rows and not changed


AXES: dict[str, tuple[Any, ...]] = {
    "mode": MODES,
    "optimizer": (*OPTIMIZERS, "ScheduleFree"),
    "precision": (
        "float64",
        "float32",
        "bfloat16 float32",
        "bfloat16 remainder",
        "float16 float32",
        "bfloat16 stochastic",
    ),
    "model": ("plain", "conv", "single", "odd", "two dtypes", "tied", "attention"),
    "ranks": (2, 3, 1, 4),
    "group": ("first", "last", "mesh", "mesh replicated"),
    "shard": ("auto", "element", "tensor"),
    "cap": (None, 0.0003, 0.002),
    "names": (False, True),
    "static_graph": (False, True),
    "find_unused": (False, True),
    "gradient_views": (False, True),
    "ddp_cap": (None, 0.0005),
    "memory_format": ("contiguous", "channels_last"),
    "transport": ("shared memory", "sockets"),
    "reducing": ("as it is", "one in flight", "six in flight", "at the end", "float32"),
    "built": ("last", "first"),
    "pace": ("even", "uneven"),
    "watch": ("all", "weights"),
}
SIMULATED: dict[str, tuple[Any, ...]] = {
    **AXES,
    "optimizer": ("AdamW", "SGD", "Adafactor", "Tempered"),
    "precision": ("float64", "bfloat16 float32", "bfloat16 remainder"),
    "model": ("plain", "odd", "two dtypes", "streams", "two devices"),  # (the device has no convolutions)
    "memory_format": ("contiguous",),
    "ranks": (2, 3, 1, 4),
    "group": ("first", "last", "mesh", "mesh replicated"),
    "transport": ("shared memory",),
    "device": ("sim",),
}


def invalid(c: Configuration) -> str:
    """Why these values do not go together; empty if they do. What is refused has rows of its own in refusals.py."""
    sixteen = c.sixteen
    rules = (
        (c.group == "mesh replicated" and c.ranks not in (2, 4), "two replicas need an even number of ranks"),
        (not c.uses_ddp and (c.static_graph or c.gradient_views or c.ddp_cap is not None), "an option of DDP"),
        (not c.uses_ddp and c.find_unused and c.device == "cpu", "on the CPU it has no effect without DDP"),
        (c.mode not in ("sharded", "sharded lazy") and c.reducing != "as it is", "an option of shard_gradients"),
        (c.uses_ddp and c.model == "two devices", "DDP wants all parameters on devices of one kind"),
        (c.built == "first" and c.model == "two devices", "refused: a model is spread over devices first"),
        (c.static_graph and c.find_unused, "DDP: a static graph finds unused parameters by itself"),
        (c.shard == "element" and c.optimizer in WHOLE, "refused: it needs whole tensors"),
        (c.optimizer in ("Adafactor", "Peculiar") and c.model == "odd", "it divides by the number of elements"),
        (c.optimizer == "Peculiar" and c.mode in HOOKS, "DDP writes gradients that a step inside of it took away"),
        (c.optimizer == "Peculiar" and c.group == "mesh replicated", "keys that are no texts cannot be divided"),
        (
            c.optimizer == "fused" and (c.model == "odd" or c.memory_format != "contiguous"),
            "torch's fused kernels take a gradient to lie in memory as its parameter does",
        ),
        (c.optimizer == "ScheduleFree" and c.built == "first" and c.memory_format != "contiguous", "train() undoes it"),
        (c.memory_format != "contiguous" and c.model != "conv", "no parameter has four dimensions"),
        (c.memory_format != "contiguous" and c.mode == "views", "refused, or made contiguous"),
        (c.memory_format != "contiguous" and c.built == "first" and c.mode in (*HOOKS, *REDUCING), "refused"),
        (sixteen and c.masters is None, "small updates are lost: nothing to compare with"),
        (sixteen and c.model == "two dtypes", "one dtype is 16 bits already"),
        (sixteen and c.optimizer in ("fused", "Tempered", "ScheduleFree", "Peculiar"), "not what copies by hand do"),
        (sixteen and c.reduces and (c.ranks > 2 or c.mesh), "sums of 16 bits in another order are other numbers"),
        (sixteen and c.device != "cpu" and c.ranks > 2, "the device adds rank by rank, the reference does not"),
        (sixteen and c.reducing == "float32", "the reference reduces in 16 bits"),
        (c.precision == "float32" and c.reduces and c.optimizer != "SGD", "last bits of float32 become first ones"),
        (c.precision == "float32" and c.model == "two dtypes", "one dtype is float32 already"),
        (c.model == "attention" and c.reduces and c.optimizer != "SGD", "gradients that are zero but for rounding"),
    )
    return next((reason for applies, reason in rules if applies), "")


def covering(axes: dict[str, tuple[Any, ...]], strength: int, seed: int) -> list[Configuration]:
    """Configurations in which every set of ``strength`` values that can be together is, at least once.

    Greedy: each row begins with a set that is missing and takes, of some random ways to fill it, the one with the most
    that are.
    """
    generator, names = random.Random(seed), list(axes)
    base = Configuration()
    missing = set()
    for chosen in combinations(names, strength):
        missing |= {tuple(zip(chosen, values, strict=True)) for values in _product(axes, chosen)}
    rows: list[Configuration] = []
    queue = sorted(missing, key=repr)
    generator.shuffle(queue)
    for wanted in queue:
        if wanted not in missing:
            continue
        tries = (_filled(base, axes, dict(wanted), generator) for _ in range(20 if strength == 2 else 8))
        found = [row for row in tries if row is not None]
        if not found:
            missing.discard(wanted)  # cannot be together, or hardly ever
            continue
        best = max(found, key=lambda row: len(_sets(row, names, strength) & missing))
        missing -= _sets(best, names, strength)
        rows.append(best)
    return rows


def _product(axes: dict[str, tuple[Any, ...]], chosen: tuple[str, ...]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for name in chosen:
        found = [(*one, value) for one in found for value in axes[name]]
    return found


def _sets(row: Configuration, names: list[str], strength: int) -> set[tuple[tuple[str, Any], ...]]:
    return {tuple((name, getattr(row, name)) for name in chosen) for chosen in combinations(names, strength)}


def _filled(
    base: Configuration, axes: dict[str, tuple[Any, ...]], fixed: dict[str, Any], generator: random.Random
) -> Configuration | None:
    """Random values for all that is not fixed, taken back to the defaults one by one while they do not go together."""
    others = [name for name in axes if name not in fixed]
    row = replace(base, **fixed, **{name: generator.choice(axes[name]) for name in others})
    generator.shuffle(others)
    for name in others:
        if not invalid(row):
            return row
        row = replace(row, **{name: axes[name][0]})
    return None if invalid(row) else row
