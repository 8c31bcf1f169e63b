"""How the learner's hosts save and restore one checkpoint together, and what a save fails with."""

import contextlib
import errno
import json
import pathlib
import re
from collections.abc import Callable, Generator

from blake3 import blake3

from learner.distributed.channel import Barrier, BarrierBrokenError, Processes, ProcessLostError

_OF_SYSTEM = " [os_error_code="
"""What TensorStore, by which Orbax reads and writes, says of an error of the system."""


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def system_errors(step: pathlib.Path) -> Generator[None]:
    """What Orbax's storage could not read comes as a ValueError, as if something wrong had been given.

    Raises:
      OSError: it is the system's.
    """
    try:
        yield
    except ValueError as e:
        said, is_of_system, _ = str(e).partition(_OF_SYSTEM)
        if not is_of_system:
            raise
        raise OSError(f"the checkpoint {step} can't be read: {said}") from e


def reason(error: Exception) -> str:
    """Why a save failed, in one line; Orbax's own errors tell of the files inside, and come as other errors."""
    text = str(error)
    if "No space left on device" in text or (isinstance(error, OSError) and error.errno in _FULL):
        return "its disk is full"
    return " ".join(text.split())[:300] or type(error).__name__


def cause(error: Exception) -> Exception:
    """What a host failed with, before it heard at the next meeting that it failed alone."""
    while isinstance(error, BarrierBrokenError) and isinstance(error.__context__, Exception):
        error = error.__context__
    return error


_OF_HOST = re.compile(r"ocdbt\.process_(\d+)")


PEER_TIMEOUT_S = 1800.0
"""How long one host waits for another one's part: writing, and hashing, of a checkpoint."""


class CheckpointError(ValueError):
    """No usable checkpoint where one must be."""


def barrier_fn(meeting: Barrier) -> Callable[..., None]:
    """As Orbax calls it; a bound of its own would end one host's wait alone."""

    def wait(*, key: str, timeout_ms: int) -> None:
        del timeout_ms
        meeting.wait(key)

    return wait


class HostAgreement:
    """How the hosts that save and restore together go by what each of them found."""

    def __init__(self, hosts: Processes) -> None:
        """Nothing was said yet."""
        self._hosts, self._channel = hosts, hosts.channel("checkpoints")

    def say(self, message: str | None = None) -> str:
        """The leader's message, at all of them."""
        data = None if message is None or not self._hosts.is_leader else message.encode()
        return self._channel.broadcast(data, timeout_s=PEER_TIMEOUT_S).decode()

    def own_hashes(self, folder: pathlib.Path) -> dict[str, str]:
        """Those of the folder's files that this host wrote."""
        return hash_files(folder, self._hosts.index, self._hosts.count)

    def all_hashes(self, own: dict[str, str]) -> dict[str, str]:
        """Those of all hosts at the leader; its own elsewhere."""
        if self._hosts.count == 1:
            return own
        parts = self._channel.gather(json.dumps(own).encode(), timeout_s=PEER_TIMEOUT_S)
        return {name: digest for part in parts for name, digest in json.loads(part).items()} or own

    def await_all(self) -> None:
        """Returns at the leader when all have come; elsewhere at once."""
        self._channel.gather(b"", timeout_s=PEER_TIMEOUT_S)

    def largest(self, number: int) -> int:
        """Of the hosts' numbers, at all of them."""
        parts = self._channel.gather(b"%d" % number, timeout_s=PEER_TIMEOUT_S)
        return int(self.say(str(max(map(int, parts))) if parts else None))

    @contextlib.contextmanager
    def on_success(self) -> Generator[None]:
        """Around a part that all of them do: where one fails, all do.

        Raises:
          RuntimeError: another one failed; says how.
        """
        if self._hosts.count == 1:
            yield
            return
        failure = None
        try:
            yield
        except ProcessLostError:
            raise
        except Exception as e:
            failure = cause(e)
        own = None if isinstance(failure, BarrierBrokenError) else failure
        said = "" if own is None else f"host {self._hosts.index}: {reason(own)}"
        all_said = self._channel.gather(said.encode(), timeout_s=PEER_TIMEOUT_S)
        verdict = self.say("; ".join(part.decode() for part in all_said if part))
        if own is not None:
            raise own
        if verdict or failure is not None:
            raise RuntimeError(verdict or str(failure))


def hash_files(folder: pathlib.Path, index: int = 0, count: int = 1) -> dict[str, str]:
    """Of the files that a host of so many wrote; of one alone, of all."""
    return {
        str(path.relative_to(folder)): blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _writer(path.relative_to(folder)) % count == index
    }


def _writer(path: pathlib.PurePath) -> int:
    """The host that wrote a file of a step, by the folder that Orbax gives each; the leader, who writes the rest."""
    found = [_OF_HOST.fullmatch(part) for part in path.parts]
    return next((int(match[1]) for match in found if match), 0)
