"""What all rank processes begin with. Imported last by the process that they are forked from: done once, not in each.

(If that could not import it, because it was started elsewhere, each of them does it.)
"""

from __future__ import annotations

import gc
import os

from tests import traces, verdicts

PREPARED_BY = os.getpid()
verdicts.remember()
WATCHED = traces.watch()
# What was imported is not looked at again: neither by the collector nor by searches through all objects.
gc.freeze()
