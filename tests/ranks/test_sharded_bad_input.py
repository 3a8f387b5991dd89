"""What does not go together with ``shard_gradients`` and the DDP hooks is told at once, on every rank, with a way out.

An error names both things that exclude each other, so that the user can choose which to drop. Nothing hangs: an error
at construction or in backward comes on every rank.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.surroundings import choose

HOOKS = (hook_with_zero_step, hook_with_zero_step_interleaved)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), SGD, shard_gradients=True, lr=0.1, **options)


def step(model: Any, opt: Any, batch: Tensor) -> None:
    opt.zero_grad()
    model(batch).square().mean().backward()
    opt.step()


def assert_tells(error: BaseException, kind: Any, *words: str) -> None:
    assert isinstance(error, kind), f"{type(error).__name__}: {error}"
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def assert_trains(rank: int) -> None:
    """A run beside DDP, after whatever went wrong."""
    model, ddp = make_model(), DistributedDataParallel(make_model())
    opt, plain = sharded(model), SGD(ddp.parameters(), lr=0.1)
    for batch in batches(rank, 2):
        step(model, opt, batch)
        step(ddp, plain, batch)
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)  # last bits of sums


# --- who reduces? -------------------------------------------------------------------------------------------------


def wrapped_before(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make_model())
    whole = error_of(lambda: sharded(ddp), "a wrapped model")
    inner = error_of(lambda: sharded(ddp.module), "the module inside")
    part = error_of(lambda: sharded(ddp.module[2]), "a part of it")
    bigger = error_of(lambda: sharded(nn.ModuleList([nn.Linear(2, 2).double(), ddp])), "a model with a wrapped part")
    for error in (whole, inner, part, bigger):
        assert_tells(error, ValueError, "shard_gradients", "DistributedDataParallel", "rop ")
    assert_trains(rank)


def test_a_model_that_is_wrapped_in_ddp_is_refused():
    """Both would reduce: gradients would be averaged twice. The error says to drop the wrapper or shard_gradients."""
    run_ranks(wrapped_before, 2, timeout=60, pg_timeout=10)


def not_wrapped(rank: int, world: int) -> None:
    """A DDP module beside it is nobody's business; nor is one that is gone."""
    other = DistributedDataParallel(make_model())
    assert_trains(rank)
    model = make_model()
    ddp = DistributedDataParallel(model)
    ddp(batches(rank, 1)[0]).sum().backward()
    model.zero_grad()
    del ddp
    opt = sharded(model)
    reference = DistributedDataParallel(make_model())
    plain = SGD(reference.parameters(), lr=0.1)
    for batch in batches(rank, 2):
        step(model, opt, batch)
        step(reference, plain, batch)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)
    del other


def test_ddp_around_another_model_or_in_the_past_is_no_reason_to_refuse():
    run_ranks(not_wrapped, 2, timeout=60, pg_timeout=10)


def on_one_rank_only(rank: int, world: int) -> None:
    """The rank that is right is told, too; it must not wait for the others forever."""
    model = make_model()
    group = dist.new_group([0])
    wrapped = DistributedDataParallel(model, process_group=group) if rank == 0 else model
    error = error_of(lambda: sharded(wrapped), "wrapped on rank 0")
    assert_tells(error, (ValueError, RuntimeError), "DistributedDataParallel", "shard_gradients")
    if rank != 0:
        assert "rank 0" in str(error)
    dist.barrier()


def test_a_model_that_is_wrapped_on_one_rank_only_is_told_on_all():
    run_ranks(on_one_rank_only, 2, timeout=60, pg_timeout=10)


def two_modes(rank: int, world: int) -> None:
    model = make_model()
    error = error_of(lambda: sharded(model, overlap_with_ddp=True), "two modes")
    assert_tells(error, ValueError, "shard_gradients", "overlap_with_ddp", "rop ")
    ddp = DistributedDataParallel(model)
    error = error_of(lambda: sharded(ddp, overlap_with_ddp=True), "two modes and DDP")
    assert_tells(error, ValueError, "shard_gradients", "overlap_with_ddp", "rop ")
    assert_trains(rank)


def test_shard_gradients_and_overlap_with_ddp_exclude_each_other():
    run_ranks(two_modes, 2, timeout=60, pg_timeout=10)


