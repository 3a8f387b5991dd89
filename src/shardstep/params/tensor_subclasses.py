"""State that is a tensor subclass, such as quantized moments: carried whole, as the plain tensors that it consists of.

``opened`` takes it apart with the class's own ``__tensor_flatten__``; ``closed`` puts it together again with
``__tensor_unflatten__``. What arrives never decides the class: a file or another rank gives a name, and the class is
one that the live optimizer makes, or nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep.comm.codec import decode, encode

# The key, in a dict of plain tensors, of what subclass they were, as JSON. No optimizer has such a key.
MARK = "shardstep_subclass"

FindClass = Callable[[str], type | None]  # the class of that name which the live optimizer makes


def is_subclass(value: Any) -> bool:
    """Whether a tensor consists of other tensors, and can be taken apart and put together."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def classes_in(value: Any) -> Iterator[type]:
    """The tensor subclasses in a tree, and inside of one another."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from classes_in(item)
    elif is_subclass(value):
        yield type(value)
        yield from classes_in([getattr(value, name) for name in value.__tensor_flatten__()[0]])


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree with its plain tensors changed; subclasses stay as they are."""
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) and not is_subclass(value) else value


def opened(value: Any) -> Any:
    """A tree in which every tensor subclass is a dict of its tensors, over the same memory, with a mark."""
    if isinstance(value, Mapping):
        return {key: opened(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(opened, value))
    return _opened(value) if is_subclass(value) else value


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
    return isinstance(value, Mapping) and MARK in value


def closed(value: Any, find_class: FindClass, label: str) -> Any:
    """The inverse of ``opened``. ValueError if the live optimizer makes no such class.

    ``label``: whose state it is, for messages.
    """
    if isinstance(value, Mapping):
        items = {key: closed(item, find_class, label) for key, item in value.items()}
        return _closed(items, find_class, label) if is_opened(items) else items
    if type(value) in (list, tuple):
        return type(value)(closed(item, find_class, label) for item in value)
    return value


def _closed(parts: dict[str, Any], find_class: FindClass, label: str) -> Tensor:
    tensors = {name: tensor for name, tensor in parts.items() if name != MARK}
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
