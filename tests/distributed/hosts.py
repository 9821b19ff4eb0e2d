"""Two hosts on one machine: network namespaces joined by a veth pair, whose link can be cut and mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = "10.77.0.1"


class Hosts:
    """Two namespaces, there as long as this is entered; needs root, or user namespaces that anyone may make."""

    def __enter__(self) -> Hosts:
        missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
        if missing:
            pytest.skip(f"no {' or '.join(missing)} here (iproute2, util-linux): no two hosts to be had")
        self._holders: list[subprocess.Popen] = []
        as_root = ["--user", "--map-root-user"] if os.geteuid() else []
        keep = ["--user", "--preserve-credentials"] if os.geteuid() else []
        self._on: list[list[str]] = [[]]
        try:
            for how in (as_root, []):  # the second lies in the user namespace of the first
                pid = self._hold([*self._on[-1], "unshare", *how, "--net"])
                self._on.append(["nsenter", "--target", str(pid), *keep, "--net"])
            del self._on[0]
            self._call(0, "link add veth0 type veth peer name veth1 netns", str(self._holders[1].pid))
            for host in (0, 1):
                self._call(host, f"address add 10.77.0.{host + 1}/24 dev veth{host}")
                for device in ("lo", f"veth{host}"):
                    self._call(host, f"link set {device} up")
        except (subprocess.CalledProcessError, RuntimeError) as error:
            self.__exit__()
            reason = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"this machine allows no network namespaces ({reason.strip()}): no two hosts to be had")
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def cut(self) -> None:
        """No packet passes any more; no connection is told."""
        self._call(1, "link set veth1 down")

    def mend(self) -> None:
        self._call(1, "link set veth1 up")

    def start(self, host: int, log: Path, *arguments: str, restarts: int = 0) -> subprocess.Popen:
        """scripts/train_node.sh with one rank on this host; what it says goes to the end of `log`."""
        own = {"NODES": "2", "NODE_RANK": str(host), "FIRST_HOST": FIRST, "RANKS": "1", "PYTHON": sys.executable}
        own |= {"MAX_RESTARTS": str(restarts), "LOCAL_ADDR": f"10.77.0.{host + 1}", "GLOO_SOCKET_IFNAME": f"veth{host}"}
        own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*self._on[host], "bash", "scripts/train_node.sh", *arguments]
        with log.open("a") as file:
            return subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=file, stderr=file)

    def _hold(self, command: list[str]) -> int:
        """The id of a process that keeps a namespace alive."""
        words = [*command, "sh", "-c", "echo here; exec sleep infinity"]
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._holders.append(holder)
        if holder.stdout.readline() != "here\n":
            raise RuntimeError(holder.stderr.read())
        return holder.pid

    def _call(self, host: int, words: str, *more: str) -> None:
        command = [*self._on[host], "ip", *words.split(), *more]
        subprocess.run(command, check=True, capture_output=True, text=True)
