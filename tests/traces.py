"""What a call leaves behind in the process of a rank: what can be put back is, the rest is told.

A process with traces is not used again, so that every test starts as in a new one.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import types
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

# Whose constants are put back, in modules and classes.
_OURS = ("shardstep", "tests")
# In which functions and classes are compared: packages, and modules without what is in them.
_WATCHED = ("shardstep", "torch.distributed", "torch.nn.parallel")
_WATCHED_ALONE = ("torch", "torch.optim", "torch.autograd", "torch.multiprocessing", "os", "time", "gc", "threading")
_WATCHED_CLASSES = (torch.Tensor, torch.nn.Module, DistributedDataParallel, Optimizer)
_PLAIN = (bool, int, float, str, bytes, tuple, type(None))
_CONTAINERS = (list, dict, set)
_PATCHABLE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Nothing of these outlives a call (but see ``_let_go_of_ddp``).
_SHORT_LIVED = (DistributedDataParallel, Optimizer, torch.nn.Module)


class Attribute(NamedTuple):
    """What a module, or a class in it, has under a name."""

    owner: Any
    name: str
    value: Any

    def is_as_it_was(self) -> bool:
        now = vars(self.owner).get(self.name)
        return now is self.value or _is_same(unhooked(now), self.value)


class Contents(NamedTuple):
    """A container of a test: one that grows is the same one."""

    name: str
    container: Any
    size: int


Watched = dict[str, tuple[list[Attribute], list[Contents]]]  # by module


def watch() -> Watched:
    """Of what torch and we are made of."""
    return {name: _attributes(sys.modules[name]) for name in _watched_modules()}


class Start:
    """How a process is before its first call.

    ``watched``: of ``watch()``, if somebody has looked already and nothing was called since.
    """

    def __init__(self, watched: Watched | None = None) -> None:
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        self._random = np.random.get_state()
        self._filters = list(warnings.filters)
        self._settings = _settings()
        self._watched = dict(watch() if watched is None else watched)
        self._constants: list[Attribute] = []  # of ours
        self._modules = 0  # how many there were at the last look

    def watch_tests(self) -> None:
        """A module of tests was imported, and nothing in it was called yet."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        for name in _watched_modules(("tests",)):
            if name not in self._watched:
                self._watched[name] = _attributes(sys.modules[name])
        ours = (self._watched.get(name, ([], []))[0] for name in _watched_modules(_OURS))
        self._constants = [one for found in ours for one in found if type(one.value) in _PLAIN]

    def restore(self) -> str:
        """Put back what is easily put back; what is not as it was before, or an empty string."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._directory)
        np.random.set_state(self._random)
        warnings.filters[:] = self._filters
        warnings._filters_mutated()  # type: ignore[attr-defined]  # what warns once, warns again
        torch.set_num_threads(self._settings["threads"])
        for owner, name, value in self._constants:
            if not _is_same(vars(owner).get(name), value):
                setattr(owner, name, value)
        _let_go_of_ddp()
        gc.collect()
        return self._difference()

    def _difference(self) -> str:
        for name, value in _settings().items():
            if value != self._settings[name]:
                return f"{name}: {value!r}, was {self._settings[name]!r}"
        for module, (attributes, contents) in self._watched.items():
            if attributes and sys.modules.get(module) is not attributes[0].owner:
                return f"the module {module} is another"
            for one in attributes:
                if not one.is_as_it_was():
                    return f"{one.name} of {one.owner!r} is another"
            for name, container, size in contents:
                if len(container) != size:
                    return f"{module}.{name} has {len(container)} elements, had {size}"
        if dist.is_initialized():
            return "a process group"
        kept = next((thing for thing in gc.get_objects() if issubclass(type(thing), _SHORT_LIVED)), None)
        return "" if kept is None else f"a {type(kept).__qualname__}"


def _let_go_of_ddp() -> None:
    """A DDP module with a hook that knows the module is never collected: its reducer, in C++, holds the hook."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    for module in modules:
        for name in ("reducer", "logger"):
            module.__dict__.pop(name, None)


def _settings() -> dict[str, Any]:
    """What tests and libraries set for a whole process."""
    root = logging.getLogger()
    loggers = [root, *(logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger))]
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision": torch.get_float32_matmul_precision(),
        "flush": torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item(),
        "swaps": torch.__future__.get_swap_module_params_on_conversion(),
        "overwrites": torch.__future__.get_overwrite_module_params_on_conversion(),
        "hooks of optimizers": (
            list(torch_optimizer._global_optimizer_pre_hooks),
            list(torch_optimizer._global_optimizer_post_hooks),
        ),
        "hooks of modules": [
            list(value)
            for name, value in vars(nn_module).items()
            if name.startswith("_global_") and isinstance(value, dict)
        ],
        "modes": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
        "compiled": sum(map(len, torch._dynamo.utils.counters.values())),
        "accelerate": _is_accelerated(),
        "serialization": len(torch.serialization.get_safe_globals()),
        "handlers": [
            (logger.name, list(logger.handlers), logger.level, logger.disabled)
            for logger in loggers
            if logger is root or (logger.name.startswith(_WATCHED) and (logger.handlers or logger.level))
        ],
        "threads of Python": [
            thread.name for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
        ],
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "profiling": (sys.getprofile(), sys.gettrace()),
        "directory": os.getcwd(),
    }


def _is_accelerated() -> bool:
    """Accelerate knows the ranks of the first group that it saw."""
    states = sys.modules.get("accelerate.state")
    return states is not None and bool(states.PartialState._shared_state)


def _watched_modules(roots: tuple[str, ...] = (*_WATCHED, *_WATCHED_ALONE)) -> list[str]:
    def is_watched(name: str) -> bool:
        return name in roots or any(name.startswith(f"{root}.") for root in roots if root not in _WATCHED_ALONE)

    return [name for name, module in sys.modules.items() if module is not None and is_watched(name)]


def _attributes(module: Any) -> tuple[list[Attribute], list[Contents]]:
    """The functions and classes of a module; if it is ours, also its constants and what its classes are made of."""
    ours = module.__name__.partition(".")[0] in _OURS
    kinds = _PATCHABLE + _PLAIN + _CONTAINERS if ours else _PATCHABLE
    found = [
        Attribute(module, name, value)
        for name, value in vars(module).items()
        if name[:2] != "__" and issubclass(type(value), kinds)
    ]
    classes = [
        value
        for _, _, value in found
        if isinstance(value, type) and (value in _WATCHED_CLASSES or (ours and value.__module__ == module.__name__))
    ]
    for kind in classes:
        found += [Attribute(kind, name, unhooked(part)) for name, part in vars(kind).items() if name[:2] != "__"]
    containers = [one for one in found if type(one.value) in _CONTAINERS] if module.__name__.startswith("tests") else []
    return found, [Contents(name, value, len(value)) for _, name, value in containers]


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(before) in _PLAIN and type(now) is type(before) and now == before)


def unhooked(part: Any) -> Any:
    """Torch wraps the step of every class of optimizers when the first one is made."""
    return part.__wrapped__ if getattr(part, "hooked", False) else part
