"""Episode processes: start, timeouts, retry, fair slots.

One zygote per environment imports its library once and forks the episode processes (`fork_server.py`) in milliseconds.
Failures here are infrastructure failures, never the policy's: each is an `EpisodeError`.
"""

import asyncio
import collections
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

import msgspec
from absl import logging

from actor.environments import fork_server_client, protocol, wire
from actor.environments.fork_server_client import ForkServerClient
from actor.environments.protocol import EpisodeError
from bridge import processes
from bridge.rollout_types import MAX_ABS_REWARD
from configs import custom_functions
from configs.sections.actor import EnvironmentsConfig


class FairSemaphore:
    """Counting semaphore with a guaranteed minimum per environment; waiters are served in FIFO order.

    With n environments each is guaranteed 1/(2n) of the slots, at least one if there are enough. Any environment can
    take the remaining half. A single environment can take all.
    """

    def __init__(self, total: int, names: Collection[str]) -> None:
        self._total = total
        self._held = collections.Counter(dict.fromkeys(names, 0))
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def acquire(self, name: str) -> None:
        """Waits for a slot."""
        self._held.setdefault(name, 0)
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((name, place))
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._waiting.remove((name, place))
            else:  # the slot was granted at the same moment
                self.release(name)
            raise

    def release(self, name: str) -> None:
        """Frees a slot."""
        self._held[name] -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        for name, place in list(self._waiting):
            if self._has_room(name) and not place.cancelled():
                self._waiting.remove((name, place))
                self._held[name] += 1
                place.set_result(None)

    def _has_room(self, name: str) -> bool:
        num = len(self._held)
        sure = max(1, self._total // (2 * num)) if num <= self._total else 0
        kept = sum(max(0, sure - held) for other, held in self._held.items() if other != name)
        return self._total - self._held.total() > kept


CLOSE_TIMEOUT_S = 5.0
"""Time an environment may take to close after its episode, in seconds. Only its slot waits for it."""


class EnvironmentPool:
    """Bounded pool of episode processes with a guaranteed share per environment."""

    def __init__(
        self,
        config: EnvironmentsConfig,
        *,
        own: Collection[str] = (),
        names: Collection[str] = (),
        command: Sequence[str] | None = None,
    ) -> None:
        """`own` lists the custom environments that may be imported: a ticket's name alone imports nothing.

        `names` lists the environments that share the slots, as far as they are known.
        """
        self._config, self._own, self._command = config, own, command
        self._places = FairSemaphore(config.max_processes, names)
        self._zygotes: dict[str, asyncio.Task[ForkServerClient]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.num_running = 0
        """Running processes, including those that are closing."""
        self.failures: collections.Counter[str] = collections.Counter()
        """Failures by kind: deadline, crash, exception, reply, start."""

    async def load(self, name: str) -> None:
        """Imports an environment's library in its zygote. Raises EpisodeError if the import failed."""
        await self._zygote(name)

    @contextlib.asynccontextmanager
    async def open(self, name: str) -> AsyncIterator["EpisodeProcess"]:
        """Yields a process for one episode, which is closed in the background; raises EpisodeError if none starts."""
        try:
            await self._zygote(name)  # an import may take long and holds no slot
            await self._places.acquire(name)
            try:
                process = await self._fork(name)
            except BaseException:
                self._places.release(name)
                raise
        except EpisodeError:
            self.failures["start"] += 1
            raise
        self.num_running += 1
        is_orderly = False
        try:
            yield process
            is_orderly = not process.has_failed
        finally:
            ending = asyncio.create_task(self._end(process, is_orderly=is_orderly))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stops all zygotes and thereby all episodes."""
        zygotes, self._zygotes = self._zygotes, {}
        for starting in zygotes.values():
            starting.cancel()  # no effect if it has started
            await asyncio.wait([starting])
            if _is_alive(starting):
                await starting.result().close()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _fork(self, name: str) -> "EpisodeProcess":
        zygote = await self._zygote(name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                episode = await zygote.fork(theirs)
            except BaseException:
                writer.close()
                raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return EpisodeProcess(name, zygote, episode, reader, writer, self._config, self.failures)

    async def _zygote(self, name: str) -> ForkServerClient:
        """Returns the environment's zygote, after a start or restart if none is alive."""
        if custom_functions.is_custom(name) and name not in self._own:
            raise EpisodeError(f"environment {name} is custom code that this actor must not import", is_final=True)
        starting = self._zygotes.get(name)
        if starting is not None and starting.done() and not _is_alive(starting):
            logging.warning("environment zygote exited, restarting name=%s", name)
            starting = None
        if starting is None:
            max_memory_bytes = int(self._config.max_memory_gib * 2**30)
            command = self._command or fork_server_client.command(
                self._config.python if protocol.may_need_own_interpreter(name) else ""
            )
            start = ForkServerClient.start(name, max_memory_bytes=max_memory_bytes, command=command)
            starting = self._zygotes[name] = asyncio.create_task(start)
        # Shielded: cancelling one waiter must not cancel the start for the others.
        return await asyncio.shield(starting)

    async def _end(self, process: "EpisodeProcess", *, is_orderly: bool) -> None:
        try:
            await process.end(is_orderly=is_orderly)
        finally:
            self.num_running -= 1
            self._places.release(process.name)


class EpisodeProcess:
    """Process of one episode; it handles one request at a time."""

    def __init__(
        self,
        name: str,
        zygote: ForkServerClient,
        episode: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        config: EnvironmentsConfig,
        failures: collections.Counter[str],
    ) -> None:
        self.name, self._zygote, self._episode = name, zygote, episode
        self._reader, self._writer, self._config, self._failures = reader, writer, config, failures
        self.has_failed = False

    async def reset(self, row: Mapping[str, Any]) -> wire.Observed:
        """Starts the episode; raises EpisodeError if the environment failed or timed out, or the row is not JSON."""
        try:
            text = json.dumps(dict(row))
        except (TypeError, ValueError, RecursionError) as e:
            raise self._failed(
                "start", f"the row cannot be serialized as JSON: {type(e).__name__}: {e}", is_final=True
            ) from e
        return await self._ask(wire.Reset(row=text), self._config.call_timeout_s)

    async def step(self, action: str, *, plays_itself: bool = False) -> wire.Observed:
        """Sends an action (the token endpoint's address if the environment plays itself); raises as `reset`."""
        config = self._config
        timeout_s = config.episode_timeout_s if plays_itself else config.call_timeout_s
        return await self._ask(wire.Act(action=action), timeout_s)

    async def end(self, *, is_orderly: bool) -> None:
        """Waits until the process has exited: closed within CLOSE_TIMEOUT_S, or killed."""
        ended = asyncio.ensure_future(self._zygote.ended(self._episode))
        try:
            if is_orderly:
                self._writer.write(wire.frame(wire.Close()))
                await asyncio.wait([ended], timeout=CLOSE_TIMEOUT_S)
            if not ended.done():
                with contextlib.suppress(EpisodeError):  # a dead zygote's children are dead
                    await self._zygote.kill(self._episode)
            await ended
        finally:
            self._writer.close()

    async def _ask(self, question: wire.Question, timeout_s: float) -> wire.Observed:
        self.has_failed = True  # until the answer arrives; also if this call is cancelled
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(wire.frame(question))
                await self._writer.drain()
                length = wire.frame_length(await self._reader.readexactly(processes.HEAD_BYTES))
                answer = msgspec.msgpack.decode(await self._reader.readexactly(length), type=wire.Answer)
        except TimeoutError as e:
            what = type(question).__name__.lower()
            raise self._failed("deadline", f"no answer to {what} after {timeout_s} s") from e
        except (asyncio.IncompleteReadError, OSError) as e:
            raise self._failed("crash", f"process crashed: {type(e).__name__}: {e}") from e
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as e:
            raise self._failed("reply", f"invalid reply: {type(e).__name__}: {e}") from e
        if isinstance(answer, wire.Failed):
            raise self._failed("exception", answer.error)
        if not abs(answer.reward) <= MAX_ABS_REWARD:  # also rejects NaN
            raise self._failed(
                "reply", f"reward: expected at most {MAX_ABS_REWARD:g} in absolute value, got {answer.reward}"
            )
        self.has_failed = False
        return answer

    def _failed(self, kind: str, what: str, *, is_final: bool = False) -> EpisodeError:
        self._failures[kind] += 1
        return EpisodeError(f"environment {self.name}: {what}", is_final=is_final)


def _is_alive(starting: "asyncio.Task[ForkServerClient]") -> bool:
    return not starting.cancelled() and starting.exception() is None and starting.result().is_alive


def check_environments(names: Collection[str], config: EnvironmentsConfig) -> None:
    """Imports environments at startup, each in a process like those that play it; raises ValueError if one fails."""
    if not names:
        return

    async def load() -> None:
        pool = EnvironmentPool(config, own=tuple(filter(custom_functions.is_custom, names)))
        try:
            for name in names:
                await pool.load(name)
        finally:
            await pool.close()

    try:
        asyncio.run(load())
    except EpisodeError as e:
        raise ValueError(str(e)) from e
