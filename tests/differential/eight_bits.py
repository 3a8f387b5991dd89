"""State that is a tensor subclass: 8 bits for an element and a scale for a block of them, as torchao has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 8
aten = torch.ops.aten


class EightBits(Tensor):
    """Looks like the float tensor that it stands for."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> EightBits:
        packed = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        packed.codes, packed.scale = codes, scale
        return packed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> EightBits:
        return cls(parts["codes"], parts["scale"], dtype)

    @classmethod
    def of(cls, value: Tensor) -> Tensor:
        """As it is if its elements do not fill whole blocks."""
        if not value.numel() or value.numel() % BLOCK:
            return value
        blocks = value.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-12) / 127
        return cls((blocks / scale[:, None]).round().to(torch.int8).view(value.shape), scale, value.dtype)

    def unpacked(self) -> Tensor:
        return (self.codes.reshape(-1, BLOCK).to(self.dtype) * self.scale[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        one = args[0]
        if func is aten.detach.default:
            return cls(one.codes, one.scale, one.dtype)
        if func in (aten.clone.default, aten._to_copy.default):  # torch's load_state_dict moves state to its parameter
            return cls(one.codes.clone(), one.scale.clone(), one.dtype)
        raise NotImplementedError(f"{func} of EightBits")


torch.serialization.add_safe_globals([EightBits])  # as torchao's classes do when they are imported
