"""State that is a tensor subclass, such as quantized moments: kept whole, and saved as the plain tensors inside.

``opened`` takes it apart with the class's own ``__tensor_flatten__``; ``closed`` puts it together again with
``__tensor_unflatten__``. The data never chooses the class: a file or another rank gives a name, and only a class that
the live optimizer makes is built from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from shardstep.comm.codec import decode, encode

# The key, in a dict of plain tensors, of the subclass they came from, as JSON. No optimizer has such a key.
MARK = "shardstep_subclass"

FindClass = Callable[[str], type | None]  # the class of that name that the live optimizer makes


def is_subclass(value: Any) -> bool:
    """Whether a tensor consists of other tensors, and can be taken apart and put together."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def classes_in(tree: Any) -> Iterator[type]:
    """The tensor subclasses in a tree, and those inside of them."""
    for leaf in filter(is_subclass, tree_leaves(tree)):
        yield type(leaf)
        yield from classes_in([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])


def opened(tree: Any) -> Any:
    """A tree in which every tensor subclass is a marked dict of its tensors, over the same memory."""
    return tree_map(lambda leaf: _opened(leaf) if is_subclass(leaf) else leaf, tree)


def _opened(tensor: Any) -> dict[str, Any]:
    names, context = tensor.__tensor_flatten__()
    kind = name_of(type(tensor))
    try:
        data = encode(context, _refuse_tensor)
    except TypeError as error:
        raise TypeError(f"is a {kind}, whose __tensor_flatten__ {error}") from error
    mark = {"class": kind, "shape": list(tensor.shape), "stride": list(tensor.stride()), "context": data}
    return {**{name: opened(getattr(tensor, name)) for name in names}, MARK: json.dumps(mark)}


def _refuse_tensor(tensor: Tensor) -> int:
    raise TypeError("expects its tensors by name but has one in its context")


def is_opened(value: Any) -> bool:
    """Whether a dict is a tensor subclass that was taken apart."""
    return isinstance(value, dict) and MARK in value


def closed(tree: Any, find_class: FindClass, label: str) -> Any:
    """The inverse of ``opened``. ValueError if the live optimizer makes no such class.

    ``label``: whose state it is, for messages.
    """
    return tree_map(lambda leaf: _closed(leaf, find_class, label) if is_opened(leaf) else leaf, tree, is_leaf=is_opened)


def _closed(parts: dict[str, Any], find_class: FindClass, label: str) -> Tensor:
    tensors = {name: closed(part, find_class, label) for name, part in parts.items() if name != MARK}
    try:
        mark = json.loads(parts[MARK])
        name, shape, stride = str(mark["class"]), tuple(map(int, mark["shape"])), tuple(map(int, mark["stride"]))
        context = decode(mark["context"], ())
    except Exception as error:  # it may come from a file, where anything can be wrong
        raise ValueError(f"the state of {label} does not tell what its tensors were: {error!r}") from error
    kind = find_class(name)
    if kind is None:
        raise ValueError(
            f"the state of {label} was a {name} when it was saved, which this optimizer does not make. Load it into "
            "the optimizer class that it was saved from."
        )
    try:
        tensor = kind.__tensor_unflatten__(tensors, context, shape, stride)  # type: ignore[attr-defined]
        fits = tuple(tensor.shape) == shape and set(tensor.__tensor_flatten__()[0]) == set(tensors)
    except Exception as error:
        raise ValueError(f"the state of {label} cannot be put together as a {name}: {error!r}") from error
    if not fits:
        raise ValueError(f"the state of {label} expects a {name} of shape {shape} but its parts make another one.")
    return tensor
