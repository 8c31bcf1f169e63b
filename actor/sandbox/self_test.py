"""Isolation self-test: runs probes in a sandbox on this machine."""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import socket
import tempfile
from collections.abc import Callable
from typing import Any

from actor.sandbox import bwrap, languages, packages
from actor.sandbox.bwrap import HostView
from actor.sandbox.pool import Sandbox
from actor.sandbox.program import MIB, Case, Outcome, SandboxError, SandboxLimits, SandboxUnavailableError

TIMEOUT_S = 20.0
INSTALL = "apt-get install bubblewrap"
OLDEST = "0.8"
_PROBE = pathlib.Path(__file__).parent / "probe.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Isolation:
    """Properties of a successful self-test."""

    is_root: bool
    python_version: str
    tools: frozenset[str]


def check_isolation(limits: SandboxLimits | None = None, *, view: HostView | None = None) -> Isolation:
    """Runs programs that try to escape or to leave something behind.

    Raises SandboxUnavailableError if one does, or if sandboxes cannot run here; one line names the cause and the fix.
    """
    limits, view = limits or SandboxLimits(), view or HostView()
    try:
        packages.files_of(view.packages)
        with Sandbox(limits, num_warm=1, view=view) as sandbox:
            process = sandbox._take()
            found = Isolation(is_root=bwrap.mode().is_root, python_version=process.python_version, tools=process.tools)
            sandbox._give_back(process)
            problems = _way_out(sandbox) + _left_behind(sandbox)
            _check_packages(sandbox, view)
        with Sandbox(dataclasses.replace(limits, memory_bytes=128 * MIB), num_warm=1, view=view) as sandbox:
            (outcome,) = _probe(sandbox, "memory", memory_bytes=sandbox.limits.memory_bytes)
            if outcome.ended != "memory":
                problems.append(f"processes received more memory in total than the limit ({outcome.ended})")
    except ValueError as e:
        raise SandboxUnavailableError(str(e)) from e
    except SandboxError as e:
        raise SandboxUnavailableError(f"programs cannot be isolated on this machine: {missing(str(e))}") from e
    if problems:
        raise SandboxUnavailableError(
            f"programs are not isolated on this machine: {'; '.join(problems)} (actor/sandbox/self_test.py)"
        )
    return found


def missing(problem: str, *, read: Callable[[str], str] | None = None) -> str:
    """Returns the fix for a failed sandbox start; `read` returns a /proc/sys file's content, "" if missing."""
    said = " ".join(problem.split())
    if "not installed" in said:
        return f"bubblewrap is not installed: {INSTALL} (as root, or `bash launch/setup.sh` as root)"
    if "nknown option" in said:
        return f"bubblewrap is older than {OLDEST}: {INSTALL} of a newer release ({said})"
    if not any(sign in said for sign in ("namespace", "uid map", "not permitted", "ermission", "Can't mount proc")):
        return said
    read = read or _read
    for name, forbidding, command_ in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile of bwrap that has userns",
        ),
    ):
        if read(name).strip() == forbidding:
            return f"this kernel does not allow user namespaces: {command_} (as root; {said})"
    return (
        "namespaces are forbidden, as in most containers: run it with CAP_SYS_ADMIN as root, or as any user with "
        "seccomp and AppArmor unconfined and /proc unmasked (docker run --security-opt seccomp=unconfined "
        f"--security-opt apparmor=unconfined --security-opt systempaths=unconfined) ({said})"
    )


def _read(name: str) -> str:
    try:
        return pathlib.Path("/proc/sys", name).read_text()
    except OSError:
        return ""


def _way_out(sandbox: Sandbox) -> list[str]:
    mark = secrets.token_hex(16)
    with contextlib.ExitStack() as held:
        file = held.enter_context(tempfile.NamedTemporaryFile("w", prefix="sluice-isolation-"))
        file.write(mark)
        file.flush()
        os.chmod(file.name, 0o644)
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = held.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(f"\0sluice-{mark}")
        unix.listen()
        wanted = {
            "file": file.name,
            "port": listener.getsockname()[1],
            "unix": mark,
            "num_processes": sandbox.limits.num_processes,
            "address_space_bytes": sandbox.limits.address_space_bytes,
        }
        (outcome,) = _probe(sandbox, "way_out", **wanted)
    if not outcome.succeeded:
        return [f"the probe exited by {outcome.ended} {outcome.code}: {_last_line(outcome)}"]
    try:
        return [str(problem) for problem in json.loads(outcome.stdout)]
    except ValueError:
        return ["the output of the probe is unreadable"]


def _check_packages(sandbox: Sandbox, view: HostView) -> None:
    modules = packages.modules_of(view.packages)
    if not modules:
        return
    source = "\n".join(f"import {module}" for module in modules)
    (outcome,) = sandbox.run(languages.program("python", source), [Case(timeout_s=TIMEOUT_S)])
    if not outcome.succeeded:
        raise SandboxUnavailableError(
            f"rewards.packages={','.join(view.packages)}: `import {', '.join(modules)}` fails in the sandbox "
            f"({outcome.ended} {outcome.code}: {_last_line(outcome)}); remove the failing packages from the field"
        )


def _left_behind(sandbox: Sandbox) -> list[str]:
    first, second = _probe(sandbox, "left_behind", times=2)
    if not first.succeeded or not second.succeeded:
        return [f"a case exited by {first.ended} {first.code}, the next by {second.ended}: {_last_line(second)}"]
    return [] if first.stdout == second.stdout else [f"a case found files of another case: {second.stdout[:200]!r}"]


def _probe(sandbox: Sandbox, name: str, *, times: int = 1, **given: Any) -> list[Outcome]:
    case = Case(timeout_s=TIMEOUT_S, stdin=json.dumps({"probe": name, **given}).encode())
    return list(sandbox.run(languages.program("python", _PROBE.read_text()), [case] * times))


def _last_line(outcome: Outcome) -> str:
    return (outcome.stderr.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