def hooks_without_overlap(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make_model())
    default = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)
    overlapping = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    reducing = sharded(make_model())
    plain = SGD(ddp.parameters(), lr=0.1)
    for make_hook in HOOKS:
        for zero in (default, reducing, plain, None):
            error = error_of(lambda hook=make_hook, zero=zero: hook(allreduce_hook, ddp, zero), f"{zero}")
            assert_tells(error, ValueError, "overlap_with_ddp=True", make_hook.__name__)
        error = error_of(lambda hook=make_hook: hook(allreduce_hook, ddp.module, overlapping), "no DDP")
        assert_tells(error, (ValueError, TypeError), "DistributedDataParallel")
    # Whoever was refused still works.
    reference = DistributedDataParallel(make_model())
    oracle = SGD(reference.parameters(), lr=0.1)
    for batch in batches(rank, 2):
        step(ddp, default, batch)
        step(reference, oracle, batch)
    for mine, theirs in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_hook_on_an_optimizer_without_overlap_with_ddp_is_a_value_error():
    """As in torch. Also with the plain optimizer, and with one that reduces itself."""
    run_ranks(hooks_without_overlap, 2, timeout=60, pg_timeout=10)


# --- sparse gradients ---------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A table that is read sparsely, or as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor, dense: bool = False) -> Tensor:
        words = nn.functional.one_hot(ids, 10).float() @ self.table.weight if dense else self.table(ids)
        return self.out(words)


def sparse_gradients(rank: int, world: int, transport: str) -> None:
    choose(transport)
    ids = torch.tensor([1, 3, 3])
    words = ("parse", "shard_gradients", "rop ", "table.weight")

    def first() -> None:
        model = Words()
        opt = ZeroRedundancyOptimizer(model.named_parameters(), SGD, shard_gradients=True, lr=0.1)
        model(ids).sum().backward()
        opt.step()

    def in_no_sync() -> None:
        model = Words()
        opt = ZeroRedundancyOptimizer(model.named_parameters(), SGD, shard_gradients=True, lr=0.1)
        with opt.no_sync():
            model(ids).sum().backward()
        model(ids).sum().backward()
        opt.step()

    def added_to_dense(**options: Any) -> None:
        model = Words()
        opt = ZeroRedundancyOptimizer(model.named_parameters(), SGD, shard_gradients=True, lr=0.1, **options)
        model(ids, dense=True).sum().backward()
        model(ids).sum().backward()
        opt.step()

    def later() -> None:
        model = Words()
        opt = ZeroRedundancyOptimizer(model.named_parameters(), SGD, shard_gradients=True, lr=0.1)
        model(ids, dense=True).sum().backward()
        opt.step()
        opt.zero_grad()
        model(ids).sum().backward()
        opt.step()

    for run in (first, in_no_sync, added_to_dense, lambda: added_to_dense(reduce_dtype=torch.float32), later):
        assert_tells(error_of(run, getattr(run, "__name__", "")), (RuntimeError, ValueError), *words)
    assert_trains(rank)


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_sparse_gradients_are_refused_by_the_name_of_their_parameter(transport):
    """At once, in a later step, under no_sync, and added to a dense one; on every rank."""
    run_ranks(sparse_gradients, 2, transport, timeout=60, pg_timeout=10)


# --- values -------------------------------------------------------------------------------------------------------


def bad_values(rank: int, world: int) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("reduce_dtype", {"reduce_dtype": torch.int32}),
        ("reduce_dtype", {"reduce_dtype": torch.bool}),
        ("reduce_dtype", {"reduce_dtype": torch.complex64}),
        ("reduce_dtype", {"reduce_dtype": "float32"}),
        ("reduce_dtype", {"reduce_dtype": float}),
        ("gradient_buckets_in_flight", {"gradient_buckets_in_flight": 0}),
        ("gradient_buckets_in_flight", {"gradient_buckets_in_flight": -1}),
        ("gradient_buckets_in_flight", {"gradient_buckets_in_flight": 1.5}),
        ("gradient_buckets_in_flight", {"gradient_buckets_in_flight": "2"}),
    ]
    for name, options in cases:
        error = error_of(lambda options=options: sharded(make_model(), **options), f"{options}")
        assert_tells(error, (ValueError, TypeError), name)
        assert repr(next(iter(options.values()))).strip("'") in str(error), f"{options}: which value? {error}"
    # The arguments that say nothing without shard_gradients say so.
    for options in (
        {"reduce_dtype": torch.float32},
        {"gradient_buckets_in_flight": 4},
        {"overlap_backward": False},
        {"find_unused_parameters": True},
    ):
        for mode in ({}, {"overlap_with_ddp": True}):
            error = error_of(
                lambda options=options, mode=mode: ZeroRedundancyOptimizer(
                    make_model().parameters(), SGD, lr=0.1, **options, **mode
                ),
                f"{options} {mode}",
            )
            assert_tells(error, ValueError, *options, "shard_gradients")
    assert_trains(rank)


