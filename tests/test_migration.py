"""docs/migration.md: every program of before and of after trains to the weights of plain DDP with AdamW.

And from what the program of before has saved, the one of after goes on as if nothing had happened. The snippets run as
they stand on the page, each after its first one. Programs of fairscale and DeepSpeed are ``extra``: ``make
test-migration`` runs them.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, cli
from tests.harness import run_ranks
from tests.launch import ENVIRONMENT, ROOT
from tests.surroundings import as_under_torchrun

PAGE = (ROOT / "docs" / "migration.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
GROUP = re.compile(r"^dist\.(init|destroy)_process_group\(.*\n", re.MULTILINE)
SETUP = BLOCK.search(PAGE)[2]  # type: ignore[index]
LABELS = ("**Before.**", "**After.**", "**Go on from a checkpoint of before.**")
RIVALS = ("fairscale", "deepspeed")


class Section(NamedTuple):
    title: str
    before: str
    after: str
    convert: str  # a command in between; empty: none
    resume: str

    def __str__(self) -> str:
        return self.title

    @property
    def needs(self) -> list[str]:
        """Packages of the program of before."""
        return [name for name in RIVALS if re.search(rf"^(import|from) {name}\b", self.before, re.MULTILINE)]


def read_sections() -> list[Section]:
    found = []
    for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        places = [text.index(label) for label in LABELS]
        assert places == sorted(places)
        blocks: list[list[tuple[str, str]]] = [
            [(one[1], one[2]) for one in BLOCK.finditer(text[start:end])]
            for start, end in zip(places, [*places[1:], None], strict=True)
        ]
        ((_, before),), ((_, after),), (*command, (kind, resume)) = blocks
        assert kind == "python"
        assert all(kind == "console" for kind, _ in command)
        found.append(Section(text.splitlines()[0], before, after, "".join(code for _, code in command), resume))
    return found


SECTIONS = read_sections()
BEFORE = [pytest.param(one, marks=pytest.mark.extra if one.needs else (), id=one.title) for one in SECTIONS]


def clipping_of(program: str) -> float | None:
    """To which norm it clips."""
    found = re.search(r"clip_grad_norm_\(([\d.]+)\)", program)
    return float(found[1]) if found else None


def run(program: str, section: Section) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, code in (("set-up", SETUP), (section.title, program)):
        exec(compile(GROUP.sub("", code), name, "exec"), namespace)
    return namespace


def oracle(section: Section, rounds: int) -> list[Tensor]:
    """Plain DDP and AdamW, ``rounds`` times over the page's batches."""
    page = run("", section)
    ddp = DistributedDataParallel(page["new_model"]())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    limit = clipping_of(section.after)
    for batch in page["batches"] * rounds:
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        if limit is not None:
            assert float(torch.nn.utils.clip_grad_norm_(ddp.parameters(), limit)) > limit, "the case that this is about"
        optimizer.step()
    return [param.detach() for param in ddp.parameters()]


def assert_weights(model: Any, expected: list[Tensor], what: str) -> None:
    for param, other in zip(model.parameters(), expected, strict=True):
        mine = param.detach()
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        # Sums of gradients in other orders. In float32 (DeepSpeed knows no other) AdamW's division makes more of the
        # last bits where a gradient is small; a step is 1e-3, so a lost or doubled one would show.
        tolerance = {"rtol": 1e-9, "atol": 1e-12} if mine.dtype == torch.float64 else {"rtol": 0, "atol": 2e-5}
        torch.testing.assert_close(mine, other, **tolerance, msg=lambda text: f"{what}: {text}")


def prepare(rank: int, world: int, section: Section, folder: Path) -> None:
    os.chdir(folder)
    if "deepspeed" in section.needs:
        as_under_torchrun(rank, world)
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        torch.set_default_dtype(torch.float64)


def run_and_compare(rank: int, world: int, section: Section, which: str, folder: Path) -> None:
    prepare(rank, world, section, folder)
    model = run(getattr(section, which), section)["model"]
    assert_weights(model, oracle(section, rounds=2 if which == "resume" else 1), which)


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_the_program_of_after_trains_as_plain_ddp(section, tmp_path):
    run_ranks(run_and_compare, 2, section, "after", tmp_path, fresh=True)


