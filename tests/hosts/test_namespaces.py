"""The ground of these tests: hosts share what hosts share, and nothing else; and they vanish without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import conftest
from tests.hosts.namespaces import PREFIX, ROOT, Host, open_hosts

pytestmark = pytest.mark.usefixtures("namespaces")


def test_every_host_has_its_own_name_memory_tmp_and_processes(hosts: list[Host], tmp_path: Path) -> None:
    """(Not a ``boot_id``: a topology that goes by that would take both for one host. On real ones it differs.)"""
    for number, host in enumerate(hosts):
        assert host.run("cat", "/proc/sys/kernel/hostname").strip() == f"{PREFIX}{number}"
        host.run(
            "sh", "-c", f"echo {number} > /dev/shm/mine; echo {number} > /tmp/mine; echo {number} >> {tmp_path}/ours"
        )
    for number, host in enumerate(hosts):
        assert host.run("cat", "/dev/shm/mine", "/tmp/mine").split() == [str(number)] * 2
        processes = [name for name in host.run("ls", "/proc").split() if name.isdigit()]
        assert len(processes) < 5
        assert host.run("ls", "/dev/shm").split() == ["mine"]
    assert (tmp_path / "ours").read_text().split() == ["0", "1"]
    assert not Path("/dev/shm/mine").exists()


def test_closing_a_host_ends_everything_that_runs_on_it(tmp_path: Path) -> None:
    """Also what has left the process group of its program, as torchrun's workers do."""
    with open_hosts(2, tmp_path) as hosts:
        program = hosts[0].start(["setsid", "sleep", "1000"], os.environ)
        process = hosts[0].link.process
    assert program.wait(timeout=10) == -signal.SIGKILL
    assert not Path(f"/proc/{process}").exists()


def test_nothing_is_left_of_the_hosts_of_a_process_that_was_killed(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from tests.hosts.namespaces import open_hosts
with open_hosts(3, Path({str(tmp_path)!r})) as hosts:
    print(*(host.link.process for host in hosts), flush=True)
    time.sleep(1000)
"""
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    processes = killed.stdout.readline().split()
    assert len(processes) == 3
    killed.kill()
    killed.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


def test_where_hosts_are_required_a_reason_to_skip_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "why_not", lambda: "there is no root here")
    monkeypatch.delenv("SHARDSTEP_HOSTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no root"):
        conftest.require_hosts()
    monkeypatch.setenv("SHARDSTEP_HOSTS", "required")
    with pytest.raises(pytest.fail.Exception, match="SHARDSTEP_HOSTS=required, but there is no root here"):
        conftest.require_hosts()
