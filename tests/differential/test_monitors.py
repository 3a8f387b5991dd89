"""Communication is hidden in every mode; and each monitor notices what it is for (the negative controls)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import simulated
from tests.differential import trial
from tests.differential.cases import run
from tests.differential.configurations import MODES, Configuration
from tests.differential.programs import Loop
from tests.harness import run_ranks

SEVERAL = Configuration(cap=0.0003, device="sim", groups="one", watch="time")


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_the_communication_is_hidden(mode: str) -> None:
    config = replace(SEVERAL, mode=mode)
    run(replace(config, ddp_cap=0.0005) if config.uses_ddp else config, (Loop(6),))


# Lines of a step that should not be there. They seem to be ours: their file is in a folder "shardstep".
FAULTS = {
    "reads": "param.sum().item()",
    "sends": "[dist.all_gather_into_tensor(param.new_empty(2), param.new_ones(1)) for _ in range(9)]",
    "allocates": "kept.append(param.new_empty(1000))",
    "frees": """
side = torch.Stream("sim")  # which does nothing afterwards: no race
with side:
    made = torch.ones(9, device="sim")
default = torch.accelerator.current_stream()
default.wait_stream(side)
made.sum()
del made""",
    "waits in a capture": """
if not kept:
    kept.append(torch.Event("sim"))
    kept[0].record()
torch.accelerator.current_stream().wait_event(kept[0])""",
    "races": """
with torch.Stream("sim"):  # which waits for nobody
    param.mul_(1)""",
}
TOLD = {
    "nothing": "",
    "reads": "the host waited",
    "sends": "step has sent",
    "allocates": "new memory",
    "frees": "freed early",
    "launches in zero_grad": "zero_grad launched",
    "reduces late": "should be hidden",
    "waits in a capture": "the capture of a graph would forbid",
    "races": "A race on the simulated device",
}


def _seems_ours(source: str) -> Callable[[Any], None]:
    names: dict[str, Any] = {"kept": []}
    exec("import torch, torch.distributed as dist", names)
    code = compile(source.strip(), "/seems/shardstep/fault.py", "exec")
    return lambda param: exec(code, names | {"param": param.detach()})


@contextmanager
def _with(fault: str) -> Iterator[None]:
    """The library, with a mistake."""
    step, zero_grad = ZeroRedundancyOptimizer.step, ZeroRedundancyOptimizer.zero_grad
    bad = _seems_ours(FAULTS.get(fault, ""))

    def faulty_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        bad(self.param_groups[0]["params"][0])
        return step(self, *args, **kwargs)

    def faulty_zero_grad(self: Any, *args: Any) -> None:
        zero_grad(self, *args)
        self.param_groups[0]["params"][0].detach().clone()

    if fault in FAULTS:
        ZeroRedundancyOptimizer.step = faulty_step  # type: ignore[method-assign]
    elif fault == "launches in zero_grad":
        ZeroRedundancyOptimizer.zero_grad = faulty_zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        ZeroRedundancyOptimizer.step, ZeroRedundancyOptimizer.zero_grad = step, zero_grad  # type: ignore[method-assign]


@simulated.on_device
def _make_mistakes(rank: int, world: int, folder: str) -> dict[str, str]:
    """What each of them ends with."""
    told = {}
    for number, fault in enumerate(TOLD):
        config = replace(SEVERAL, mode="sharded", reducing="at the end" if fault == "reduces late" else "as it is")
        config = config if fault == "reduces late" else replace(config, watch="weights")
        config = replace(config, optimizer="SGD") if "capture" in fault else config
        with _with(fault):
            try:
                trial.run(config, (Loop(4),), Path(folder) / str(number))
                told[fault] = ""
            except (AssertionError, RuntimeError) as error:
                told[fault] = str(error)
    with simulated.races_ignored():
        simulated.build().check()
    return told


@cache
def _told() -> list[dict[str, str]]:
    with TemporaryDirectory() as folder:
        return run_ranks(_make_mistakes, 2, folder, fresh=True)


@pytest.mark.parametrize("fault", TOLD)
def test_a_mistake_is_noticed(fault: str) -> None:
    for found in _told():
        assert TOLD[fault] in found[fault], found[fault]
        assert bool(found[fault]) == bool(TOLD[fault]), found[fault]
