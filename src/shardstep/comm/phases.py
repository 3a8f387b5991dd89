"""Names of phases for torch's profiler, as cheap as they can be when nobody profiles.

``torch.profiler.record_function`` costs 7 microseconds warm and several times that in the midst of training, whether a
profiler runs or not, and there are several phases per bucket. torch has a class for such places, without a public name.
"""

from __future__ import annotations

from torch._C._profiler import _RecordFunctionFast as phase

__all__ = ["phase"]
