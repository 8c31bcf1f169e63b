"""Host-side handle of one sandbox: start, program, cases, kill."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from actor.sandbox import bwrap
from actor.sandbox.bwrap import HostView
from actor.sandbox.inside import frames
from actor.sandbox.languages import TOOLS
from actor.sandbox.program import Case, Outcome, Program, SandboxLimits

START_TIMEOUT_S = 20.0
HAND_OVER_TIMEOUT_S = 20.0
WALL_FACTOR, GRACE_S = 50, 30.0
"""Wall-clock limit of a case that the sandbox's clock did not end: WALL_FACTOR timeouts plus GRACE_S seconds. Only a
sandbox starved of CPU reaches it, and then counts as broken."""
FOLLOW_S = 0.2
"""Interval at which a running case's timeout is re-read, in seconds."""
PREPARE_S = 5.0
"""Timeout for removing the previous case's files, in seconds; `inside/case.py` uses a shorter one."""
_FIRST_UID, _UIDS_A_HOST, _HOSTS = 2**30, 2**22, 128
_VMSTAT = pathlib.Path("/proc/vmstat")
_SOCKET_BUFFER = pathlib.Path("/proc/sys/net/core/wmem_default")
_SOURCES = pathlib.Path(__file__).parent / "inside"


class SandboxCrashError(RuntimeError):
    """A sandbox gave an invalid answer or none."""


class SandboxExhaustedError(RuntimeError):
    """A sandbox that cannot begin another case."""


def uid_of(pid: int) -> int:
    """Returns the uid of a root-started sandbox's programs, unique on this machine while the process lives.

    Containers may share uids but not pids, so the host name is part of it.
    """
    host = zlib.crc32(socket.gethostname().encode()) % _HOSTS
    return _FIRST_UID + host * _UIDS_A_HOST + pid % _UIDS_A_HOST


