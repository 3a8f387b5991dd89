"""The network between hosts: a cable for two, a switch for more. It can be cut, slowed down and read off."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

INTERFACE = "eth0"  # on every host
_NETWORK = "10.77.0"


class Traffic(NamedTuple):
    """Bytes that an interface has carried."""

    received: int
    sent: int

    def __sub__(self, earlier: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(self.received - earlier.received, self.sent - earlier.sent)


def address(number: int) -> str:
    """Of the host of that number. (No other network is reachable from there, so these cannot collide with anything.)"""
    return f"{_NETWORK}.{number + 1}"


def traffic(net_dev: Path = Path("/proc/self/net/dev")) -> Traffic:
    """What the interface of a host has carried so far. Without an argument: of the host that asks."""
    line = next(row for row in net_dev.read_text().splitlines() if row.strip().startswith(f"{INTERFACE}:"))
    numbers = line.partition(":")[2].split()
    return Traffic(received=int(numbers[0]), sent=int(numbers[8]))


class Link:
    """The end of a cable in one host, which is known by a process that runs on it."""

    def __init__(self, process: int) -> None:
        self.process = process

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told: both sides wait."""
        self._configure("ip", "link", "set", INTERFACE, "down")

    def restore(self) -> None:
        self._configure("ip", "link", "set", INTERFACE, "up")

    def limit(self, gigabits: float) -> None:
        """Let so much per second out. A burst is what passes in a millisecond, at least a few of TCP's largest packets;
        TCP keeps the queue short by itself."""
        burst = max(256_000, int(gigabits * 1e9 / 8 / 1000))
        rate = ["rate", f"{gigabits}gbit", "burst", str(burst), "latency", "50ms"]
        self._configure("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *rate)

    def traffic(self) -> Traffic:
        return traffic(Path(f"/proc/{self.process}/net/dev"))

    def configure_address(self, own: str) -> None:
        self._configure("ip", "address", "add", f"{own}/24", "dev", INTERFACE)
        self.restore()

    def _configure(self, *command: str) -> None:
        _run("nsenter", "--target", str(self.process), "--net", *command)


def connect(ends: list[Link], stack: ExitStack) -> None:
    """Connect hosts and give them their addresses. The network ends with them, or with ``stack``."""
    processes = [str(end.process) for end in ends]
    if len(ends) == 2:
        first, second = processes
        _add_cable(first, INTERFACE, second, INTERFACE)
    elif len(ends) > 2:
        _add_switch(processes, stack)
    for number, end in enumerate(ends if len(ends) > 1 else []):
        end.configure_address(address(number))


def _add_cable(process: str, name: str, other_process: str, other_name: str) -> None:
    there = ["peer", "name", other_name, "netns", other_process]
    _run("ip", "link", "add", name, "netns", process, "type", "veth", *there)


def _add_switch(processes: list[str], stack: ExitStack) -> None:
    """A bridge, in a network namespace that lasts as long as a process that waits for the end of its input."""
    switch = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link add switch type bridge && ip link set switch up && echo && cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    stack.enter_context(switch)  # closes its input and waits for it
    assert switch.stdout is not None
    switch.stdout.readline()
    for number, process in enumerate(processes):
        port = f"port{number}"
        _add_cable(str(switch.pid), port, process, INTERFACE)
        _run("nsenter", "--target", str(switch.pid), "--net", "ip", "link", "set", port, "master", "switch", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
