"""The wheel, installed where nothing but torch is: imported, called and trained with as a user does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import shardstep
from tests.package.conftest import ROOT, Environment
from tests.readme import EXAMPLE, LEAVE, SAVING, assert_half_the_state

pytestmark = pytest.mark.timeout(1800)  # the first test installs torch

TELL = """
import importlib.metadata, json, shardstep
from pathlib import Path

here = Path(shardstep.__file__).parent
print(json.dumps({
    "place": str(here),
    "version": shardstep.__version__,
    "metadata": importlib.metadata.version("shardstep"),
    "requires": [line for line in importlib.metadata.requires("shardstep") if "extra" not in line],
    "typed": (here / "py.typed").is_file(),
    "names": [name for name in shardstep.__all__ if getattr(shardstep, name, None) is None],
}))
"""

IMPORT_ALL = """
import importlib, pkgutil, shardstep

for found in pkgutil.walk_packages(shardstep.__path__, "shardstep."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:  # what is for a framework needs that one
        assert found.name.startswith("shardstep.integrations.") and error.name in ("lightning", "transformers"), error
    print(found.name)
"""


def test_the_package_is_imported_from_where_it_was_installed(environment: Environment, tmp_path: Path):
    told = json.loads(environment.run("python", "-c", TELL, cwd=tmp_path))
    assert Path(told["place"]).is_relative_to(environment.bin.parent)
    assert told["version"] == told["metadata"] == shardstep.__version__
    assert told["requires"] == ["numpy", "torch>=2.6"]
    assert told["typed"] is True
    assert told["names"] == []


def test_every_module_can_be_imported_beside_torch_alone(environment: Environment, tmp_path: Path):
    imported = environment.run("python", "-c", IMPORT_ALL, cwd=tmp_path).split()
    source = ROOT / "src"
    modules = {".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    assert set(imported) | {"shardstep"} == {name.removesuffix(".__init__") for name in modules}


@pytest.mark.parametrize("command", [["shardstep"], ["python", "-m", "shardstep"]], ids=" ".join)
def test_the_command_tells_the_version(command: list[str], environment: Environment, tmp_path: Path):
    printed = environment.run(*command, "--version", cwd=tmp_path)
    assert printed == f"shardstep {shardstep.__version__}\n"


def test_the_example_of_the_readme_trains_on_two_ranks(environment: Environment, tmp_path: Path):
    (tmp_path / "example.py").write_text(EXAMPLE)
    assert_half_the_state(environment.torchrun(2, "example.py", cwd=tmp_path))


def test_the_example_of_the_readme_saves_what_the_command_verifies(environment: Environment, tmp_path: Path):
    body = EXAMPLE.removesuffix(LEAVE)
    # (One text: what two processes print at once may be mixed between the arguments of print.)
    (tmp_path / "save.py").write_text(body + SAVING + "print(f'at step {step}')\n" + LEAVE)
    assert environment.torchrun(2, "save.py", cwd=tmp_path).count("at step 10") == 2
    told = environment.run("shardstep", "verify", "checkpoints/step-10", cwd=tmp_path)
    assert re.fullmatch(r"checkpoints/step-10 is complete and undamaged \([\d,]+ bytes\)\n", told)


def test_the_examples_need_nothing_but_the_package(environment: Environment, tmp_path: Path):
    """And what it depends on: torch and numpy."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    sizes = ["--layers", "1", "--width", "32", "--heads", "2"]
    short = [*sizes, *["--context", "16", "--batch-size", "4", "--steps", "4"]]
    assert "saved in" in environment.torchrun(2, "examples/train_gpt.py", *short, cwd=tmp_path)
    assert "of the gradients: MemoryReport" in environment.torchrun(2, "examples/zero2.py", *short, cwd=tmp_path)
    assert "DDP + shardstep" in environment.torchrun(2, "examples/memory.py", *sizes, cwd=tmp_path)
    assert "step 4:" in environment.run("python", "examples/generate.py", "--length", "3", cwd=tmp_path)
