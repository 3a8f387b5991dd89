"""How one class is trained in the sweep: over which tensors, in which groups, and what its step is given.

``find_course`` tries what a class takes, with the plain class alone: this is what "can be built and stepped on the CPU"
means.
"""

from __future__ import annotations

import inspect
import io
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from tests.optimizers.catalogue import Subject, switch_off_compilers
from tests.oracle import values

SAVED_AT, END = 3, 6  # steps
# 8-bit and 4-bit states are made from 4096 elements on, some only of multiples of 256 or 128. 4096, 12288 and 8192 are
# such; 4290 is large, but no multiple; the others are small. The first half is one group, of matrices.
_FIRST = ((64, 64), (7, 5), (96, 128), (33, 130))
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "tensors of 1 to 3 dimensions": (*_FIRST, (8192,), (11, 3), (5,), (4, 3, 2)),
    "tensors of 1 and 2 dimensions": (*_FIRST, (8192,), (11, 3), (5,), (64, 128)),
    "tensors of 1 to 3 dimensions, none long": (*_FIRST, (60,), (11, 3), (5,), (4, 3, 2)),
    "matrices": (*_FIRST, (64, 128), (11, 3), (8, 40), (32, 16)),
    "pairs of factors": ((4, 64), (32, 4), (8, 96), (16, 8), (4, 7), (11, 4), (2, 5), (3, 2)),
}
MATRICES = len(_FIRST)
# These keep n x n matrices for a tensor with a dimension of n, and decompose them.
SMALL = {f"pytorch_optimizer.{name}" for name in ("Alice", "DASH", "Shampoo", "SpectralSphere")}
# What a step gets: gradients; a closure; gradients that can be differentiated once more.
DRIVES = ("gradients", "closure", "graph")
# How the parameters are passed.
GROUPINGS = ("two groups with different options", "two groups", "no groups")


class Course(NamedTuple):
    """What a class takes."""

    shapes: str  # of SHAPES
    drive: str  # of DRIVES
    grouping: str  # of GROUPINGS
    dtype: torch.dtype = torch.float32


class Facts(NamedTuple):
    """What the plain class does by itself, without shardstep."""

    course: Course
    moves: bool  # whether it has changed its weights at the end
    takes_float64: bool
    random: bool  # another seed, another outcome
    resumes: str  # nothing if its own state dict makes a fresh one go on as if uninterrupted; else what happens

    def in_float64(self) -> Facts:
        return self._replace(course=self.course._replace(dtype=torch.float64))


class Model(nn.Module):
    """Parameters with names, whose gradients are whatever one likes."""

    def __init__(self, course: Course, seed: int = 0) -> None:
        super().__init__()
        shapes = SHAPES[course.shapes]
        self.weights = nn.ParameterList(
            Parameter(values(shape, 100 * seed + i, course.dtype)) for i, shape in enumerate(shapes)
        )

    @property
    def params(self) -> list[Parameter]:
        return list(self.weights)


def groups_of(subject: Subject, course: Course, params: Sequence[Tensor]) -> list[Any]:
    """What is passed as ``params``. Different options: another learning rate and weight decay, if it takes them."""
    if course.grouping == "no groups":
        return list(params)
    first, second = (dict(options) for options in subject.group_options)
    known = inspect.signature(subject.cls).parameters
    if course.grouping == "two groups with different options":
        rate = subject.options.get("lr", getattr(known.get("lr"), "default", None))
        if isinstance(rate, float):
            second["lr"] = rate / 2
        if "weight_decay" in known:
            first["weight_decay"] = 0.05
    return [{"params": params[:MATRICES], **first}, {"params": params[MATRICES:], **second}]


def plain(subject: Subject, course: Course, params: Sequence[Tensor]) -> Optimizer:
    return subject.cls(groups_of(subject, course, params), **subject.options)


def loss_of(params: Sequence[Tensor], step: int) -> Tensor:
    """A loss in which everything depends on everything: what a closure returns for weights that are not there shows."""
    total = sum((param * _direction(param, step, i)).sum() for i, param in enumerate(params))
    return total + sum(param.square().sum() for param in params) / 8 + sum(param.mean() for param in params) ** 2 / 8


