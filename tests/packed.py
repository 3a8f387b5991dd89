"""An optimizer whose momentum is a tensor subclass: 8 bits with a scale per block, as torchao has. Small and quick."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 64


class Packed(Tensor):
    """Codes and a scale per block. Looks like the float tensor that it stands for."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Packed:
        packed = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        packed.codes, packed.scale = codes, scale
        return packed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype, {"block": BLOCK}]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Packed:
        return cls(parts["codes"], parts["scale"], context[0])

    @classmethod
    def of(cls, value: Tensor) -> Packed:
        blocks = value.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-12) / 127
        codes = (blocks / scale[:, None]).round().to(torch.int8).view(value.shape)
        return cls(codes, scale, value.dtype)

    def unpacked(self) -> Tensor:
        return (self.codes.reshape(-1, BLOCK).to(self.dtype) * self.scale[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        if func is torch.ops.aten._to_copy.default:  # torch's own load_state_dict moves state to its parameter
            return args[0]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"{func} of a Packed tensor")


torch.serialization.add_safe_globals([Packed])  # as torchao's classes do when they are imported


class PackedMomentum(torch.optim.Optimizer):
    """SGD with momentum, kept in 8 bits where the elements fill whole blocks, else in full."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                before = state.get("momentum")
                full = before.unpacked() if isinstance(before, Packed) else before
                momentum = param.grad.clone() if full is None else full * 0.9 + param.grad
                state["momentum"] = Packed.of(momentum) if momentum.numel() % BLOCK == 0 else momentum
                state["step"] = state.get("step", 0) + 1
                param.sub_(momentum, alpha=group["lr"])
