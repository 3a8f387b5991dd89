"""The wheel, installed where nothing but torch is: imported, called and trained with as a user does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import shardstep
from tests.package.conftest import ROOT, Environment
from tests.test_commands import LEAVE, assert_half_the_state, blocks_of_the_readme

pytestmark = [pytest.mark.package, pytest.mark.timeout(1800)]  # the first test installs torch

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
    importlib.import_module(found.name)
    print(found.name)
"""


def test_the_package_is_imported_from_where_it_was_installed(environment: Environment, tmp_path: Path):
    told = json.loads(environment.run("python", "-c", TELL, cwd=tmp_path))
    assert Path(told["place"]).is_relative_to(environment.bin.parent)
    assert told["version"] == told["metadata"] == shardstep.__version__
    assert told["requires"] == ["torch>=2.6"]
    assert told["typed"] is True
    assert told["names"] == []


def test_every_module_can_be_imported_beside_torch_alone(environment: Environment, tmp_path: Path):
    imported = environment.run("python", "-c", IMPORT_ALL, cwd=tmp_path).split()
    source = ROOT / "src"
    modules = {".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    assert set(imported) | {"shardstep"} == {name.removesuffix(".__init__") for name in modules}


@pytest.mark.parametrize("command", [["shardstep"], ["python", "-m", "shardstep.tools.cli"]], ids=" ".join)
def test_the_command_tells_the_version(command: list[str], environment: Environment, tmp_path: Path):
    printed = environment.run(*command, "--version", cwd=tmp_path)
    assert printed == f"shardstep {shardstep.__version__}\n"


def test_the_example_of_the_readme_trains_on_two_ranks(environment: Environment, tmp_path: Path):
    (tmp_path / "example.py").write_text(blocks_of_the_readme()[0])
    assert_half_the_state(environment.torchrun(2, "example.py", cwd=tmp_path))


def test_the_example_of_the_readme_saves_what_the_command_verifies(environment: Environment, tmp_path: Path):
    first, saving = blocks_of_the_readme()[:2]
    (tmp_path / "save.py").write_text(first.removesuffix(LEAVE) + saving + "print('at step', step)\n" + LEAVE)
    assert environment.torchrun(2, "save.py", cwd=tmp_path).count("at step 10") == 2
    told = environment.run("shardstep", "verify", "checkpoints/step-10", cwd=tmp_path)
    assert re.fullmatch(r"checkpoints/step-10 is complete and undamaged \([\d,]+ bytes\)\n", told)
