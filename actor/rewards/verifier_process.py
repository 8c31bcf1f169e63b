"""Actor-side handle of a verifier worker: start, requests, kill with all descendants."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence

import msgspec

from actor.rewards import verifier_worker
from actor.rewards.verifier_worker import ScoreReply, ScoreRequest, Timeouts
from bridge import processes
from bridge.credentials import without_secrets
from configs import custom_functions

END_S = 1.0
"""Wait for the exit of a worker that closed its output, and for output of one that exited, in seconds."""
KILL_S = 10.0
"""Wait for a killed process, in seconds; one that still exists hangs in the kernel and is abandoned."""
FOLLOW_S = 0.2
"""Interval at which test case timeouts are re-read, in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Running:
    """Process and its channel. A socket, because a descendant that holds a pipe open would prevent its end of file."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    exited: asyncio.Future[int]
    """Exit code; set after the rest of its process group is killed."""


class WorkerProcess:
    """Worker process; started by its first request, and again after each kill."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._running: _Running | None = None
        self.loaded: set[str] = set()
        self.timeouts_s: Callable[[], tuple[float, ...]] | None = None
        """Returns the current timeouts of the test cases being scored; None if there are none."""

    async def ask(self, question: ScoreRequest) -> ScoreReply:
        """Returns the worker's reply; forwards changes of `timeouts_s` meanwhile.

        Raises OSError or asyncio.IncompleteReadError if the worker exited, and struct.error, msgspec.MsgspecError or
        ValueError if it wrote an invalid message.
        """
        if self._running is None or self._running.exited.done():
            await self.kill()
            self._running = await self._start()
        running = self._running
        sent = question.context.case_timeouts_s
        running.writer.write(verifier_worker.frame(question))
        await running.writer.drain()
        answer = asyncio.ensure_future(_read(running.reader))
        try:
            while not answer.done() and not running.exited.done():
                waits: list[asyncio.Future[object]] = [answer, running.exited]  # pyright: ignore[reportAssignmentType]
                await asyncio.wait(
                    waits, timeout=FOLLOW_S if self.timeouts_s else None, return_when=asyncio.FIRST_COMPLETED
                )
                if self.timeouts_s and not answer.done() and (now := self.timeouts_s()) != sent:
                    sent = now
                    running.writer.write(verifier_worker.frame(Timeouts(case_timeouts_s=now)))
            if not answer.done():  # output written before the exit
                await asyncio.wait([answer], timeout=END_S)
            if not answer.done():
                raise ConnectionResetError("it exited")
            return answer.result()
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger suspended the worker (Linux; False elsewhere)."""
        if self._running is None:
            return False
        try:
            stat = pathlib.Path(f"/proc/{self._running.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    async def ended(self) -> str:
        """Returns a description of the exit, if the process has exited or is about to."""
        if self._running is None:
            return ""
        await asyncio.wait([self._running.exited], timeout=END_S)
        if not self._running.exited.done():
            return ""
        code = self._running.exited.result()
        return f" by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f" with exit code {code}"

    def close_input(self) -> None:
        """Closes the worker's input, after which it exits gracefully."""
        if self._running is not None:
            self._running.writer.close()

    async def kill(self) -> None:
        """Kills the worker with its process group."""
        running, self._running = self._running, None
        self.loaded.clear()
        if running is None:
            return
        if not running.exited.done():
            _kill_group(running.process)
            await asyncio.wait([running.exited], timeout=KILL_S)
        running.writer.transport.abort()

    async def _start(self) -> _Running:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                # One thread each: the cores belong to the engine.
                env={
                    **without_secrets(os.environ),  # a verifier may be third-party code
                    "PYTHONPATH": custom_functions.python_path(),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        exited = _exit_of(process)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return _Running(process=process, reader=reader, writer=writer, exited=exited)


def _exit_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Returns a future of the exit code; its process group is killed first, before the id can be reused."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()
    end = os.pidfd_open(process.pid)

    def reap() -> None:
        loop.remove_reader(end)
        os.close(end)
        _kill_group(process)
        code = process.wait()
        if not exited.done():
            exited.set_result(code)

    loop.add_reader(end, reap)
    return exited


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


async def _read(reader: asyncio.StreamReader) -> ScoreReply:
    length = verifier_worker.frame_length(await reader.readexactly(processes.HEAD_BYTES))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=ScoreReply)