def test_bad_values_of_the_new_arguments_are_refused_by_name_and_value():
    run_ranks(bad_values, 2, timeout=60, pg_timeout=10)


def ranks_differ(rank: int, world: int) -> None:
    for name, values in (
        ("reduce_dtype", (None, torch.float64)),
        ("gradient_buckets_in_flight", (2, 3)),
        ("shard_gradients", (True, False)),
        ("broadcast_parameters", (True, False)),
        ("find_unused_parameters", (False, True)),
    ):
        options = {"shard_gradients": True, name: values[rank]}
        error = error_of(
            lambda options=options: ZeroRedundancyOptimizer(make_model().parameters(), SGD, lr=0.1, **options), name
        )
        assert_tells(error, (ValueError, RuntimeError), name, str(values[0]), str(values[1]), "rank")
    assert_trains(rank)


def test_ranks_with_different_values_are_told_which_and_on_which_ranks():
    """Two dtypes on the wire, or one rank that does not reduce at all, would be garbage or a hang."""
    run_ranks(ranks_differ, 2, timeout=60, pg_timeout=10)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))


def complex_with_phase(rank: int, world: int) -> str:
    """A gradient with an imaginary part, which a real dtype would drop."""
    model, other = Turning(), Turning()
    target = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    try:
        opt = sharded(model, reduce_dtype=torch.float32)
        (model.weight * (1 + rank) - target).abs().square().sum().backward()
        opt.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    sum((other.weight * (1 + member) - target).abs().square().sum() / world for member in range(world)).backward()
    assert other.weight.grad.imag.abs().max() > 0.1
    torch.testing.assert_close(model.weight.detach(), other.weight.detach() - 0.1 * other.weight.grad)
    return ""


def test_complex_parameters_with_a_real_reduce_dtype_are_right_or_refused():
    told = run_ranks(complex_with_phase, 2, timeout=60, pg_timeout=10)
    assert told == ["", ""] or all("reduce_dtype" in text and "complex" in text for text in told), told


def only_with_sharded_gradients(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make_model())
    opt = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)

    def accumulate() -> None:
        with opt.no_sync():
            pass

    assert_tells(error_of(accumulate, "no_sync of DDP's mode"), RuntimeError, "no_sync", "shard_gradients", "DDP")
    reducing = sharded(make_model())
    for copied in (copy.copy, copy.deepcopy):
        assert_tells(error_of(lambda copied=copied: copied(reducing)), RuntimeError, "shard_gradients")
    assert_trains(rank)


def test_calls_of_the_other_mode_name_the_mode():
    run_ranks(only_with_sharded_gradients, 2, timeout=60, pg_timeout=10)


# --- looking at a sharded gradient --------------------------------------------------------------------------------

