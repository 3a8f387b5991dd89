"""The end of a program: gloo's threads let go of their last tensors while Python still runs.

A worker thread of gloo drops its reference to the tensors of a collective after it has told the caller that it is
done. For a tensor that Python made, that takes the GIL. If Python has begun to finalize by then, the thread is ended
in the middle of a C++ destructor, and that aborts the process ("terminate called without an active exception"): the
work is done, but torchrun sees a failure and may start the job again. The fault is torch's: a plain
``dist.all_gather`` at the end of a program does it, too. Nobody can be asked whether those threads are through, so the
main thread gives them a moment at exit in which it does not hold the GIL.
"""

from __future__ import annotations

import atexit
import functools
import time

_MOMENT = 0.1  # seconds; they only wait for the GIL, or for a core


@functools.cache  # once per process
def let_threads_finish_at_exit() -> None:
    atexit.register(time.sleep, _MOMENT)
