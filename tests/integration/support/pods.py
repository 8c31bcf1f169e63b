"""A rendered pod's container as a process of this machine: its command, variables, volumes and probes.

Names that the cluster resolves are this machine's in a network and mount namespace of its own (`Cluster.namespace`), so
that nothing of what was rendered is changed but the paths of volumes, and tini, which is not here.
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from tests.integration.support.processes import REPO

_VARIABLE = re.compile(r"\$\((\w+)\)")


class Container:
    """The one container of a pod."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        volumes: Mapping[str, pathlib.Path],
        passwords: Mapping[str, str],
        fields: Mapping[str, str],
    ) -> None:
        """Not started; folders by volume, passwords by secret, and the downward API's values by path."""
        (self._container,) = spec["containers"]
        mounts = {m["mountPath"]: str(volumes[m["name"]]) for m in self._container["volumeMounts"]}
        self._mounts = dict(sorted(mounts.items(), key=lambda m: -len(m[0])))
        self.environment: dict[str, str] = {}
        for variable in self._container["env"]:
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = passwords[source["secretKeyRef"]["name"]]
            elif source:
                value = fields[source["fieldRef"]["fieldPath"]]
            else:
                value = self._inside(variable["value"])
            self.environment[variable["name"]] = value

    def command(self) -> list[str]:
        """What is started."""
        assert self._container["command"] == ["tini", "--", "python"]
        return [sys.executable, *map(self._expand, self._container["args"])]

    def probe(self, name: str) -> list[str]:
        """The command of `livenessProbe` or `readinessProbe`."""
        python, *arguments = self._container[name]["exec"]["command"]
        assert python == "python"
        return [sys.executable, *map(self._inside, arguments)]

    def _expand(self, argument: str) -> str:
        return self._inside(_VARIABLE.sub(lambda m: self.environment[m[1]], argument))

    def _inside(self, text: str) -> str:
        return re.sub(rf"(^|=)({'|'.join(self._mounts)})(?=/|$)", lambda m: m[1] + self._mounts[m[2]], text)


class Cluster:
    """A namespace in which names are this machine's, for as long as this object is open."""

    def __init__(self, root: pathlib.Path, addresses: Mapping[str, str]) -> None:
        """Makes it, with an address of this machine's for each name; OSError if this user may not."""
        hosts = root / "hosts"
        local = f"127.0.0.1 localhost\n127.0.0.1 {socket.gethostname()}\n"  # as a pod finds itself
        hosts.write_text(local + "".join(f"{address} {name}\n" for name, address in addresses.items()))
        script = f"ip link set lo up && mount --bind {hosts} /etc/hosts && echo ready && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate()
            raise OSError(f"no namespace: {said.strip()}")

    def start(
        self, command: list[str], log: pathlib.Path, environment: Mapping[str, str], *, is_clean: bool = True
    ) -> "subprocess.Popen[bytes]":
        """A process in it; with a clean environment nothing of ours is there but what is given."""
        given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)} if is_clean else os.environ
        enter = ["nsenter", f"--target={self._holder.pid}", "--mount", "--net", f"--wd={REPO}"]
        with open(log, "ab") as output:
            return subprocess.Popen(
                [*enter, *command],
                env={**given, "PYTHONPATH": str(REPO), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, command: list[str], environment: Mapping[str, str]) -> int:
        """The code of a short command in it."""
        process = self.start(command, pathlib.Path("/dev/null"), environment)
        return process.wait(60)

    def close(self) -> None:
        """What was started in it is the caller's to end."""
        self._holder.communicate(timeout=10)


def pods_of(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The pods' specs of a rendered folder, by their container's name."""
    found: dict[str, dict[str, Any]] = {}
    for file in folder.glob("*.yaml"):
        for one in yaml.safe_load_all(file.read_text()):
            spec = one.get("spec", {})
            if one["kind"] == "JobSet":
                spec = spec["replicatedJobs"][0]["template"]["spec"]
            if "template" in spec:
                pod = spec["template"]["spec"]
                found[pod["containers"][0]["name"]] = pod
    return found


def config_map(folder: pathlib.Path) -> str:
    """The rendered config."""
    for one in yaml.safe_load_all((folder / "run.yaml").read_text()):
        if one["kind"] == "ConfigMap":
            return one["data"]["config.json"]
    raise AssertionError("no ConfigMap")