LOOKS: dict[str, Callable[[Any], Any]] = {
    "+ 1": lambda grad: grad + 1,
    "1 -": lambda grad: 1 - grad,
    "+ grad": lambda grad: grad + grad,
    "@": lambda grad: grad @ grad.t(),
    "==": lambda grad: grad == 0,
    "-": lambda grad: -grad,
    "** 2": lambda grad: grad**2,
    "sum": lambda grad: grad.sum(),
    "mean": lambda grad: grad.mean(),
    "abs max": lambda grad: grad.abs().max(),
    "norm of rows": lambda grad: grad.norm(dim=1),
    "isnan any": lambda grad: torch.isnan(grad).any(),
    "isfinite": lambda grad: torch.isfinite(grad).all(),
    "[0]": lambda grad: grad[0],
    "iter": lambda grad: list(grad),
    "view": lambda grad: grad.view(-1),
    "reshape": lambda grad: grad.reshape(-1),
    "flatten": lambda grad: grad.flatten(),
    "clone": lambda grad: grad.clone(),
    "detach clone": lambda grad: grad.detach().clone(),
    "data": lambda grad: grad.data + 0,
    "to": lambda grad: grad.to(torch.float32),
    "float": lambda grad: grad.float(),
    "cpu numpy": lambda grad: grad.cpu().numpy(),
    "numpy": lambda grad: grad.numpy(),
    "tolist": lambda grad: grad.tolist(),
    "item": lambda grad: grad.sum().item(),
    "cat": lambda grad: torch.cat([grad, grad]),
    "stack": lambda grad: torch.stack([torch.zeros_like(torch.empty(grad.shape, dtype=grad.dtype)), grad]),
    "copy_ from": lambda grad: torch.zeros(grad.shape, dtype=grad.dtype).copy_(grad),
    "copy_ to": lambda grad: grad.copy_(torch.zeros(grad.shape, dtype=grad.dtype)),
    "add_": lambda grad: grad.add_(torch.ones(grad.shape, dtype=grad.dtype)),
    "add_ scalar": lambda grad: grad.add_(1.0),
    "+=": lambda grad: grad.__iadd__(1.0),
    "mul_ whole": lambda grad: grad.mul_(torch.ones(grad.shape, dtype=grad.dtype)),
    "clamp": lambda grad: grad.clamp(-1, 1),
    "clamp_ whole": lambda grad: grad.clamp_(max=torch.ones(grad.shape, dtype=grad.dtype)),
    "nan_to_num": lambda grad: torch.nan_to_num(grad),
    "nan_to_num out": lambda grad: torch.nan_to_num(grad, out=torch.empty(grad.shape, dtype=grad.dtype)),
    "set data": lambda grad: setattr(grad, "data", torch.zeros(grad.shape, dtype=grad.dtype)),
    "sign": lambda grad: grad.sign(),
    "histc": lambda grad: torch.histc(grad, 10),
    "allclose": lambda grad: torch.allclose(grad, grad),
    "equal": lambda grad: torch.equal(grad, torch.zeros(grad.shape, dtype=grad.dtype)),
    "all_reduce": lambda grad: dist.all_reduce(grad, group=dist.group.WORLD),
    "torch.save": lambda grad: torch.save(grad, io.BytesIO()),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def looks(rank: int, world: int, shard: str) -> dict[str, str]:
    """What each look answers, on rank 0 only; then the run must go on as if nobody had looked."""
    model, ddp = make_model(), DistributedDataParallel(make_model())
    opt, plain = sharded(model, shard=shard), SGD(ddp.parameters(), lr=0.1)
    found: dict[str, str] = {}
    for batch in batches(rank, 2):
        opt.zero_grad()
        plain.zero_grad()
        model(batch).square().mean().backward()
        ddp(batch).square().mean().backward()
        weight = model[0].weight
        assert isinstance(weight.grad, ShardedGradient)
        for name, look in LOOKS.items() if rank == 0 else ():
            try:
                look(weight.grad)
                found[name] = "no error"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
        opt.step()
        plain.step()
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)
    return found


@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_reading_a_sharded_gradient_as_if_it_were_whole_names_full_grad(shard):
    """On one rank only, where most programs look; an answer would be a piece's, or a hang for the others."""
    found = run_ranks(looks, 2, shard, timeout=60, pg_timeout=10)[0]
    assert found.keys() == LOOKS.keys()
    wrong = {name: text for name, text in found.items() if "full_grad" not in text}
    assert not wrong, wrong


def scale_each_otherwise(rank: int, world: int) -> list[str]:
    """A list of factors, or a tensor of several; among the gradients is one that is not sharded. The errors."""
    model = make_model()
    opt = sharded(model, shard="tensor")  # some ranks have no piece of some of them
    model(batches(rank, 1)[0]).square().mean().backward()
    plain = torch.ones(3, dtype=torch.float64)
    gradients = [plain, *(param.grad for param in model.parameters())]
    before = [opt.full_grad(param).clone() for param in model.parameters()]
    ones = [torch.tensor(0.5, dtype=torch.float64) for _ in gradients]
    texts = []
    for factors in ([0.5] * len(gradients), ones, [0.5], torch.full((3,), 0.5, dtype=torch.float64)):
        for scale in (torch._foreach_mul_, torch._foreach_div_):
            error = error_of(lambda scale=scale, factors=factors: scale(gradients, factors), "factors by gradient")
            texts.append(f"{type(error).__name__}: {error}")
    assert torch.equal(plain, torch.ones(3, dtype=torch.float64))
    for param, whole in zip(model.parameters(), before, strict=True):
        assert torch.equal(opt.full_grad(param), whole)
    return texts


