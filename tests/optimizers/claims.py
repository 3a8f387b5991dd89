"""What is claimed of every class that shardstep takes. Each function runs on every rank.

Oracle: the plain class in the same process, on the same gradients, never interrupted; everything bit by bit. Ranks that
own different tensors draw other random numbers than the plain class does: of a random class, only that all ranks hold
the same weights is claimed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.optimizers import training
from tests.optimizers.catalogue import Subject, switch_off_compilers
from tests.optimizers.training import END, SAVED_AT, Facts, Model, start

Finding = dict[str, Any]


def trains_and_saves(rank: int, world_size: int, subject: Subject, facts: Facts, folder: str) -> Finding:
    """Build, train, compare, save in the middle, go on. Returns what was found, or how it was refused."""
    _prepare()
    drive, ours, theirs = facts.course.drive, Model(facts.course), Model(facts.course)
    before = [param.detach().clone() for param in ours.params]
    try:
        optimizer = _sharded(subject, facts, ours)
    except ValueError as error:
        _assert_same([param.detach() for param in ours.params], before, "the weights after a refusal")
        return {"refused": str(error)}
    torch.manual_seed(0)
    plain = start(training.plain(subject, facts.course, theirs.params))
    start(optimizer)
    _train_both(optimizer, plain, ours, theirs, range(SAVED_AT), drive)
    _check_equal(optimizer, plain, ours, theirs, facts, "in the middle")
    if not facts.random:
        _check_memory(optimizer, plain)
    Path(folder).mkdir(exist_ok=True)
    checkpoint.save(Path(folder) / "checkpoint", optimizer, ours, extra={"step": SAVED_AT})
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"optim": optimizer.state_dict(), "model": ours.state_dict()}, Path(folder) / "one-file.pt")
    _train_both(optimizer, plain, ours, theirs, range(SAVED_AT, END), drive)
    _check_equal(optimizer, plain, ours, theirs, facts, "at the end")
    if callable(getattr(plain, "eval", None)):
        optimizer.eval()
        plain.eval()
        _check_equal(optimizer, plain, ours, theirs, facts, "after eval()")
    cut = [spec.granularity == "element" for spec in optimizer.layout.specs]
    return {"cut": cut, "reason": "" if all(cut) else _why_not_cut(subject, facts)}


def resumes(rank: int, world_size: int, subject: Subject, facts: Facts, folder: str) -> None:
    """Fresh optimizers over other weights, at another number of ranks, load what was saved and go on to the end.

    They end with what the plain one does, uninterrupted. A plain class that does not go on from its own state dict is
    no measure for that; then what counts is what the plain one makes of the state that was saved.
    """
    _prepare()
    course = facts.course
    saved, given = (torch.load(Path(folder) / "one-file.pt", weights_only=False) for _ in range(2))
    weights = list(saved["model"].values())
    if facts.resumes or facts.random:
        theirs, plain = training.resume_plain(subject, course, weights, training.through_a_file(saved["optim"]))
    else:
        theirs, plain = training.run_plain(subject, course)
        from_ours, _ = training.resume_plain(subject, course, weights, training.through_a_file(saved["optim"]))
        assert not training.differs(from_ours.params, theirs.params), "the plain class goes on otherwise from our dict"
    for way in ("checkpoint", "one file"):
        ours = Model(course, seed=5)
        optimizer = _sharded(subject, facts, ours)
        if way == "checkpoint":
            assert checkpoint.load(Path(folder) / "checkpoint", optimizer, ours) == {"step": SAVED_AT}
        else:
            ours.load_state_dict(given["model"])
            optimizer.load_state_dict(given["optim"])
        training.train(start(optimizer), ours.params, range(SAVED_AT, END), course.drive)
        _check_equal(optimizer, plain, ours, theirs, facts, f"resumed from the {way}")
    _assert_same(given["optim"], saved["optim"], "a dict that was loaded, after further steps:")


# --- building -------------------------------------------------------------------------------------------------------


def _prepare() -> None:
    switch_off_compilers()
    warnings.simplefilter("ignore")


def _sharded(subject: Subject, facts: Facts, model: Model, shard: str = "auto") -> ZeroRedundancyOptimizer:
    torch.manual_seed(0)
    groups = training.groups_of(subject, facts.course, model.params)
    return ZeroRedundancyOptimizer(groups, subject.cls, shard=shard, **subject.options)


def _why_not_cut(subject: Subject, facts: Facts) -> str:
    try:
        _sharded(subject, facts, Model(facts.course), "element")
    except ValueError as error:
        text = str(error)
        return text.partition(f" for {subject.cls.__name__} ")[2].partition(". Use shard=")[0] or text
    raise AssertionError("kept whole, but it can be cut")


def _train_both(optimizer: Any, plain: Any, ours: Model, theirs: Model, steps: Iterable[int], drive: str) -> None:
    for step in steps:
        training.train(optimizer, ours.params, [step], drive)
        training.train(plain, theirs.params, [step], drive)


# --- comparing ------------------------------------------------------------------------------------------------------


def _check_equal(
    optimizer: ZeroRedundancyOptimizer, plain: Any, ours: Model, theirs: Model, facts: Facts, when: str
) -> None:
    """Weights on every rank, and every parameter's full state."""
    optimizer.check_replicas()
    for position, (mine, other) in enumerate(zip(ours.params, theirs.params, strict=True)):
        state = optimizer.full_state(mine)  # collective
        if not facts.random:
            _assert_same(mine.detach(), other.detach(), f"weights {when}: parameter {position}")
            _assert_same(state, dict(plain.state.get(other, {})), f"state {when}: {position}")


