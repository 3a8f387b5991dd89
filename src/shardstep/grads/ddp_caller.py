"""Is it DDP that copies a sharded gradient, outside of backward?

DDP rebuilds its buckets once, before the second forward. With ``gradient_as_bucket_view`` it then copies every
``param.grad`` into its new bucket and puts a view of that in its place. A sharded gradient has to let it, and must not
let anybody else: a user who copies one would silently get zeros. torch does not tell who asks. So this file, and no
other, looks at the caller.
"""

from __future__ import annotations

import sys

_DDP = "torch.nn.parallel.distributed"


def is_called_by_ddp(own_module: str) -> bool:
    """Whether the first function on the call stack that is not in ``own_module`` (nor here) is one of DDP's."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == own_module and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _DDP
