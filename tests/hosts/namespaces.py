"""Hosts on one machine: each has its own network, name, processes, ``/dev/shm`` and ``/tmp``, as Linux namespaces.

A host lives as long as its first process, a shell that reads from a pipe. When the pipe is closed, or when whoever
holds it dies of whatever, the shell ends; the kernel then kills everything else on the host, and its mounts and its
interface vanish with it. So there is nothing to clean up after a crash, and no name that two runs could both want.
(That is why the namespaces have no names: those of ``ip netns add`` stay until somebody deletes them.)

What hosts share as on one machine: the kernel with its ``boot_id``, the clock, the disk outside of ``/tmp``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from tests.hosts import links

ROOT = Path(__file__).parent.parent.parent
PREFIX = "shardstep-host-"  # of the hosts' names
_NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--pid"]
_PROGRAMS = ("ip", "tc", "unshare", "nsenter")

# The first process of a host. Arguments: its name, the text of its /etc/hosts, and directories of the machine that it
# sees even where its own /tmp hides them. Says its process id outside of the host, then that it is ready.
_FIRST_PROCESS = """
set -e
read outer_id rest < /proc/self/stat  # /proc is still the machine's
echo "$1" > /proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
printf '%s' "$2" > /dev/shm/hosts
shift 2
number=0
for path in "$@"; do
    number=$((number + 1))
    mkdir "/dev/shm/$number"
    mount --bind "$path" "/dev/shm/$number"
done
mount -t tmpfs tmpfs /tmp
mv /dev/shm/hosts /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
number=0
for path in "$@"; do
    number=$((number + 1))
    mkdir -p "$path"
    mount --move "/dev/shm/$number" "$path"
    rmdir "/dev/shm/$number"
done
mount -t proc proc /proc
ip link set lo up
echo "$outer_id"
read until_the_pipe_is_closed
"""


def why_not() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    if sys.platform != "linux":
        return "hosts are namespaces of Linux"
    if os.geteuid() != 0:
        return "making network namespaces takes root: sudo make test-hosts"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True)
    return f"this kernel or container allows no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host. ``start`` runs a program on it; closing it is pulling the plug."""

    def __init__(self, name: str, address: str, etc_hosts: str, seen: Sequence[Path]) -> None:
        self.name, self.address = name, address
        self._first = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--kill-child", "sh", "-c", _FIRST_PROCESS, "sh", name, etc_hosts, *seen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, who end it in order
        )
        assert self._first.stdout is not None
        said = self._first.stdout.readline().strip()
        if not said:
            raise RuntimeError(f"the host {name} could not be made: its shell ended with {self._first.wait()}")
        self.link = links.Link(int(said))

    def start(self, command: Sequence[str | Path], env: Mapping[str, str], output: IO[Any] | None = None) -> Program:
        """Start a program in the project's directory; what it prints goes to ``output``."""
        enter = ["nsenter", "--target", str(self.link.process), *_NAMESPACES, "env", f"--chdir={ROOT}"]
        return Program(
            [*enter, *map(str, command)],
            env={**env},
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,  # so that ``kill`` reaches its children
        )

    def run(self, *command: str | Path) -> str:
        """Run a program to its end, which has to be a good one; what it printed."""
        with self.start(command, os.environ, subprocess.PIPE) as program:  # type: ignore[arg-type]
            printed = program.communicate(timeout=60)[0].decode()
        assert program.returncode == 0, printed
        return printed

    def close(self) -> None:
        """End the host and everything that runs on it."""
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        self._first.stdin.close()
        self._first.wait(timeout=30)
        self._first.stdout.close()


class Program(subprocess.Popen):
    """A program on a host, with whatever it starts in its process group."""

    def kill_group(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


@contextmanager
def open_hosts(count: int, shared: Path) -> Iterator[list[Host]]:
    """``count`` hosts on one network, each of which can resolve the names of all.

    All see the project, its environment and ``shared`` (as a network file system would be) under the same paths.
    """
    names = [f"{PREFIX}{number}" for number in range(count)]
    addresses = [links.address(number) for number in range(count)]
    rows = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    etc_hosts = "".join(["127.0.0.1 localhost\n", *rows])
    hidden = [path.resolve() for path in (ROOT, Path(sys.prefix), shared)]
    seen = [path for path in dict.fromkeys(hidden) if path.is_relative_to("/tmp")]
    with ExitStack() as stack:
        hosts = []
        for name, address in zip(names, addresses, strict=True):
            hosts.append(Host(name, address, etc_hosts, seen))
            stack.callback(hosts[-1].close)
        links.connect([host.link for host in hosts], stack)
        yield hosts
