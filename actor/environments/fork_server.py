"""Zygote process: imports the environment and forks one child per episode.

It stays single-threaded so that forks are safe. It alone kills its children: only a parent that has not reaped a
process knows that the pid is still valid. Messages (`wire.py`) arrive as packets on socket FD. The zygote exits when
that socket closes or the actor exits, and its children exit with it.
"""

import array
import asyncio
import contextlib
import ctypes
import gc
import inspect
import json
import os
import pathlib
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from actor.environments import protocol, wire
from actor.environments.protocol import Environment, Step
from bridge import processes


def run(make: Callable[[], Environment], link: socket.socket, *, parent: int, max_memory_bytes: int) -> None:
    """Runs a forked episode process; never returns."""
    status = 1
    try:
        processes.die_with_parent(parent)
        os.setsid()  # a kill of the process group reaches its children
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
        gc.enable()
        # Python reseeds its random state after a fork. A reproducible episode is seeded from its row.
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        _serve(make, link)
        status = 0
    finally:
        os._exit(status)  # skip the zygote's clean-up handlers


def _serve(make: Callable[[], Environment], link: socket.socket) -> None:
    environment: Environment | None = None
    with link.makefile("rb") as source, asyncio.Runner() as runner:
        while head := source.read(processes.HEAD_BYTES):
            question = msgspec.msgpack.decode(source.read(wire.frame_length(head)), type=wire.Question)
            if isinstance(question, wire.Close):
                break
            try:
                if environment is None:
                    environment = make()
                answer = _answer(environment, question, runner)
                framed = wire.frame(answer)
            except BaseException as e:  # an environment may raise anything, including SystemExit
                framed = wire.frame(wire.Failed(error=f"{type(e).__name__}: {e}"[:10_000]))
            link.sendall(framed)
        if environment is not None:
            with contextlib.suppress(Exception):  # the episode is over, so errors no longer matter
                _settle(environment.close(), runner)


def _answer(environment: Environment, question: wire.Reset | wire.Act, runner: asyncio.Runner) -> wire.Observed:
    if isinstance(question, wire.Reset):
        messages = _settle(environment.reset(json.loads(question.row)), runner)
        roles: list[str] = [*getattr(environment, "observation_roles", ("user",))]
        plays_itself = bool(getattr(environment, "plays_itself", False))
        sees_thinking = bool(getattr(environment, "sees_thinking", False))
        return wire.Observed(
            messages=_checked(messages), roles=roles, plays_itself=plays_itself, sees_thinking=sees_thinking
        )
    step = _settle(environment.step(question.action), runner)
    if not isinstance(step, Step):
        raise TypeError(f"step must return a Step (actor/environments/protocol.py), got {type(step).__name__}")
    info = {str(name): _for_people(value) for name, value in step.info.items()}
    return wire.Observed(messages=_checked(step.messages), reward=float(step.reward), done=bool(step.done), info=info)


def _settle(returned: Any, runner: asyncio.Runner) -> Any:
    """Returns the result of a plain or asynchronous method."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return runner.run(wait())


def _for_people(value: Any) -> Any:
    """Returns an `info` value, or its text if msgpack cannot hold it (large integers, lone surrogates, odd keys)."""
    try:
        return msgspec.msgpack.decode(wire.encode(value))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return ascii(value)


def _checked(messages: Any) -> list[dict[str, str]]:
    for message in messages:
        if not (isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise TypeError(f"message: expected {{'role': text, 'content': text}}, got {message!r}")
    return list(messages)


_PR_SET_CHILD_SUBREAPER = 36
_FD_BYTES = array.array("i").itemsize


class _ForkServer:
    """Zygote that tracks its children by episode."""

    def __init__(self, control: socket.socket, make: Callable[[], Environment], *, max_memory_bytes: int) -> None:
        self._control, self._make, self._max_memory_bytes = control, make, max_memory_bytes
        self._pids: dict[int, int] = {}
        self._pid = os.getpid()
        self._children = pathlib.Path(f"/proc/self/task/{self._pid}/children")
        self._helpers = self._list_children()
        """Processes that the environment's module started, which serve all episodes."""

    def serve(self, woken: int) -> None:
        """Handles messages until the actor closes its end; `woken` is readable after SIGCHLD."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._take():
                break
        for episode, pid in list(self._pids.items()):
            self._kill(episode)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # then its orphans are children of this process
        self._pids, self._helpers = {}, set()
        self._kill_orphans()

    def _take(self) -> bool:
        """Handles one packet; returns False at the end of the stream."""
        try:
            packet, ancillary, _, _ = self._control.recvmsg(wire.MAX_PACKET_BYTES, socket.CMSG_LEN(_FD_BYTES))
        except ConnectionError:  # closed with unread data
            return False
        if not packet:
            return False
        message = msgspec.msgpack.decode(packet, type=wire.ToZygote)
        if isinstance(message, wire.Kill):
            self._kill(message.id)
            return True
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data)
        self._start(message.id, socket.socket(fileno=fds[0]))
        return True

    def _start(self, episode: int, link: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as e:  # no process or no memory is left
            link.close()
            self._say(wire.Ended(id=episode, how=f"fork failed: {e}"))
            return
        if pid == 0:
            self._control.close()
            run(self._make, link, parent=self._pid, max_memory_bytes=self._max_memory_bytes)
        link.close()
        self._pids[episode] = pid

    def _kill(self, episode: int) -> None:
        if (pid := self._pids.get(episode)) is None:
            return  # reaped, so another process may have its pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # no own process group before its first lines ran
            os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Reaps all exited children and kills their remaining processes."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # while the pid is still reserved; works also without the children list
                os.killpg(ended.si_pid, signal.SIGKILL)
            os.waitpid(ended.si_pid, 0)
            episode = next((e for e, pid in self._pids.items() if pid == ended.si_pid), None)
            if episode is not None:  # otherwise an orphan
                del self._pids[episode]
                kind = "exit" if ended.si_code == os.CLD_EXITED else "signal"
                self._say(wire.Ended(id=episode, how=f"{kind} {ended.si_status}"))
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kills processes that a child started in another session; they are reparented here when the child exits."""
        for pid in self._list_children() - self._helpers - set(self._pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _list_children(self) -> set[int]:
        with contextlib.suppress(FileNotFoundError):  # a kernel without this list
            return {int(pid) for pid in self._children.read_text().split()}
        return set()

    def _say(self, message: wire.FromZygote) -> None:
        with contextlib.suppress(ConnectionError):  # closed: the next read reports it
            self._control.send(wire.encode(message))


def main(name: str, control_fd: int, max_memory_bytes: int) -> None:
    """Imports the environment, reports readiness, and forks until the control socket closes."""
    processes.die_with_parent(os.getppid())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the actor handles Ctrl-C
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    try:
        make = protocol.load(name)
    except ValueError as e:
        control.send(wire.encode(wire.Ready(error=str(e)[:10_000])))
        return
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.disable()
    gc.freeze()  # otherwise each child's first collection would copy shared pages
    control.send(wire.encode(wire.Ready(num_threads=len(os.listdir("/proc/self/task")))))
    _ForkServer(control, make, max_memory_bytes=max_memory_bytes).serve(woken)


if __name__ == "__main__":
    os.dup2(2, 1)  # keep prints of environments out of the actor's stdout
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