def _direction(param: Tensor, step: int, position: int) -> Tensor:
    return values(param.shape, 10_000 + 100 * step + position, param.dtype)


def train(optimizer: Any, params: Sequence[Tensor], steps: Iterable[int], drive: str, seed: int = 0) -> None:
    """Step with the gradients of these steps, from the same random state each time."""
    for step in steps:
        _seed(1000 * seed + step)
        if drive == "gradients":
            for position, param in enumerate(params):
                param.grad = _direction(param, step, position)
            optimizer.step()
            continue

        def closure(step: int = step) -> Tensor:
            with torch.enable_grad():
                optimizer.zero_grad()
                loss = loss_of(params, step)
                loss.backward(create_graph=drive == "graph")
            return loss.detach()

        closure()  # some that take a closure expect gradients all the same
        optimizer.step(closure) if drive == "closure" else optimizer.step()


def _seed(number: int) -> None:
    """Optimizers draw from any of these."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def start(optimizer: Any) -> Any:
    """Schedule-free optimizers want to be told that training begins."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def run_plain(subject: Subject, course: Course, steps: int = END, seed: int = 0) -> tuple[Model, Any]:
    torch.manual_seed(seed)
    model = Model(course)
    optimizer = start(plain(subject, course, model.params))
    train(optimizer, model.params, range(steps), course.drive, seed)
    return model, optimizer


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def resume_plain(
    subject: Subject, course: Course, weights: Sequence[Tensor], state_dict: dict[str, Any]
) -> tuple[Model, Any]:
    """A fresh plain optimizer over other weights, then loaded, then trained to the end."""
    torch.manual_seed(0)
    model = Model(course, seed=7)
    optimizer = plain(subject, course, model.params)
    with torch.no_grad():
        for param, weight in zip(model.params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(state_dict)
    train(start(optimizer), model.params, range(SAVED_AT, END), course.drive)
    return model, optimizer


# --- what the plain class does by itself ----------------------------------------------------------------------------


def survey(rank: int, world_size: int, subject: Subject) -> Facts | str:
    """In a process of its own: the facts, or why the class cannot be built or stepped on the CPU."""
    switch_off_compilers()
    warnings.simplefilter("ignore")
    course = find_course(subject)
    if isinstance(course, str):
        return course
    params = run_plain(subject, course)[0].params
    is_random = differs(params, run_plain(subject, course, seed=1)[0].params)
    return Facts(
        course,
        moves=differs(params, Model(course).params),
        takes_float64=not _problem(lambda: run_plain(subject, course._replace(dtype=torch.float64))),
        random=is_random,
        resumes=_why_not_resumed(subject, course, params),
    )


def find_course(subject: Subject) -> Course | str:
    """The first course that the class takes, or the error of the first that it does not."""
    problems = []
    shapes_to_try = [name for name, shapes in SHAPES.items() if str(subject) not in SMALL or (8192,) not in shapes]
    for drive in DRIVES:
        for shapes in shapes_to_try:
            for grouping in GROUPINGS:
                course = Course(shapes, drive, grouping)
                problem = _problem(lambda course=course: run_plain(subject, course))
                if not problem:
                    return course
                problems.append(problem)
    return problems[0]


def _problem(run: Callable[[], tuple[Model, Any]]) -> str:
    try:
        params = run()[0].params
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(param.isfinite().all() for param in params) else "its weights are not finite after a few steps"


def differs(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return not all(torch.equal(one.detach(), other.detach()) for one, other in zip(ours, theirs, strict=True))


def _why_not_resumed(subject: Subject, course: Course, uninterrupted: Sequence[Tensor]) -> str:
    half, optimizer = run_plain(subject, course, SAVED_AT)
    try:
        resumed, _ = resume_plain(subject, course, half.params, through_a_file(optimizer.state_dict()))
    except Exception as error:
        return f"its own state dict cannot be loaded ({type(error).__name__}: {error})"
    lacks = "its own state dict lacks something: a fresh one goes on otherwise"
    return lacks if differs(resumed.params, uninterrupted) else ""
