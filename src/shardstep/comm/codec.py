"""Plain data <-> JSON, with the tensors lifted out. Nothing is pickled, so nothing that arrives can run code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SHORT = 64  # elements of a tensor that are shown one by one
_PLAIN = (type(None), bool, int, float, str)
_ENUM = "shardstep_enum:"  # before the name of a member of an enumeration
_CODE = "shardstep_code:"  # before the name of a function or class
_COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "size": torch.Size}


def encode(value: Any, lift: Callable[[Tensor], int]) -> Any:
    """``value`` as JSON data. Each tensor is given to ``lift`` and stands as the number it returns.

    TypeError for anything but None, numbers, strings, lists, tuples, sets, dicts, dtypes, devices and tensors.
    """
    if isinstance(value, Tensor):
        return {"tensor": lift(value)}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {"dict": [[encode(k, lift), encode(v, lift)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type_name(value): [encode(item, lift) for item in value]}
    if type(value) is set:
        return {"set": sorted((encode(item, lift) for item in value), key=repr)}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise TypeError(
        f"expects numbers, strings, lists, tuples, sets, dicts and tensors but got {type(value).__qualname__}. "
        "Nothing else is sent between ranks, because it would have to be unpickled."
    )


def encode_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON data, as far as they are plain values or tensors of one number; others are left out."""
    encoded = {}
    for key, value in options.items():
        numbers: list[list[Any]] = []

        def lift(tensor: Tensor, numbers: list[list[Any]] = numbers) -> int:
            if tensor.dim() or tensor.is_complex():
                raise TypeError("has several numbers")
            numbers.append([dtype_name(tensor.dtype), tensor.item()])
            return len(numbers) - 1

        try:
            encoded[key] = [encode(value, lift), numbers]
        except TypeError:  # functions, objects: every rank has its own
            continue
    return encoded


def decode_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``encode_options``."""
    return {
        key: decode(value, [torch.tensor(number, dtype=dtype_of(dtype)) for dtype, number in numbers])
        for key, (value, numbers) in data.items()
    }


def decode(data: Any, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> Any:
    """The inverse of ``encode``, with the tensors by number."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {decode(k, tensors): decode(v, tensors) for k, v in content}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](decode(item, tensors) for item in content)
    if kind == "dtype":
        return dtype_of(content)
    return torch.device(content)


def type_name(value: list | tuple) -> str:
    if isinstance(value, torch.Size):
        return "size"
    return "list" if isinstance(value, list) else "tuple"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expects the name of a torch dtype but got {name!r}")
    return dtype


def plain_option(value: Any) -> Any:
    """An option as plain data: a member of an enumeration by its name, of a function or class that there is one."""
    if isinstance(value, Enum):
        return f"{_ENUM}{value.name}"
    return f"{_CODE}{getattr(value, '__qualname__', type(value).__qualname__)}" if callable(value) else value


def is_live_only(saved: Any) -> bool:
    """Whether ``plain_option`` made it of something that only the live optimizer has."""
    return isinstance(saved, str) and saved.startswith((_ENUM, _CODE))


def live_option(saved: Any, live: Any) -> Any:
    """The inverse, by the class of the option that the optimizer has now. ValueError if that has no such member."""
    if not is_live_only(saved):
        return saved
    if saved.startswith(_CODE):
        if not callable(live):
            raise ValueError(f"an option expects a function or class, {saved.removeprefix(_CODE)!r} when it was saved.")
        return live
    name, members = saved.removeprefix(_ENUM), type(live).__members__ if isinstance(live, Enum) else {}
    if name not in members:
        raise ValueError(f"an option expects one of {sorted(members)} but {name!r} was saved.")
    return members[name]


def option_text(value: Any) -> str:
    """A value of a parameter group as text that is equal on two ranks exactly when the values are.

    Of a large tensor only the shape is shown. Of an object that is no plain data only the class is shown: its text may
    hold an address.
    """
    if isinstance(value, Tensor):
        is_short = value.numel() <= _SHORT and not is_traceable_wrapper_subclass(value)
        content = value.tolist() if is_short else f"of shape {list(value.shape)}"
        return f"tensor({content}, dtype={dtype_name(value.dtype)})"
    if isinstance(value, (list, tuple)):
        return f"{type_name(value)}({', '.join(map(option_text, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{option_text(k)}: {option_text(v)}' for k, v in value.items())})"
    if isinstance(value, (*_PLAIN, Number, Enum, torch.dtype, torch.device)):
        return repr(value)
    return type(value).__qualname__
