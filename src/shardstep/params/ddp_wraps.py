"""A model that is wrapped in DDP although the optimizer reduces its gradients itself: told, with the way round.

Both would reduce: weights silently wrong. The wrapper may be there when the optimizer is built
(``model_search.py`` finds it), or come later, from a framework or by hand. torch tells whoever asks that a module gets
a submodule (``register_module_module_registration_hook``), and DDP takes the model as its submodule before it sends
anything: so it is told at the wrap. That costs nothing in a step: no module is built there.

What to do instead depends on who wraps. Frameworks are recognised by the names of the modules on the call stack, which
is looked at only when the error is raised.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep.params.model_search import ddp_modules_of
from shardstep.params.sharded_parameters import ShardedParameters

_UNDER_DDP = "drop shard_gradients and call shardstep.shard_ddp_gradients({}) {}"
# By the first names of modules, outermost first: the Trainer uses Accelerate, Lightning uses Fabric.
_WAYS_ROUND = {
    ("transformers",): "In HF's Trainer: drop shard_gradients and add "
    "shardstep.integrations.transformers.ShardstepCallback(shard_gradients=True); or "
    + _UNDER_DDP.format("trainer.model_wrapped, optimizer", "in a callback's on_train_begin"),
    ("accelerate",): "With Accelerate: give accelerator.prepare everything but the model "
    "(accelerator.prepare_model(model, evaluation_mode=True) moves it and does not wrap it); or "
    + _UNDER_DDP.format("model, optimizer", "after prepare"),
    ("ignite",): "With Ignite: do not use idist.auto_model; or " + _UNDER_DDP.format("ddp, optimizer", "after it"),
    ("lightning.pytorch", "pytorch_lightning"): "In Lightning: "
    "Trainer(strategy=shardstep.integrations.lightning.ShardedStrategy()) does not wrap; or "
    + _UNDER_DDP.format("self.trainer.model, optimizer", "in on_train_start"),
    ("lightning.fabric", "lightning_fabric"): "With Fabric: "
    "Fabric(strategy=shardstep.integrations.fabric.ShardedStrategy()) does not wrap; or give fabric.setup_optimizers "
    "the optimizer alone, and move the model with fabric.to_device; or "
    + _UNDER_DDP.format("ddp, optimizer", "after fabric.setup, with the DDP module that it has made"),
}
_BY_HAND = "Do not wrap the model; or " + _UNDER_DDP.format("ddp, optimizer", "after the wrap")


def check_not_in_ddp(params: Iterable[Tensor]) -> None:
    """ValueError if DistributedDataParallel reduces the gradients of these parameters already."""
    if ddp_modules_of(params):
        raise _reduced_twice("its parameters are in a DistributedDataParallel module")


def refuse_wraps_of(sharded: ShardedParameters) -> None:
    """From now on, while these live: whoever wraps one of the parameters in DDP gets a ValueError."""
    watched_parameters().add(sharded)


@functools.cache  # once per process
def watched_parameters() -> weakref.WeakSet[ShardedParameters]:
    """Those that nobody may wrap. The hook stays when they are gone: the collector must not change torch's hooks.

    (It may run in the middle of torch's loop over them.)
    """
    watched: weakref.WeakSet[ShardedParameters] = weakref.WeakSet()

    def on_submodule(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is None or not isinstance(module, DistributedDataParallel) or not _owners(watched, submodule):
            return
        gc.collect()  # perhaps nobody has the optimizer any more
        owners = _owners(watched, submodule)
        if owners:
            raise _reduced_twice(
                f"this wraps parameters of {' and '.join(map(describe, owners))} in DistributedDataParallel",
                " (If that is an earlier optimizer, which is not to train them any more, delete it first.)",
            )

    register_module_module_registration_hook(on_submodule)
    return watched


def _owners(watched: weakref.WeakSet[ShardedParameters], model: nn.Module) -> list[ShardedParameters]:
    params = list(model.parameters())
    return [sharded for sharded in watched if any(param in sharded.index_of for param in params)]


def describe(sharded: ShardedParameters) -> str:
    """Which optimizer has these parameters, for messages."""
    count = len(sharded.params)
    return f"a ZeroRedundancyOptimizer of {sharded.builder.class_name} over {count} parameter{'s' * (count != 1)}"


def _reduced_twice(found: str, more: str = "") -> ValueError:
    return ValueError(
        "shard_gradients=True expects a model that is not wrapped, because the optimizer reduces the gradients itself, "
        f"but {found}. {_way_round()}.{more}"
    )


def _way_round() -> str:
    """What to do instead, for the framework that called; else for whoever wraps by hand."""
    on_stack, frame = set(), sys._getframe()
    while frame is not None:
        on_stack.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    for packages, way in _WAYS_ROUND.items():
        if any(name == package or name.startswith(f"{package}.") for name in on_stack for package in packages):
            return way
    return _BY_HAND
