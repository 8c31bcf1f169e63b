"""How the hosts of a learner put a version out together: all write their pieces, then all announce it, or none does.

The leader says which version begins, gathers the pieces, joins and signs them, and says how it goes on; when every host
has announced the version in its own memory, and serves it, the leader tells the store.
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
"""How long a host waits for the others: longer than any writes its piece. A leader may wait for its store as well."""
Next = Literal["announce", "again", "skip", "end"]
"""What becomes of a version: all pieces are there; it is tried again; a newer one takes its place; it is given up, and
with it the run."""
T = TypeVar("T")


class _Sealed(msgspec.Struct):
    """A host's piece, or why there is none."""

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
    """What the leader says of a version."""

    next: Next
    manifest: WeightManifest | None
    failure: str
    """What failed, at which host."""


class VersionCommit:
    """One host's part in it. Used by the publisher's thread, `same` by the learner's."""

    def __init__(self, hosts: Processes, writer: SnapshotWriter, *, timeout_s: float = WAIT_S) -> None:
        """Nothing was said yet."""
        self.count, self.index, self.is_leader = hosts.count, hosts.index, hosts.is_leader
        self._writer, self._timeout_s = writer, timeout_s
        self._publishing: Channel = hosts.channel("publish")
        self._handing_over: Channel = hosts.channel("hand over")

    def same(self, choice: bool) -> bool:
        """The leader's choice, at every host.

        Raises:
          ProcessLostError: a host does not answer.
        """
        said = self._handing_over.broadcast(b"%d" % choice if self.is_leader else None, timeout_s=self._timeout_s)
        return said == b"1"

    def begin(self, version: Version | None) -> Version | None:
        """The version that all begin now, which the leader gives; None if no more come.

        Raises:
          ProcessLostError: as `same`.
        """
        given = None if version is None else str(version).encode()
        said = self._publishing.broadcast(given, timeout_s=self._timeout_s)
        return Version.parse(said.decode()) if said else None

    def end(self) -> None:
        """The leader's: tells the others that it begins no more versions."""
        if self.is_leader:
            self._publishing.broadcast(b"", timeout_s=self._timeout_s)

    def decide(self, part: WeightManifest | None, failure: str, *, otherwise: Next) -> CommitOutcome:
        """Hands this host's part of a version in; says how it goes on.

        Args:
          part: sealed; None if it could not be written.
          failure: why not.
          otherwise: the leader's: what is done where a part is missing.

        Raises:
          ProcessLostError: as `same`.
        """
        # The table of tensors is the same everywhere, and by far the largest part.
        tensors = () if part is None else part.tensors
        sealed = _Sealed(None if part is None else codec.encode(dataclasses.replace(part, tensors=())), failure)
        messages = self._publishing.gather(msgspec.msgpack.encode(sealed), timeout_s=self._timeout_s)
        said = None
        if self.is_leader:
            said = msgspec.msgpack.encode(self._joined([_decoded(m, _Sealed) for m in messages], tensors, otherwise))
        heard = self._publishing.broadcast(said, timeout_s=self._timeout_s)
        if not heard:
            raise ProcessLostError("the learner's process 0 publishes no more")
        decision = _decoded(heard, _Decision)
        manifest = None
        if decision.next == "announce":
            manifest = dataclasses.replace(codec.decode(WeightManifest, decision.manifest), tensors=tensors)
        return CommitOutcome(decision.next, manifest, decision.failure)

    def there(self, sources: Sequence[str]) -> list[tuple[str, ...]]:
        """Says that this host has announced a version, and where it serves its piece; at the leader all hosts' places.

        Raises:
          ProcessLostError: as `same`.
        """
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
