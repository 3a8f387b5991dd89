"""What differs in torch.distributed.checkpoint between the versions of torch that this package runs with (2.6 to 2.15).

Each function says for which versions it is, and asks for the feature rather than for the number. (Numbers compare as
versions, not as texts.)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils._pytree import tree_leaves

# Fields that later versions write. They may be in a file; a version without the field ignores them.
_LATER_FIELDS = {
    "Metadata": ("version",),  # torch >= 2.9
    "StorageMeta": ("modules",),  # torch >= 2.7
    "_StorageInfo": ("transform_descriptors",),  # torch >= 2.7
}


def later_fields(kind: type) -> tuple[str, ...]:
    """The fields of a record that this version may not have."""
    return _LATER_FIELDS.get(kind.__name__, ())


def properties_of(state: Any) -> TensorProperties:
    """A tensor's properties from what was pickled of them. torch >= 2.15 adds the strides, which others cannot take."""
    made = TensorProperties()
    if state is not None:
        made.__setstate__(state[: len(made.__getstate__())])
    return made


def transforms_of(info: Any) -> Any:
    """How an item was changed on its way to the file; torch < 2.7 has no field for it."""
    return getattr(info, "transform_descriptors", None)


def metadata_of(entries: dict[str, Any], paths: dict[str, Any], storage: dict[Any, Any], directory: Path) -> Metadata:
    """DCP's description of a checkpoint."""
    # torch < 2.9 has no number for its format.
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    numbered = {"version": version} if version is not None else {}
    meta = StorageMeta(checkpoint_id=str(directory))
    return Metadata(entries, planner_data=paths, storage_data=storage, storage_meta=meta, **numbered)


def without_data() -> AbstractContextManager[None]:
    """Within this context ``torch.load`` builds an object without reading the bytes of its tensors."""
    # torch 2.6 has skip_data for saving only: there the bytes are read as well. (Only the version number shows it.)
    return torch.serialization.skip_data() if torch.__version__ >= "2.7" else nullcontext()


def places_in(path: str) -> list[int]:
    """Where in a file of ``torch.save`` the bytes of its tensors begin, in the order of a tree's leaves."""
    if torch.__version__ >= "2.7":
        with FakeTensorMode():
            tensors = _tensors_in(torch.load(path, weights_only=True))
        return [int(tensor.untyped_storage()._checkpoint_offset or 0) for tensor in tensors]
    # torch 2.6 does not tell. Mapped into memory, they are as far from each other as in the file.
    tensors = _tensors_in(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    reader: Any = torch._C.PyTorchFileReader(path)
    first = reader.get_record_offset("data/0") if tensors else 0
    return [address - min(addresses) + first for address in addresses]


def _tensors_in(form: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(form) if isinstance(leaf, Tensor)]


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def save(form: dict[str, Any], writer: Any, planner: Any) -> None:
    """``dcp.save`` of one rank for itself."""
    if _takes(dcp.save, "no_dist"):
        dcp.save(form, storage_writer=writer, planner=planner, no_dist=True)
    else:  # torch 2.6: only the function below takes no_dist
        state_dict_saver._save_state_dict(form, writer, no_dist=True, planner=planner)


def load(form: dict[str, Any], reader: Any, planner: Any) -> None:
    """``dcp.load`` of one rank for itself."""
    if _takes(dcp.load, "no_dist"):
        dcp.load(form, storage_reader=reader, planner=planner, no_dist=True)
    else:  # torch 2.6, as in ``save``
        state_dict_loader._load_state_dict(form, reader, no_dist=True, planner=planner)


def save_in_thread(form: dict[str, Any], writer: Any, planner: Any, process_group: Any) -> Future[Any]:
    """``dcp.async_save`` of one rank for itself, of what is staged already."""
    if _takes(dcp.async_save, "async_stager"):
        started = dcp.async_save(
            form,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            async_stager=_Staged(),  # type: ignore[arg-type]
            no_dist=True,
        )
        return cast("Future[Any]", started)  # the default kind of save
    # torch < 2.9 always stages, once more, and always for all ranks.
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardstep-save")
    started = executor.submit(save, form, writer, planner)
    executor.shutdown(wait=False)
    return started


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for one rank by itself, which may hold only a part of a tensor."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if torch.__version__ >= "2.9":
            return super().create_global_plan(all_plans)
        # torch < 2.9 expects whole tensors, also of a rank that is alone. Whether all ranks together have them is
        # checked when they are joined.
        plans, metadata = create_default_global_save_plan(all_plans)
        paths = ChainMap(*(plan.planner_data or {} for plan in plans))
        return plans, dataclasses.replace(metadata, planner_data=dict(paths))


class _Staged:
    """DCP's stager for what is staged already."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass
