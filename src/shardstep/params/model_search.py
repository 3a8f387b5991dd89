"""Which DDP modules have some parameters: a search through Python's objects. A parameter does not know its modules.

For ``shard_ddp_gradients`` and ``reduce_scatter_hook``, once when they are connected (torch gives a hook its buckets
only, not the DDP module that they belong to), and when a model was moved. It takes 0.1 to 0.2 s in a large program.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def ddp_modules_of(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DistributedDataParallel modules that have one of these parameters."""
    ours = set(map(id, params))
    return [
        thing
        for thing in gc.get_objects()
        # (isinstance would wake lazy objects)
        if issubclass(type(thing), DistributedDataParallel) and any(id(param) in ours for param in thing.parameters())
    ]


def params_of_ddp(ddp: DistributedDataParallel) -> set[Tensor]:
    """The parameters of a DDP module that it does not ignore: those that it reduces unless they are frozen.

    (It is told by names, ``_set_params_and_buffers_to_ignore_for_model``, and joins a module's and a parameter's with a
    dot, also where the module has none: it ignores no parameter of the model itself.)
    """
    ignored = ddp.parameters_to_ignore
    return {
        param
        for prefix, module in ddp.module.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if f"{prefix}.{name}" not in ignored
    }


def check_ddp_was_not_moved(params: Iterable[Tensor]) -> None:
    """RuntimeError if these parameters have left the device on which they were wrapped in DistributedDataParallel.

    Its buckets stay where they were, and its hooks on the parameters are gone: gradients would not be averaged.
    """
    params = list(params)
    if _is_left_by_all(params):
        gc.collect()  # a wrapper that nobody has any more
    if _is_left_by_all(params):
        raise RuntimeError(
            "DistributedDataParallel cannot be moved: its buckets stay on the device on which the model was wrapped, "
            "and it no longer averages the gradients. Move the model first and wrap it (again) afterwards."
        )


def _is_left_by_all(params: Sequence[Tensor]) -> bool:
    """Whether there are DDP modules, and none was built where its parameters are now."""
    modules = ddp_modules_of(params)
    return bool(modules) and all(ddp.device not in {param.device for param in params_of_ddp(ddp)} for ddp in modules)
