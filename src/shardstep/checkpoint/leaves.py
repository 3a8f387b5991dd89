"""What DCP is to save as it is, without looking into it.

DCP looks into dicts and lists: keys become texts, empty ones vanish. A ``Leaf`` is saved with ``torch.save``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardstep.checkpoint.storage import dcp_versions
from shardstep.state.shards import StateShard


class Leaf:
    """A value that is saved as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


def with_leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """A dict in which every container is a leaf."""
    return {key: Leaf(value) if isinstance(value, (Mapping, list, tuple)) else value for key, value in values.items()}


def leaved(value: Any) -> Any:
    """A tree in which only dicts with texts as keys, and lists, that hold tensors, are looked into."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if isinstance(value, Mapping) and is_tensor_tree(value) and all(isinstance(key, str) for key in value):
        return {key: leaved(item) for key, item in value.items()}
    if isinstance(value, list) and is_tensor_tree(value):
        return [leaved(item) for item in value]
    return Leaf(tree_map_only(StateShard, _whole_tensor, value))


def is_tensor_tree(value: Any) -> bool:
    """Whether it is a tensor, or a dict or list that holds one."""
    if isinstance(value, Mapping):
        return any(map(is_tensor_tree, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list) and any(map(is_tensor_tree, value)))


def _whole_tensor(shard: StateShard) -> Tensor:
    if shard.local.shape != shard.shape:
        raise TypeError(
            "state of a cut parameter expects dicts with texts as keys, because others cannot be divided. Build the "
            "optimizer with shard='tensor'."
        )
    return shard.local.detach()


def _on_host(value: Any) -> Any:
    """A tree with its tensors on the CPU: what is saved must not ask for a device where it is loaded."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


class LeafPlanner(dcp_versions.SavePlanner):
    """DCP's planner, which saves leaves, and refuses what could not be read again without running code."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        object = _on_host(object.value) if isinstance(object, Leaf) else object
        data = super().transform_object(write_item, object)
        if isinstance(data, io.BytesIO):
            try:
                with dcp_versions.without_data():
                    torch.load(io.BytesIO(data.getvalue()), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise TypeError(
                    f"{write_item.index.fqn} expects numbers, strings, lists, dicts and tensors but got "
                    f"{type(object).__qualname__}, which cannot be loaded without running code. Save its plain data."
                ) from error
        return data


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of dicts, lists and tuples with every leaf changed. Tuples become lists: DCP looks into those only."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value)):
        return [map_leaves(item, change) for item in value]
    return change(value)
