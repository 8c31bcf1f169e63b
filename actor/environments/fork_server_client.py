"""Actor-side client of one zygote: starts it, passes it sockets, receives the exits of its children."""

import array
import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Sequence

import msgspec
from absl import logging

from actor.environments import fork_server, wire
from actor.environments.protocol import EpisodeError
from bridge.credentials import without_secrets
from configs import custom_functions

LOAD_TIMEOUT_S = 120.0
"""Timeout for starting Python and importing an environment's library, in seconds. Episode timeouts start afterwards."""

_CLOSE_S = 5.0
"""Seconds in which a zygote must end its children and itself before it is killed."""


def command(python: str = "") -> tuple[str, ...]:
    """Returns the command of a zygote; `python` is its interpreter, empty for the actor's."""
    return (os.path.expanduser(python) or sys.executable, "-P", "-m", fork_server.__name__)


class ForkServerClient:
    """Connection to one zygote for its lifetime; a dead zygote is replaced, not restarted."""

    def __init__(self, name: str, control: socket.socket, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._control, self._process = control, process
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._ready: asyncio.Future[wire.Ready] = self._loop.create_future()
        self._ends: dict[int, asyncio.Future[str]] = {}
        """Exit description of each child, set when it has exited."""
        self._sending = asyncio.Lock()
        self._has_room = asyncio.Event()
        self.is_alive = True
        self._loop.add_reader(control, self._hear)

    @classmethod
    async def start(cls, name: str, *, max_memory_bytes: int, command: Sequence[str]) -> "ForkServerClient":
        """Starts a zygote that imports the environment `name`; raises EpisodeError if this failed or timed out."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                name,
                str(theirs.fileno()),
                str(max_memory_bytes),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={
                    **without_secrets(os.environ),  # an environment may be third-party code
                    "PYTHONPATH": custom_functions.python_path(),
                    # One thread each: the cores belong to the engine, and a fork must find no other thread.
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONHASHSEED": "0",  # the same row gives the same episode on every actor
                },
            )
        except OSError as e:
            ours.close()
            raise EpisodeError(
                f"environment {name}: {command[0]} cannot be started ({e.strerror}); it is set by environments.python "
                "(default: the actor's Python)",
                is_final=True,
            ) from e
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = cls(name, ours, process)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                ready = await link._ready
        except BaseException as e:
            await link.close()
            if isinstance(e, TimeoutError):
                raise EpisodeError(f"environment {name} import timed out after {LOAD_TIMEOUT_S} s") from e
            raise
        if ready.error:
            await link.close()
            raise EpisodeError(ready.error, is_final=True)
        if ready.num_threads > 1:
            logging.warning("environment zygote has several threads name=%s threads=%d", name, ready.num_threads)
        return link

    async def fork(self, theirs: socket.socket) -> int:
        """Starts an episode's process with its socket; returns its id. Raises EpisodeError if the zygote is dead."""
        episode = next(self._ids)
        self._ends[episode] = self._loop.create_future()
        try:
            await self._send(wire.Start(id=episode), theirs)
        except BaseException:
            self.forget(episode)
            raise
        return episode

    def forget(self, episode: int) -> None:
        """Drops an episode's exit future."""
        self._ends.pop(episode, None)

    async def kill(self, episode: int) -> None:
        """Kills an episode's process, if it runs; raises EpisodeError if the zygote, and so its children, are dead."""
        await self._send(wire.Kill(id=episode))

    async def ended(self, episode: int) -> str:
        """Waits until an episode's process has exited; returns the exit description. Call once per episode."""
        try:
            return await asyncio.shield(self._ends[episode])
        finally:
            self.forget(episode)

    async def close(self) -> None:
        """Stops the zygote, which kills its children and what they started."""
        self._end("was closed")
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _send(self, message: wire.ToZygote, passed: socket.socket | None = None) -> None:
        fds = array.array("i", [] if passed is None else [passed.fileno()])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if passed is not None else []
        async with self._sending:
            while True:
                if not self.is_alive:
                    raise EpisodeError(f"the zygote of environment {self.name} is dead")
                try:
                    self._control.sendmsg([wire.encode(message)], ancillary)
                    return
                except BlockingIOError:
                    await self._wait_for_room()
                except OSError as e:
                    self._end(f"accepts no messages: {e}")

    async def _wait_for_room(self) -> None:
        """Waits until the socket accepts data again, or the zygote has exited."""
        self._has_room.clear()
        self._loop.add_writer(self._control, self._has_room.set)
        try:
            await self._has_room.wait()
        finally:
            if self.is_alive:
                self._loop.remove_writer(self._control)

    def _hear(self) -> None:
        while True:
            try:
                packet = self._control.recv(wire.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as e:
                self._end(f"lost the connection: {e}")
                return
            if not packet:
                self._end("has exited")
                return
            message = msgspec.msgpack.decode(packet, type=wire.FromZygote)
            if isinstance(message, wire.Ready):
                self._ready.set_result(message)
            elif (end := self._ends.get(message.id)) is not None and not end.done():
                end.set_result(message.how)

    def _end(self, how: str) -> None:
        """Records the zygote's exit; the kernel kills its children with it."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        self._has_room.set()  # wakes the waiting sender, which then sees is_alive
        if not self._ready.done():
            self._ready.set_result(wire.Ready(error=f"the zygote of environment {self.name} {how} during startup"))
        for end in self._ends.values():
            if not end.done():
                end.set_result(f"its zygote {how}")
