"""A process that has an environment's library imported and forks one child an episode: `python -m ... NAME FD BYTES`.

It stays single-threaded, so that its forks are sound, and it alone ends its children: only a parent that hasn't reaped
a process knows that its pid is still that process's. Messages: `wire.py`, as packets on the socket of number FD. It
ends when that is closed, or with the actor, and its children end with it.
"""

import array
import contextlib
import ctypes
import gc
import os
import pathlib
import select
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from actor.environments import child, registry, wire
from actor.environments.protocol import Environment
from bridge.processes import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_FD_BYTES = array.array("i").itemsize


class _Zygote:
    """The children, by their episodes."""

    def __init__(self, control: socket.socket, make: Callable[[], Environment], *, max_memory_bytes: int) -> None:
        self._control, self._make, self._max_memory_bytes = control, make, max_memory_bytes
        self._pids: dict[int, int] = {}
        self._pid = os.getpid()
        self._children = pathlib.Path(f"/proc/self/task/{self._pid}/children")

    def serve(self, woken: int) -> None:
        """Until the actor closes its end; `woken` is readable when a child may have ended."""
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
        for episode in list(self._pids):
            self._kill(episode)

    def _take(self) -> bool:
        """One packet; False at the end."""
        try:
            packet, ancillary, _, _ = self._control.recvmsg(wire.MAX_PACKET_BYTES, socket.CMSG_LEN(_FD_BYTES))
        except ConnectionError:  # closed with something unread in it
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
            self._say(wire.Ended(id=episode, how=f"was not forked: {e}"))
            return
        if pid == 0:
            self._control.close()
            child.run(self._make, link, parent=self._pid, max_memory_bytes=self._max_memory_bytes)
        link.close()
        self._pids[episode] = pid

    def _kill(self, episode: int) -> None:
        if (pid := self._pids.get(episode)) is None:
            return  # reaped: its pid may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own before its first lines ran
            os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Buries all children that ended, and ends what they left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)  # while the number is its own; also where orphans aren't listed
            os.waitpid(ended.si_pid, 0)
            episode = next((e for e, pid in self._pids.items() if pid == ended.si_pid), None)
            if episode is not None:  # else an orphan
                del self._pids[episode]
                self._say(wire.Ended(id=episode, how=_how(ended)))
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Ends what a child started in a session of its own: it became ours when that child ended."""
        known = set(self._pids.values())
        with contextlib.suppress(FileNotFoundError):  # a kernel without this list
            for pid in map(int, self._children.read_text().split()):
                if pid not in known:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _say(self, message: wire.FromZygote) -> None:
        with contextlib.suppress(ConnectionError):  # closed: what is read next says so
            self._control.send(wire.encode(message))


def main(name: str, control_fd: int, max_memory_bytes: int) -> None:
    """Imports the environment, says so, and forks until its control socket ends."""
    die_with_parent(os.getppid())
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's to handle
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    try:
        make = registry.load(name)
    except ValueError as e:
        control.send(wire.encode(wire.Ready(error=str(e)[:10_000])))
        return
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.disable()
    gc.freeze()  # or each child's first collection would copy what they share
    control.send(wire.encode(wire.Ready(num_threads=len(os.listdir("/proc/self/task")))))
    _Zygote(control, make, max_memory_bytes=max_memory_bytes).serve(woken)


def _how(ended: os.waitid_result) -> str:
    is_exit = ended.si_code == os.CLD_EXITED
    return f"exit {ended.si_status}" if is_exit else f"signal {ended.si_status}"


if __name__ == "__main__":
    os.dup2(2, 1)  # what environments print is no answer of anybody's
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
