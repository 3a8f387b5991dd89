"""Checkpoints of meshes: every element once, written by all ranks, and loaded into any other arrangement.

Oracle and models of ``test_checkpoint``: one process with the plain optimizer, never interrupted; gradients whose mean
over any number of ranks is exact, so that everything is compared bit by bit.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import SGD, Adagrad

from shardstep import checkpoint
from shardstep.layout.shares import Share
from tests.harness import run_ranks
from tests.meshes import check_alike, mesh_of
from tests.ranks.test_checkpoint import (
    END,
    EXTRA,
    LIMITS,
    SAVED_AT,
    Simple,
    check,
    once,
    plain,
    sharded,
    train,
    uninterrupted,
    unlike,
)

# Arrangements: a number of ranks, or a mesh (replicate, shard).
Arrangement = int | tuple[int, int]


def ranks_of(arrangement: Arrangement) -> int:
    return arrangement if isinstance(arrangement, int) else prod(arrangement)


def arranged(arrangement: Arrangement) -> dict[str, Any]:
    return {} if isinstance(arrangement, int) else {"process_group": mesh_of(arrangement)}


def save_zoo(rank: int, world: int, root: Path, arrangement: Arrangement, mode: str) -> None:
    model, optimizer = sharded(mode, **arranged(arrangement))
    train(model, optimizer, range(SAVED_AT))
    name = f"own-{arrangement}-{mode}"
    checkpoint.save(root / name, optimizer, model, extra={**EXTRA, "rank": rank})
    handle = checkpoint.save(root / f"async-{arrangement}-{mode}", optimizer, model, asynchronous=True)
    dcp.save({"optim": optimizer.sharded_state_dict(model)}, checkpoint_id=root / f"dict-{arrangement}-{mode}")
    train(model, optimizer, range(SAVED_AT, END))
    handle.wait()
    check(model, optimizer, torch.load(root / "expected.pt")[END], f"{name}: saving changed the training")


def build(root: Path) -> None:
    torch.save(uninterrupted(), root / "expected.pt")
    for arrangement, mode in SAVED:
        run_ranks(save_zoo, ranks_of(arrangement), root, arrangement, mode, **LIMITS)


SAVED: list[tuple[Arrangement, str]] = [((2, 2), "zero2"), ((2, 2), "tensor"), ((3, 1), "element"), (3, "element")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory of checkpoints of one and the same state."""
    return once(tmp_path_factory, worker_id, "mesh-zoo", build)


def load_all(rank: int, world: int, root: Path, arrangement: Arrangement, mode: str) -> None:
    expected = torch.load(root / "expected.pt")
    for saved_at, saved_in in SAVED:
        name = f"{saved_at}-{saved_in}"
        claim = f"{name} loaded into {arrangement} in {mode}"
        model, optimizer = unlike(mode, **arranged(arrangement))
        extra = checkpoint.load(root / f"own-{name}", optimizer, model)
        assert extra["rank"] == 0, claim
        check(model, optimizer, expected[SAVED_AT], claim)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{claim} and trained")
        if not isinstance(arrangement, int):
            check_alike(optimizer, arrangement)


@pytest.mark.parametrize(
    ("arrangement", "mode"),
    [
        ((2, 2), "zero2"),
        (3, "element"),
        *(
            pytest.param(a, m, marks=pytest.mark.again)
            for a, m in (((1, 3), "tensor"), ((2, 1), "zero2"), (1, "tensor"))
        ),
        pytest.param((2, 3), "element", marks=pytest.mark.again),
    ],
    ids=str,
)
def test_every_arrangement_loads_every_other_and_training_goes_on_as_if_never_interrupted(saved, arrangement, mode):
    run_ranks(load_all, ranks_of(arrangement), saved, arrangement, mode, **LIMITS)


@pytest.mark.parametrize("kind", ["own", "async", "dict"])
def test_the_plain_optimizer_loads_what_a_mesh_saved_itself_in_the_background_and_through_dcp(saved, kind):
    expected = torch.load(saved / "expected.pt")
    model, optimizer = plain()
    if kind == "dict":  # the state alone
        train(model, optimizer, range(SAVED_AT))
        with pytest.warns(UserWarning, match="holds no model"):
            checkpoint.load(saved / "dict-(2, 2)-zero2", optimizer, model)
    else:
        checkpoint.load(saved / f"{kind}-(2, 2)-zero2", optimizer, model)
    train(model, optimizer, range(SAVED_AT, END))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[END]["model"][name]), f"{kind}: {name}"


def test_every_element_is_written_once_and_by_all_ranks(saved):
    """No two chunks of a tensor overlap, all together are the tensor; and no rank writes twice its share."""
    path = saved / "own-(2, 2)-zero2"
    metadata = FileSystemReader(path).read_metadata()
    tensors = {
        key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    assert any(key.startswith("optim.state.embed") for key in tensors)
    for key, entry in tensors.items():
        covered = torch.zeros(tuple(entry.size), dtype=torch.int64)
        for chunk in entry.chunks:
            covered[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert bool((covered == 1).all()), key
    written = dict.fromkeys((f"__{rank}_0.distcp" for rank in range(4)), 0)
    for index, info in metadata.storage_data.items():
        if index.fqn.startswith("optim.state.") and index.fqn in tensors:
            written[info.relative_path] += info.length
    assert len(written) == 4
    assert max(written.values()) < 1.6 * sum(written.values()) / 4, (
        written
    )  # (items have a head, and small ones stay whole)
    assert min(written.values()) > 0.4 * sum(written.values()) / 4, written
    assert json.loads((path / "shardstep.json").read_text())


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adagrad": (Adagrad, {"lr": 0.1}),  # makes state when it is built
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9}),
}


def save_and_resume(rank: int, world: int, root: Path) -> None:
    """Other optimizers, saved from a mesh and resumed on another one by all ranks."""
    for name, (kind, options) in CLASSES.items():
        expected = uninterrupted(Simple, kind, **options)
        model, optimizer = sharded("element", Simple, kind, **arranged((2, 2)), **options)
        train(model, optimizer, range(SAVED_AT))
        checkpoint.save(root / name / "1", optimizer, model, extra={"at": 1})
        checkpoint.save(root / name / "2", optimizer, model, extra={"at": 2}, keep=1)
        model, optimizer = unlike("tensor", Simple, optimizer_class=kind, **arranged((4, 1)), **options)
        found = checkpoint.resume(root / name, optimizer, model)
        assert found == (root / name / "2", {"at": 2})
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], name)


def test_other_optimizers_are_saved_by_one_mesh_and_resumed_by_another(tmp_path):
    run_ranks(save_and_resume, 4, tmp_path, **LIMITS)


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 5))
def test_shares_take_every_element_and_every_beginning_once(sizes, count):
    shares = [Share(sum(sizes), position, count) for position in range(count)]
    start = 0
    for size in sizes:
        parts = [share.within(start, start + size) for share in shares]
        assert [element for part in parts for element in range(part.start, part.stop)] == list(range(size))
        assert sum(share.has_start(start) for share in shares) == 1
        start += size