class SandboxProcess:
    """Sandbox that waits for a program. It dies with the thread that starts it."""

    def __init__(self, limits: SandboxLimits, view: HostView) -> None:
        """Starts bubblewrap; `wait_ready` checks the result. Raises OSError or ValueError if it cannot be started."""
        self._limits, self._view = limits, view
        self._mode = bwrap.mode()
        self._channel, theirs = socket.socketpair()
        self._said = os.memfd_create("bwrap-stderr")
        self._info, info = os.pipe()
        fds = {name: _memory_file((_SOURCES / f"{name}.py").read_bytes()) for name in bwrap.MODULES}
        filter_fd = _memory_file(bwrap.program())
        self._inner = -1
        try:
            argv = bwrap.command_line(
                view=view,
                mode=self._mode,
                limits=limits,
                tools=sorted(TOOLS),
                code_fds=fds,
                seccomp_fd=filter_fd,
                info_fd=info,
            )
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
                pass_fds=(*fds.values(), filter_fd, info),
                env={},
                cwd="/",
            )
        except BaseException:
            for fd in (self._said, self._info):
                os.close(fd)
            self._channel.close()
            raise
        finally:
            theirs.close()
            for fd in (*fds.values(), filter_fd, info):
                os.close(fd)
        self.tools: frozenset[str] = frozenset()
        self.python_version = ""

    def wait_ready(self) -> None:
        """Waits until the sandbox is ready; raises SandboxCrashError with bubblewrap's output if it did not start."""
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            info = self._read_info(deadline)
            self._inner_pid = info["child-pid"]
            self._inner = os.pidfd_open(self._inner_pid)
            hello, _ = self._receive(deadline, max_body_bytes=0)
            self.tools = frozenset(hello["tools"])
            self.python_version = hello["version"]
        except (OSError, ValueError, KeyError, TypeError, SandboxCrashError) as e:
            self.kill()
            said = os.pread(self._said, 4096, 0).decode("utf-8", "replace").strip()
            raise SandboxCrashError(said or f"no sandbox: {type(e).__name__}: {e}") from e

    @property
    def is_alive(self) -> bool:
        """True if the sandbox runs and has sent nothing unrequested."""
        return self._process.poll() is None and not _is_readable(self._channel.fileno(), 0)

    def hand_over(self, program: Program) -> None:
        """Sends the program to the sandbox. Raises SandboxCrashError if the sandbox did not accept it."""
        head = {
            "names": list(program.files),
            "limits": {**dataclasses.asdict(self._limits), "socket_bytes": _socket_bytes()},
            "uid": uid_of(self._inner_pid) if self._mode.is_root else None,
        }
        deadline = time.monotonic() + HAND_OVER_TIMEOUT_S
        try:
            self._send(deadline, head, list(program.files.values()))
            answer, _ = self._receive(deadline, max_body_bytes=0)
        except (OSError, ValueError) as e:
            raise SandboxCrashError(f"sending the program failed: {e}") from e
        if answer != {"took": len(program.files)}:
            raise SandboxCrashError("the sandbox rejected the program")

    def run(
        self,
        program: Program,
        argv: Sequence[str],
        case: Case,
        *,
        keeps: bool = False,
        timeout_s: Callable[[], float] | None = None,
    ) -> Outcome:
        """Runs one case; with `keeps`, files that it leaves become part of the program.

        `timeout_s` returns the case's current timeout while it runs. Raises SandboxExhaustedError if the case did not
        run, and SandboxCrashError if the sandbox died or did not begin it in time, or the machine ran out of memory. No
        program within its limits can cause this.
        """
        order = {
            "argv": list(argv),
            "environment": {**bwrap.environment(self._view), **program.environment},
            "timeout_s": case.timeout_s,
            "calls": case.call is not None,
            "reserves": program.reserves_memory,
            "keeps": keeps,
        }
        call = case.call.to_json() if case.call else b""
        began = time.monotonic()
        try:
            self._send(began + PREPARE_S, order, [case.stdin, call])
            head, _ = self._receive(began + PREPARE_S, max_body_bytes=0)
            if head.get("ended") == "used up":
                raise SandboxExhaustedError(str(head.get("problem")))
            killed_before = _num_killed_for_memory()
            outcome = self._outcome(case.timeout_s, timeout_s or (lambda: case.timeout_s))
            is_killed = (outcome.ended, outcome.code) == ("signal", signal.SIGKILL)
            if is_killed and _num_killed_for_memory() != killed_before:
                raise SandboxCrashError(
                    "the machine ran out of memory and the kernel killed a program, possibly this one"
                )
            return outcome
        except (OSError, ValueError, KeyError, TypeError, SandboxCrashError) as e:
            self.kill()
            raise SandboxCrashError(f"the sandbox exited during a case: {type(e).__name__}: {e}") from e

    def _outcome(self, sent_s: float, timeout_s: Callable[[], float]) -> Outcome:
        limits, runs_since = self._limits, time.monotonic()
        while not _is_readable(self._channel.fileno(), FOLLOW_S):
            deadline = runs_since + WALL_FACTOR * sent_s + GRACE_S
            if time.monotonic() > deadline:
                raise SandboxCrashError(
                    f"a case did not finish within its timeout of {sent_s:.1f} s; the machine is overloaded"
                )
            if (now_s := timeout_s()) != sent_s:
                sent_s = now_s
                self._send(deadline, {"timeout_s": now_s}, [])
        deadline = time.monotonic() + HAND_OVER_TIMEOUT_S
        head, blobs = self._receive(deadline, max_body_bytes=2 * limits.output_bytes + limits.stderr_bytes + 2**20)
        if head.get("ended") == "used up":  # the case ran, but its files cannot be kept
            return Outcome(ended="files", code=0, seconds=0.0, stderr=str(head.get("problem")).encode())
        stdout, stderr, returned = blobs
        return Outcome(
            ended=head["ended"], code=int(head["code"]), seconds=float(head["seconds"]),
            stdout=stdout[: limits.output_bytes], stderr=stderr, returned=returned,
        )  # fmt: skip

    def kill(self) -> None:
        """Kills all processes of the sandbox and waits until they are gone."""
        if self._inner >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
            # PID 1 exits only after all others of its namespace.
            _is_readable(self._inner, START_TIMEOUT_S)
            # bubblewrap's own process reaps it and exits; killed earlier, it would leave that to the machine's init.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._channel.close()

    def close(self) -> None:
        """Kills the sandbox and closes its descriptors."""
        self.kill()
        for fd in (self._said, self._info, self._inner):
            if fd >= 0:
                os.close(fd)
        self._said = self._info = self._inner = -1

    def _read_info(self, deadline: float) -> dict[str, Any]:
        text = b""
        while b"}" not in text:
            chunk = os.read(self._info, 4096) if _is_readable(self._info, deadline - time.monotonic()) else b""
            if not chunk:
                raise SandboxCrashError("bubblewrap exited during startup")
            text += chunk
        return json.loads(text)

    def _send(self, deadline: float, head: dict[str, Any], blobs: Sequence[bytes]) -> None:
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        self._channel.sendall(frames.pack(head, blobs))

    def _receive(self, deadline: float, *, max_body_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
        head_bytes, body_bytes = frames.LENGTHS.unpack(self._read(deadline, frames.LENGTHS.size))
        if head_bytes > frames.MAX_HEAD_BYTES or body_bytes > max_body_bytes:
            raise SandboxCrashError(f"message too large: {head_bytes} + {body_bytes} bytes")
        text = self._read(deadline, head_bytes)
        return frames.unpack(text, self._read(deadline, body_bytes))

    def _read(self, deadline: float, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = self._channel.recv(min(2**20, count - len(data)))
            if not chunk:
                raise SandboxCrashError("the sandbox exited")
            data += chunk
        return bytes(data)


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Returns True if data or an end of file is readable within the timeout; for a pidfd, if its process exited."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _socket_bytes() -> int:
    """Returns an upper bound of a default UNIX socket's kernel memory, in bytes: its buffer plus one message."""
    with contextlib.suppress(OSError, ValueError):  # not visible in every network namespace
        return int(_SOCKET_BUFFER.read_text()) + 2**16
    return 212_992 + 2**16


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("sandbox")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _num_killed_for_memory() -> int:
    """Returns the machine's cumulative out-of-memory kills; 0 if the kernel does not report them."""
    with contextlib.suppress(OSError):
        for line in _VMSTAT.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
