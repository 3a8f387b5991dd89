"""What to call instead of what a sharded gradient does not answer, by the name of the function that was called.

Names as users write them: ``torch.isfinite(param.grad)`` and ``param.grad.isfinite()`` are one.
"""

from __future__ import annotations

WHOLE = (
    "optimizer.full_grad(param) to look at it, or optimizer.clip_grad_norm_ to clip, on every rank. (If "
    "DistributedDataParallel asks: drop the wrapper, or use shardstep.shard_ddp_gradients instead of shard_gradients.)"
)
_REST = (
    ", on every rank: the first one that is asked for brings those of all parameters. The numbers themselves: "
    "optimizer.full_grad(param)."
)
_LARGEST = 'param.grad.norm(float("inf"))'
_FINITE = f"torch.isfinite({_LARGEST}), the largest absolute value, which is nan or inf if any element is{_REST}"
_ABSOLUTE = f"{_LARGEST} for the largest absolute value, param.grad.norm(1) for their sum{_REST}"
_SQUARES = f"param.grad.norm() for the root of the sum of squares{_REST}"
_OTHER_DTYPE = f"torch.linalg.vector_norm(param.grad, dtype=...) for a norm in another dtype{_REST}"
_EXTREMES = f"{_LARGEST} for the largest absolute value{_REST}"

INSTEAD = {
    **dict.fromkeys(("isfinite", "isnan", "isinf"), _FINITE),
    **dict.fromkeys(("abs", "absolute", "__abs__"), _ABSOLUTE),
    **dict.fromkeys(("pow", "square", "__pow__"), _SQUARES),
    **dict.fromkeys(("float", "double", "half", "bfloat16"), _OTHER_DTYPE),
    **dict.fromkeys(("max", "min", "amax", "amin", "aminmax"), _EXTREMES),
}
