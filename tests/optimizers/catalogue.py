"""Every optimizer class that some well-known packages export, found by introspection, and how each is built.

A class is in if it is a public name of its package and not one of torch's own. Nothing is said here about what
shardstep makes of it: ``test_sweep.py`` finds that out.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

# Module with the classes -> the distribution that has it.
PACKAGES = {
    "bitsandbytes.optim": "bitsandbytes",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
    "torchao.optim": "torchao",
    "heavyball": "heavyball",
}

# Options without which a class cannot be built, or does nothing on tensors and runs as small as these.
OPTIONS: dict[str, dict[str, Any]] = {
    "bitsandbytes.optim.LARS": {"lr": 0.01, "momentum": 0.9},  # lr has no default, and it refuses momentum 0
    "bitsandbytes.optim.LARS8bit": {"lr": 0.01, "momentum": 0.9},
    "bitsandbytes.optim.LARS32bit": {"lr": 0.01, "momentum": 0.9},
    "bitsandbytes.optim.SGD": {"lr": 0.01, "momentum": 0.9},
    "bitsandbytes.optim.SGD8bit": {"lr": 0.01, "momentum": 0.9},
    "bitsandbytes.optim.SGD32bit": {"lr": 0.01, "momentum": 0.9},
    "schedulefree.RAdamScheduleFree": {"silent_sgd_phase": False},  # or it does nothing in the first steps
    "schedulefree.RAdamScheduleFreeClosure": {"silent_sgd_phase": False},
    "pytorch_optimizer.AdaShift": {"keep_num": 2},  # as many gradients it waits for; the default is 10
    "pytorch_optimizer.BSAM": {"num_data": 100},  # how many samples there are: no default
    "pytorch_optimizer.Ranger21": {"num_iterations": 100},  # how long training is: no default
}
# Options that each group must say for itself: the one with the matrices, and the one with the rest.
GROUP_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"pytorch_optimizer.{name}": ({"use_muon": True}, {"use_muon": False})
    for name in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
}
# Without a rank these are AdamW; with one they want to know all the rest.
_PROJECTED = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
GROUP_OPTIONS |= {f"pytorch_optimizer.{name}": (_PROJECTED, {}) for name in ("APOLLO", "Fira", "GaLore")}


class Subject(NamedTuple):
    """One class, by the names under which it is found."""

    package: str
    name: str

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"

    @property
    def cls(self) -> Any:
        return getattr(importlib.import_module(self.package), self.name)

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS.get(str(self), {})

    @property
    def group_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return GROUP_OPTIONS.get(str(self), ({}, {}))


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def version_of(package: str) -> str:
    return importlib.metadata.version(PACKAGES[package])


def subjects() -> list[Subject]:
    """All classes of the packages that are installed, each once, by the first of its names."""
    return [Subject(package, name) for package in PACKAGES if is_installed(package) for name in _names(package)]


def _names(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    seen = set()
    for name in sorted(name for name in vars(module) if not name.startswith("_")):
        value = getattr(module, name)
        if not (inspect.isclass(value) and issubclass(value, Optimizer)) or value in seen:
            continue
        if not value.__module__.startswith("torch."):  # torch's own, passed on: tests/contract
            seen.add(value)
            yield name


def wraps(subject: Subject) -> str:
    """What the class takes instead of, or besides, parameters, if it does: an optimizer or a model. Else nothing."""
    known = inspect.signature(subject.cls).parameters
    taken = [name for name in known if name in ("model", "specs") or "optimizer" in name]
    if taken:
        return f"takes `{taken[0]}`"
    return "" if "params" in known else f"takes `{next(iter(known))}`"


def is_abstract(subject: Subject) -> bool:
    """Whether the class is there to be derived from: its options are one required dict, as in torch's own base."""
    defaults = inspect.signature(subject.cls).parameters.get("defaults")
    return defaults is not None and defaults.default is inspect.Parameter.empty


def switch_off_compilers() -> None:
    """Both heavyball and torchao compile their steps, for every shape: hours in a sweep, and not what it is about."""
    torch.compiler.set_stance("force_eager")
    if is_installed("heavyball"):
        importlib.import_module("heavyball.utils").compile_mode = None
