"""What differs between the versions of torch that this package runs with (2.6 to 2.15), but for checkpoints.

Each function says for which versions it is. It asks for the feature, not for the number: builds between two releases
have the one and not the other. What a version cannot do is an error that names it.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed as dist

# torch >= 2.13 has these new names and warns about the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_store(process_group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that a process group was made with."""
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    # torch 2.6: Python keeps it, with the same prefix.
    return dist.distributed_c10d._get_process_group_store(process_group)


def second_connection(store: dist.Store) -> dist.Store:
    """Another connection to the store. What is written through one such connection is read through another one.

    (With torch 2.6 not through ``store`` itself: its prefix cannot be asked for.)
    """
    if hasattr(store, "clone"):
        return store.clone()  # type: ignore[attr-defined]
    # torch 2.6: made anew, under a prefix that the ranks agree upon.
    base = store
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    if isinstance(base, dist.TCPStore):
        patience = base.timeout  # type: ignore[attr-defined]
        other = dist.TCPStore(base.host, base.port, is_master=False, timeout=patience, wait_for_workers=False)
    elif isinstance(base, dist.FileStore):
        other = dist.FileStore(base.path, -1)  # type: ignore[attr-defined]
    elif isinstance(base, dist.HashStore):  # the memory of one process, for all its threads
        other = base
    else:
        raise RuntimeError(
            f"torch {torch.__version__} expects a TCPStore or a FileStore, for a second connection to it, but the "
            f"process group has a {type(base).__name__}. Start it with one of those, or take torch 2.9."
        )
    prefix = store.compare_set("shardstep/second", "", secrets.token_hex(8)).decode()
    return dist.PrefixStore(f"shardstep/{prefix}", other)


def leave_gradients_to_us(ddp: Any) -> None:
    """Keep DDP from copying its buckets back to the gradients when backward ends: we put something else there.

    It has a switch for optimizers that step in backward; a version that has none copies in vain.
    """
    switch = getattr(ddp.reducer, "_set_optimizer_in_backward", None)
    if switch is not None:
        switch()