def _check_memory(optimizer: ZeroRedundancyOptimizer, plain: Any) -> None:
    """The ranks hold together what the plain optimizer holds alone.

    Except for scalars, of which each piece of a parameter has its own, and for tables that all parameters share, of
    which each rank has one.
    """
    scalars = _bytes(tensor for tensor in _flat_tensors(optimizer.state) if tensor.numel() == 1)
    held, scalars = (_sum_over_ranks(number) for number in (optimizer.memory().state, scalars))
    expected = scalars + _bytes(tensor for tensor in _flat_tensors(plain.state) if tensor.numel() != 1)
    shared = _bytes(_shared_tensors(plain.state.values())) * (optimizer.world_size - 1)
    told = f"memory: the ranks hold {held} bytes of state, the plain optimizer {expected} (and {shared} shared)"
    assert expected <= held <= expected + shared, told


def _sum_over_ranks(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def _flat_tensors(value: Any) -> list[Tensor]:
    """All plain tensors in nested data; of tensor subclasses those that they are made of."""
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            return [value]
        names, _ = value.__tensor_flatten__()
        return [tensor for name in names for tensor in _flat_tensors(getattr(value, name))]
    items = value.values() if isinstance(value, Mapping) else value if _is_sequence(value) else ()
    return [tensor for item in items for tensor in _flat_tensors(item)]


def _shared_tensors(states: Iterable[Any]) -> list[Tensor]:
    """Those that the states of several parameters have in common."""
    seen: dict[int, int] = {}
    found = []
    for position, state in enumerate(states):
        for tensor in _flat_tensors(state):
            if seen.setdefault(tensor.data_ptr(), position) != position:
                found.append(tensor)
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.data_ptr()] = max(sizes.get(tensor.data_ptr(), 0), tensor.nbytes)
    return sum(sizes.values())


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Tensor))


def _assert_same(ours: Any, expected: Any, where: str) -> None:
    """Equal through dicts and sequences, in every bit. Lists and tuples are alike: see "Limits" in the README."""
    if isinstance(expected, Tensor):
        assert isinstance(ours, Tensor), f"{where}: {ours!r} is no tensor"
        kinds = (ours.dtype, ours.shape), (expected.dtype, expected.shape)
        assert kinds[0] == kinds[1], f"{where}: {kinds[0]} is not {kinds[1]}"
        for mine, other in zip(_flat_tensors(ours), _flat_tensors(expected), strict=True):
            assert mine.dtype == other.dtype, f"{where}: {mine.dtype} is not {other.dtype}"
            assert torch.equal(_bits(mine), _bits(other)), f"{where}: {int((mine != other).sum())} elements differ"
    elif isinstance(expected, Mapping):
        assert isinstance(ours, Mapping), f"{where}: {ours!r} is no mapping"
        # A clock that heavyball keeps with the first parameter of a group: here with the first of each rank.
        alike = set(ours) ^ set(expected) <= {"step"}
        assert alike, f"{where}: keys {list(ours)} are not {list(expected)}"
        for key in (key for key in expected if key in ours):
            _assert_same(ours[key], expected[key], f"{where}[{key!r}]")
    elif _is_sequence(expected):
        assert len(ours) == len(expected), f"{where}: {len(ours)} items are not {len(expected)}"
        for position, (mine, other) in enumerate(zip(ours, expected, strict=True)):
            _assert_same(mine, other, f"{where}[{position}]")
    else:
        assert type(ours) is type(expected), f"{where}: {ours!r} is not {expected!r}"
        assert ours == expected or ours != ours, f"{where}: {ours!r} is not {expected!r}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
