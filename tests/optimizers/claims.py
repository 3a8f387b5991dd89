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
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.optimizers import training
from tests.optimizers.catalogue import Subject, switch_off_compilers
from tests.optimizers.training import END, SAVED_AT, Facts, Model, start
from tests.oracle import assert_same

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
        state, expected = optimizer.full_state(mine), dict(plain.state.get(other, {}))  # (collective)
        if not facts.random:
            _assert_same([mine.detach(), state], [other.detach(), expected], f"{when}: parameter {position}")


def _assert_same(ours: Any, expected: Any, where: str) -> None:
    forms = _form(ours), _form(expected)
    _drop_lone_clocks(*forms)
    assert_same(*forms, where)


def _drop_lone_clocks(ours: Any, expected: Any) -> None:
    """What heavyball keeps with the first parameter of a group is here with the first of each rank."""
    if isinstance(ours, list) and isinstance(expected, list):
        for one, other in zip(ours, expected, strict=False):
            _drop_lone_clocks(one, other)
    if isinstance(ours, dict) and isinstance(expected, dict):
        for form in (ours, expected) if ("step" in ours) != ("step" in expected) else ():
            form.pop("step", None)
        for key in ours.keys() & expected.keys():
            _drop_lone_clocks(ours[key], expected[key])


def _form(value: Any) -> Any:
    """For a tensor its kind, and the bytes of what it is made of; for sequences lists (see "Limits" in the README)."""
    if isinstance(value, Tensor):
        return [value.dtype, tuple(value.shape), *(_bits(part) for part in _parts(value))]
    if isinstance(value, Mapping):
        return {key: _form(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return [_form(item) for item in value]
    return "nan" if value != value else value


def _parts(value: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor subclass is made of."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(value, name))]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
