"""Agreement between the learner's hosts on one checkpoint, and errors of saves and restores."""

import contextlib
import errno
import json
import pathlib
import re
from collections.abc import Callable, Generator

from blake3 import blake3

from learner.distributed.channel import Barrier, BarrierBrokenError, Processes, ProcessLostError

_OF_SYSTEM = " [os_error_code="
"""Marker of operating-system errors in messages of TensorStore, the storage layer of Orbax."""


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def system_errors(step: pathlib.Path) -> Generator[None]:
    """Converts a ValueError of Orbax's storage into an OSError if it reports an operating-system error."""
    try:
        yield
    except ValueError as e:
        said, is_of_system, _ = str(e).partition(_OF_SYSTEM)
        if not is_of_system:
            raise
        raise OSError(f"{step}: cannot read the checkpoint: {said}") from e


def reason(error: Exception) -> str:
    """Returns one line on why a save failed; a full disk is recognized in Orbax's long errors."""
    text = str(error)
    if "No space left on device" in text or (isinstance(error, OSError) and error.errno in _FULL):
        return "its disk is full"
    return " ".join(text.split())[:300] or type(error).__name__


def cause(error: Exception) -> Exception:
    """Returns the host's own failure behind the BarrierBrokenError that followed it."""
    while isinstance(error, BarrierBrokenError) and isinstance(error.__context__, Exception):
        error = error.__context__
    return error


_OF_HOST = re.compile(r"ocdbt\.process_(\d+)")


PEER_TIMEOUT_S = 1800.0
"""Timeout for another host to write or hash its part of a checkpoint, in seconds."""


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be saved, restored or used."""


def barrier_fn(meeting: Barrier) -> Callable[..., None]:
    """Returns the barrier function for Orbax; it ignores Orbax's timeout, which would end one host's wait alone."""

    def wait(*, key: str, timeout_ms: int) -> None:
        del timeout_ms
        meeting.wait(key)

    return wait


class HostAgreement:
    """Exchange of findings and failures between the hosts that save and restore together."""

    def __init__(self, hosts: Processes) -> None:
        self._hosts, self._channel = hosts, hosts.channel("checkpoints")

    def say(self, message: str | None = None) -> str:
        """Broadcasts the leader's message and returns it on every host."""
        data = None if message is None or not self._hosts.is_leader else message.encode()
        return self._channel.broadcast(data, timeout_s=PEER_TIMEOUT_S).decode()

    def own_hashes(self, folder: pathlib.Path) -> dict[str, str]:
        """Returns the hashes of the folder's files that this host wrote."""
        return hash_files(folder, self._hosts.index, self._hosts.count)

    def all_hashes(self, own: dict[str, str]) -> dict[str, str]:
        """Gathers every host's hashes at the leader; returns `own` on the other hosts."""
        if self._hosts.count == 1:
            return own
        parts = self._channel.gather(json.dumps(own).encode(), timeout_s=PEER_TIMEOUT_S)
        return {name: digest for part in parts for name, digest in json.loads(part).items()} or own

    def await_all(self) -> None:
        """Waits on the leader until all hosts call it; returns immediately on the others."""
        self._channel.gather(b"", timeout_s=PEER_TIMEOUT_S)

    def largest(self, number: int) -> int:
        """Returns the largest of the hosts' numbers, on every host."""
        parts = self._channel.gather(b"%d" % number, timeout_s=PEER_TIMEOUT_S)
        return int(self.say(str(max(map(int, parts))) if parts else None))

    @contextlib.contextmanager
    def on_success(self) -> Generator[None]:
        """Runs a part that all hosts perform; if one host fails, all raise."""
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
    """Returns the BLAKE3 hashes of the files that host `index` of `count` wrote, by relative path."""
    return {
        str(path.relative_to(folder)): blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _writer(path.relative_to(folder)) % count == index
    }


def _writer(path: pathlib.PurePath) -> int:
    """Returns the index of the host that wrote a file: from Orbax's per-process folder, else 0 (the leader)."""
    found = [_OF_HOST.fullmatch(part) for part in path.parts]
    return next((int(match[1]) for match in found if match), 0)
