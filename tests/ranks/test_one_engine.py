"""All callers share one step loop: what a review of it found. Oracle: one process on the joined batch, float64.

Sums of two or three ranks' gradients are added in another order than the oracle's: differences stay below 1e-12.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step
from shardstep.grads import scheduler
from tests.harness import run_ranks

CLOSE = 1e-12
SMALL_CAP = 600 / 2**20  # about a layer per bucket


def make_model(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(layers)))


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def oracle_step(model: nn.Module, optimizer: torch.optim.Optimizer, world: int, step: int) -> None:
    optimizer.zero_grad()
    (sum(model(batch(rank, step)).sum() for rank in range(world)) / world).backward()
    optimizer.step()


def step_with_a_hook_that_raises(rank: int, world: int) -> None:
    model = make_model()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, lazy_gather=True, bucket_cap_mb=SMALL_CAP
    )

    def complain(*args: object) -> None:
        raise ValueError("complaint")

    handle = opt.optim.register_step_post_hook(complain)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = flat(model)
    with pytest.raises(ValueError, match="complaint"):
        opt.step()
    assert torch.equal(flat(model), before - 0.1)
    handle.remove()
    opt.step()
    assert torch.equal(flat(model), before - 0.1 - 0.1)


def test_after_a_lazy_step_whose_post_hook_raised_parameters_can_be_used_and_stepped():
    run_ranks(step_with_a_hook_that_raises, 2)


def closure_in_the_first_iteration(rank: int, world: int) -> None:
    ddp, oracle = DistributedDataParallel(make_model()), make_model()
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, opt))
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            loss = ddp(batch(rank, step)).sum()
            loss.backward()
            return loss

        assert opt.step(closure) is not None
        oracle_step(oracle, plain, world, step)
        assert (flat(ddp.module) - flat(oracle)).abs().max() < CLOSE, step


def test_a_closure_whose_backward_steps_in_a_ddp_hook_steps_once_also_the_first_time():
    run_ranks(closure_in_the_first_iteration, 2)


def step_inside_a_step(rank: int, world: int) -> None:
    model, oracle = make_model(), make_model()
    opts = [
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1),
        torch.optim.SGD(oracle.parameters(), lr=0.1),
    ]
    for opt, trained in zip(opts, (model, oracle), strict=True):
        for param in trained.parameters():
            param.grad = torch.ones_like(param)
        for _ in range(2):
            opt.step(lambda opt=opt: opt.step())
    assert torch.equal(flat(model), flat(oracle))


def test_a_closure_may_step_itself_as_in_plain_torch():
    run_ranks(step_inside_a_step, 2)


class Switches(torch.optim.SGD):
    """Has train and eval, as schedule-free optimizers do, and fails when told to."""

    fails = False

    def step(self, closure=None):
        if Switches.fails:
            raise ArithmeticError("told to fail")
        return super().step(closure)

    def train(self) -> None:
        pass

    def eval(self) -> None:
        pass


def switch_after_a_failure(rank: int, world: int, folder: Path) -> None:
    model = make_model()
    opt = ZeroRedundancyOptimizer(model.parameters(), Switches, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    Switches.fails = True
    with pytest.raises(ArithmeticError):
        opt.step()
    opt.eval()
    with pytest.raises(RuntimeError, match="expects an optimizer whose last step was completed"):
        checkpoint.save(folder / "c", opt, model)
    Switches.fails = False
    opt.train()
    opt.step()
    checkpoint.save(folder / "c", opt, model)
    opt.engine.progress.break_off("a gather failed")
    with pytest.raises(RuntimeError, match=r"eval expects a process group .* Start the processes again"):
        opt.eval()


def test_train_and_eval_complete_no_step_that_failed_before(tmp_path):
    run_ranks(switch_after_a_failure, 2, tmp_path)


def collected_state_after_a_step(rank: int, world: int) -> int:
    model = make_model()
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    opt.consolidate_state_dict(to=0)
    state = opt.state_dict()["state"]
    held = [weakref.ref(value) for entry in state.values() for value in entry.values()]
    assert len(held) == (24 if rank == 0 else 0)
    del state
    opt.step()
    gc.collect()
    return sum(reference() is not None for reference in held)


def test_a_step_frees_the_state_that_was_consolidated():
    assert run_ranks(collected_state_after_a_step, 2) == [0, 0]


def replaced_parameters(rank: int, world: int) -> None:
    model = make_model()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.1, shard_gradients=True, parameters_as_bucket_view=True
    )
    model(batch(rank, 0)).sum().backward()
    opt.step()
    opt.zero_grad()
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    model(batch(rank, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="their module now holds other parameters"):
        opt.step()


def test_with_sharded_gradients_too_a_model_whose_parameters_were_replaced_is_noticed():
    run_ranks(replaced_parameters, 2)


def uneven_lazy_closures(rank: int, world: int, lazy: bool, with_closure: bool) -> torch.Tensor:
    ddp = DistributedDataParallel(make_model(layers=6))
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, lazy_gather=lazy, bucket_cap_mb=SMALL_CAP)
    with Join([ddp, opt]):
        for step in range(4 if rank == 0 else 2):

            def closure(step: int = step) -> torch.Tensor:
                opt.zero_grad()
                loss = ddp(batch(rank, step)).sum()
                loss.backward()
                return loss

            if with_closure:
                opt.step(closure)
            else:
                closure()
                opt.step()
    opt.check_replicas()
    return flat(ddp.module)


@pytest.mark.parametrize("with_closure", [False, True])
def test_lazy_gathers_change_nothing_on_uneven_inputs(with_closure):
    lazy, eager = (run_ranks(uneven_lazy_closures, 2, lazy, with_closure) for lazy in (True, False))
    assert torch.equal(lazy[0], eager[0])


def aborted_gradients(rank: int, world: int) -> None:
    """Rank 0 cannot send its gradients, because rank 1 has none; zero_grad lets go of them."""
    scheduler.PATIENCE = 0.3
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    opt = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.1,
        shard_gradients=True,
        bucket_cap_mb=64 * 64 * 4 / 2**20,
        gradient_buckets_in_flight=1,
    )
    waiting = []
    if rank == 0:
        model(torch.ones(2, 64)).sum().backward()
        waiting = [weakref.ref(tensor) for tensor in opt.engine.source._reducer.iteration.arrived.values()]
        assert len(waiting) >= 4
    opt.zero_grad()
    gc.collect()
    assert [reference() for reference in waiting if reference() is not None] == []
    dist.barrier()
    model(torch.ones(2, 64)).sum().backward()
    opt.step()


def test_an_aborted_iteration_lets_go_of_the_gradients_that_it_could_not_send():
    run_ranks(aborted_gradients, 2)


class SometimesUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


def a_second_hook(rank: int, world: int) -> None:
    model = SometimesUsed()
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, weight_decay=0.5, overlap_with_ddp=True
    )
    finds_unused = DistributedDataParallel(model, find_unused_parameters=True)
    finds_unused.register_comm_hook(None, hook_with_zero_step(allreduce_hook, finds_unused, opt))
    hook_with_zero_step(allreduce_hook, DistributedDataParallel(model), opt)  # made, and never registered
    before = model.unused.weight.detach().clone()
    finds_unused(torch.ones(2, 8)).backward()
    assert torch.equal(model.unused.weight, before)


def test_a_hook_that_is_never_registered_does_not_change_what_another_one_knows():
    run_ranks(a_second_hook, 2)


def test_arguments_are_checked_before_the_process_group_is_looked_for():
    with pytest.raises(TypeError, match="single tensor"):
        ZeroRedundancyOptimizer(torch.ones(3), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="empty parameter list"):
        ZeroRedundancyOptimizer([], torch.optim.SGD, lr=0.1)
