"""What stands in for what a version of torch lacks. Runs with every version, whichever way it takes."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardstep.comm.torch_versions import group_store, second_connection
from tests.harness import run_ranks


def stores(kind: str, root: Path) -> list[dist.Store]:
    """Two connections, as two ranks have them, under a prefix."""
    if kind == "TCPStore":
        first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        both = [first, dist.TCPStore("127.0.0.1", first.port, is_master=False)]
    elif kind == "FileStore":
        both = [dist.FileStore(str(root / "store"), -1) for _ in range(2)]
    else:
        both = [dist.HashStore()] * 2
    return [dist.PrefixStore("outer", dist.PrefixStore("inner", store)) for store in both]


@pytest.mark.parametrize("kind", ["TCPStore", "FileStore", "HashStore"])
def test_what_one_second_connection_writes_another_one_reads(kind, tmp_path):
    both = stores(kind, tmp_path)  # (the first is the server)
    ours, theirs = map(second_connection, both)
    ours.set("key", "value")
    assert theirs.get("key") == b"value"
    assert theirs.add("count", 1) == 1
    assert ours.add("count", 1) == 2
    assert ours.compare_set("first", "", "mine") == theirs.compare_set("first", "", "yours") == b"mine"


def test_a_wait_on_a_second_connection_does_not_hold_up_the_first(tmp_path):
    first, _ = stores("TCPStore", tmp_path)
    second = second_connection(first)
    waiting = threading.Thread(target=lambda: second.wait(["late"], timedelta(seconds=60)))
    waiting.start()
    first.set("meanwhile", "1")
    assert first.get("meanwhile") == b"1"
    assert waiting.is_alive()
    second_connection(first).set("late", "1")
    waiting.join(30)
    assert not waiting.is_alive()


def of_a_group(rank: int, world: int) -> None:
    """Two groups' stores are apart, and every rank has the same."""
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for number, group in enumerate(groups):
        assert group is not None
        store = group_store(group)
        assert not store.check([f"shardstep/test/{rank}"])
        dist.barrier()
        store.set(f"shardstep/test/{rank}", str(number))
        dist.barrier()
        assert [store.get(f"shardstep/test/{other}") for other in range(world)] == [str(number).encode()] * world


def test_a_group_has_a_store_of_its_own_that_all_its_ranks_share():
    run_ranks(of_a_group, 2)


@pytest.mark.skipif(hasattr(dist.Store, "clone"), reason=f"torch {torch.__version__} can copy any store")
def test_a_store_that_this_version_cannot_connect_to_again_is_refused_with_the_version():
    class Own(dist.Store):
        pass

    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}.* has a Own.* torch 2\.9"):
        second_connection(Own())