def convert(section: Section, folder: Path) -> None:
    program, *arguments = shlex.split(section.convert)
    assert program == "python"
    environment = {**ENVIRONMENT, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("section", BEFORE)
@pytest.mark.timeout(300)  # DeepSpeed compiles something the first time
def test_the_program_of_before_trains_alike_and_from_its_checkpoint_the_other_goes_on(section, tmp_path):
    """The same number of ranks: only then are the batches of one rank those of the other program's."""
    for package in section.needs:
        pytest.importorskip(package, reason="in the environment of make test-migration")
    run_ranks(run_and_compare, 3, section, "before", tmp_path, fresh=True, timeout=280)
    if section.convert:
        convert(section, tmp_path)
    if "fairscale" in section.needs:  # the page says that this works as well
        assert cli.main(["convert", f"{tmp_path}/oss.pt", f"{tmp_path}/DIR", "--key", "optimizer"]) == 0
    run_ranks(run_and_compare, 3, section, "resume", tmp_path, fresh=True)


def go_on_in_bf16(rank: int, world: int, section: Section, folder: Path, stage: int) -> None:
    """DeepSpeed saves after half of the steps and goes on; so does the other optimizer, from what was saved."""
    prepare(rank, world, section, folder)
    deepspeed = importlib.import_module("deepspeed")
    page = run("", section)
    batches = [batch.to(torch.bfloat16) for batch in page["batches"]]
    model = page["new_model"]()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 0.0,  # its default clips to 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=adamw, config=config, dist_init_required=False)[0]

    def train(part: list[Tensor]) -> None:
        for batch in part:
            engine.backward(engine(batch).float().square().mean())
            engine.step()

    train(batches[:2])
    engine.save_checkpoint("deepspeed", tag="last")
    dist.barrier()
    if rank == 0:
        convert(section, folder)
    dist.barrier()
    train(batches[2:])
    masters = [
        importlib.import_module("deepspeed.utils").safe_get_full_fp32_param(param) for param in model.parameters()
    ]

    other = page["new_model"]().to(torch.bfloat16)
    options: dict[str, Any] = {"lr": 1e-3, "shard_gradients": True, "master_weights": torch.float32}
    optimizer = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, **options)
    form = optimizer.state_dict()
    keys = {"step": "step", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master_weight": "fp32"}
    form["state"] = {
        i: {ours: read_universal(name, theirs) for ours, theirs in keys.items()}
        for i, (name, _) in enumerate(other.named_parameters())
    }
    optimizer.load_state_dict(form)
    for batch in batches[2:]:
        optimizer.zero_grad()
        other(batch).float().square().mean().backward()
        optimizer.step()
    for param, master in zip(other.parameters(), masters, strict=True):
        # A thousandth of a step: DeepSpeed rounds ties to even, which happens to one parameter in thousands.
        torch.testing.assert_close(optimizer.full_state(param)["master_weight"], master, rtol=0, atol=1e-6)


def read_universal(name: str, key: str) -> Any:
    value = torch.load(Path("universal/zero") / name / f"{key}.pt", weights_only=False)
    return value["param"] if isinstance(value, dict) else value


@pytest.mark.extra
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.timeout(300)  # DeepSpeed compiles something the first time
def test_from_a_bf16_run_of_deepspeed_the_masters_go_on(stage, tmp_path):
    pytest.importorskip("deepspeed", reason="in the environment of make test-migration")
    (section,) = [section for section in SECTIONS if "deepspeed" in section.needs]
    run_ranks(go_on_in_bf16, 2, section, tmp_path, stage, fresh=True, timeout=280)


def test_no_snippet_of_the_page_hides_from_this_file():
    assert len(SECTIONS) == 4
    assert PAGE.count("```python\n") == 1 + 3 * len(SECTIONS)
    assert [section.needs for section in SECTIONS] == [[], ["fairscale"], ["deepspeed"], []]