def test_a_call_over_a_list_with_a_factor_for_each_is_refused_on_all_ranks_before_anything_is_changed():
    first, *others = run_ranks(scale_each_otherwise, 3, timeout=60, pg_timeout=10)
    assert all("RuntimeError" in text and "full_grad" in text for text in first), first
    assert all(texts == first for texts in others)


def harmless_looks(rank: int, world: int) -> None:
    model, ddp = make_model(), DistributedDataParallel(make_model())
    opt = sharded(model)
    batch = batches(rank, 1)[0]
    model(batch).square().mean().backward()
    ddp(batch).square().mean().backward()
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        grad = mine.grad
        assert grad is not None
        assert (grad.shape, grad.dtype, grad.device) == (theirs.grad.shape, theirs.grad.dtype, theirs.grad.device)
        assert (grad.numel(), grad.dim(), grad.ndim, grad.size(0)) == (
            theirs.grad.numel(),
            theirs.grad.dim(),
            theirs.grad.ndim,
            theirs.grad.size(0),
        )
        assert not grad.is_sparse
        assert not grad.requires_grad
        assert grad.is_floating_point()
        assert "full_grad" in repr(grad)
        assert "full_grad" in str(grad)
        assert "full_grad" in f"{grad}"
        assert grad is mine.grad
    # Copies of the model know nothing of gradients or hooks.
    twin = copy.deepcopy(model)
    assert all(param.grad is None for param in twin.parameters())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    torch.save(model.state_dict(), io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for copied in (twin, loaded):
        copied(batch).sum().backward()  # sends nothing, adds to nobody's gradients
        assert not isinstance(next(copied.parameters()).grad, ShardedGradient)
    # Scaling, on every rank, is each rank's own affair.
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        mine.grad.mul_(0.5)
        mine.grad.div_(torch.tensor(2.0))
        mine.grad *= 3
        theirs.grad.mul_(0.5).div_(2.0).mul_(3)
        torch.testing.assert_close(opt.full_grad(mine), theirs.grad, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(mine.grad.norm(), theirs.grad.norm(), rtol=1e-12, atol=1e-14)
        mine.grad.zero_()
        assert not opt.full_grad(mine).any()


def test_what_needs_no_whole_gradient_works():
    """Shapes, dtypes, text, scaling, norms, copies of the model."""
    run_ranks(harmless_looks, 2, timeout=60, pg_timeout=10)


def two_of_them(rank: int, world: int) -> None:
    model = make_model()
    first = sharded(model)

    def train() -> None:
        second = sharded(model)
        step(model, first, batches(rank, 1)[0])
        second.step()

    assert_tells(error_of(train, "two optimizers over the same parameters"), (ValueError, RuntimeError), "shard")


def test_two_optimizers_that_reduce_the_same_parameters_are_told():
    """Each would take the gradients away from the other: weights that are silently wrong, or a hang."""
    run_ranks(two_of_them, 2, timeout=60, pg_timeout=10)


def frees(rank: int, world: int) -> None:
    """An optimizer that is gone reduces nothing any more, and another can take its place."""
    model, ddp = make_model(), DistributedDataParallel(make_model())
    opt, plain = sharded(model), AdamW(ddp.parameters(), lr=0.1)
    step(model, opt, batches(rank, 1)[0])
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
            theirs.copy_(mine)
    opt.zero_grad()
    del opt
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, shard_gradients=True, lr=0.1)
    for batch in batches(rank, 2):
        step(model, opt, batch)
        step(ddp, plain, batch)
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-10, atol=1e-12)


def test_a_second_optimizer_can_take_the_place_of_one_that_is_gone():
    run_ranks(frees, 2, timeout=60, pg_timeout=10)


def added_from_ddp(rank: int, world: int) -> str:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(first.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True)
    wrapped = DistributedDataParallel(second)
    error = error_of(lambda: optimizer.add_param_group({"params": second.parameters()}), "they are in DDP")
    assert len(optimizer.param_groups) == 1
    wrapped(torch.ones(1, 3)).sum().backward()
    return str(error)


def test_parameters_of_a_ddp_module_are_refused_in_a_group_that_is_added_too():
    for text in run_ranks(added_from_ddp, 2):
        assert "DistributedDataParallel" in text, text
