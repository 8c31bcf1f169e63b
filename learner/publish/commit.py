"""Joint commit of a version by the learner's hosts: all hosts write their pieces, then all announce, or none does.

The leader starts a version, gathers the pieces, joins and signs them, and broadcasts the outcome. The leader announces
the version in the store after every host has announced it in its own memory and serves it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from bridge import codec
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import WeightManifest
from learner.distributed.channel import Channel, Processes, ProcessLostError

WAIT_S = 300.0
"""Timeout of a host's wait for the other hosts, in seconds: longer than writing a piece takes."""
Next = Literal["announce", "again", "skip", "end"]
"""Outcome of a commit. `announce`: all pieces are written. `again`: the hosts retry. `skip`: a newer version replaces
this one. `end`: the run fails."""
T = TypeVar("T")


class _Sealed(msgspec.Struct):
    """Piece of one host, or the reason why the piece is missing."""

    part: bytes | None
    failure: str


class _Decision(msgspec.Struct):
    next: Next
    manifest: bytes
    failure: str


class _There(msgspec.Struct):
    sources: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The leader's decision about a version."""

    next: Next
    manifest: WeightManifest | None
    failure: str
    """Failed hosts and their errors; empty on `announce`."""


class VersionCommit:
    """A host's part in the commit; its methods raise ProcessLostError if a host does not answer.

    The learner's thread calls `same`, the publisher's thread all other methods.
    """

    def __init__(self, hosts: Processes, writer: SnapshotWriter, *, timeout_s: float = WAIT_S) -> None:
        self.count, self.index, self.is_leader = hosts.count, hosts.index, hosts.is_leader
        self._writer, self._timeout_s = writer, timeout_s
        self._publishing: Channel = hosts.channel("publish")
        self._handing_over: Channel = hosts.channel("hand over")

    def same(self, choice: bool) -> bool:
        """Broadcasts the leader's choice and returns it at every host."""
        said = self._handing_over.broadcast(b"%d" % choice if self.is_leader else None, timeout_s=self._timeout_s)
        return said == b"1"

    def begin(self, version: Version | None) -> Version | None:
        """Returns the version that all hosts publish next, as the leader chose it; None if no version follows."""
        given = None if version is None else str(version).encode()
        said = self._publishing.broadcast(given, timeout_s=self._timeout_s)
        return Version.parse(said.decode()) if said else None

    def end(self) -> None:
        """Notifies the other hosts that no version follows; does nothing on a host that is not the leader."""
        if self.is_leader:
            self._publishing.broadcast(b"", timeout_s=self._timeout_s)

    def decide(self, part: WeightManifest | None, failure: str, *, otherwise: Next) -> CommitOutcome:
        """Submits this host's piece of a version and returns the leader's decision: `otherwise` if a piece is missing.

        `part` is None if the piece could not be written, for the reason `failure`.
        """
        # The table of tensors is equal on all hosts and by far the largest part, so it is not sent.
        tensors = () if part is None else part.tensors
        sealed = _Sealed(None if part is None else codec.encode(dataclasses.replace(part, tensors=())), failure)
        messages = self._publishing.gather(msgspec.msgpack.encode(sealed), timeout_s=self._timeout_s)
        said = None
        if self.is_leader:
            said = msgspec.msgpack.encode(self._joined([_decoded(m, _Sealed) for m in messages], tensors, otherwise))
        heard = self._publishing.broadcast(said, timeout_s=self._timeout_s)
        if not heard:
            raise ProcessLostError("the learner's process 0 stopped publishing")
        decision = _decoded(heard, _Decision)
        manifest = None
        if decision.next == "announce":
            manifest = dataclasses.replace(codec.decode(WeightManifest, decision.manifest), tensors=tensors)
        return CommitOutcome(decision.next, manifest, decision.failure)

    def there(self, sources: Sequence[str]) -> list[tuple[str, ...]]:
        """Reports where this host serves an announced version; returns the sources of all hosts at the leader."""
        message = msgspec.msgpack.encode(_There(list(sources)))
        messages = self._publishing.gather(message, timeout_s=self._timeout_s)
        return [tuple(_decoded(m, _There).sources) for m in messages]

    def _joined(self, sealed: Sequence[_Sealed], tensors: tuple, otherwise: Next) -> _Decision:
        failures = [f"host {i}: {one.failure}" for i, one in enumerate(sealed) if one.part is None]
        if not failures:
            parts = [codec.decode(WeightManifest, one.part) for one in sealed if one.part is not None]
            try:
                manifest = self._writer.join([dataclasses.replace(part, tensors=tensors) for part in parts])
            except SnapshotError as e:
                failures.append(str(e))
            else:
                return _Decision("announce", codec.encode(dataclasses.replace(manifest, tensors=())), "")
        return _Decision(otherwise, b"", "; ".join(failures))


def _decoded(message: bytes, type_: type[T]) -> T:
    return msgspec.msgpack.decode(message, type=type_)
