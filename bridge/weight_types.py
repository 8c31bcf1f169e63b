"""Wire types of published weights: manifest, announcement, run card."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from bridge.rollout_types import Version
from bridge.validation import MAX_TEXT_CHARS, check_file_name, check_source, check_text

MAX_TENSORS = 2**18
"""Tensors of a model; a large mixture of experts has 70,000."""
MAX_DIMS = 8
MAX_DELTA_CHUNKS = 2**16
MAX_SOURCES = 16
MAX_HOSTS = 1024
MAX_BLOCKS = 2**14
"""Of one piece; a sharded leaf of the learner's is one, or one a layer where its experts are split over hosts."""
MAX_CARD_FILES = 64
MAX_BASE_STEPS = 2**12
"""Restarts behind whose weights no actor can still be."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies in a snapshot's data file."""

    name: str
    """Hugging Face name."""
    dtype: str
    """numpy's or ml_dtypes' name: float32, bfloat16, float16."""
    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)]
    offset_bytes: int
    num_bytes: int

    def __post_init__(self) -> None:
        """Refuses what lies nowhere."""
        if min(self.offset_bytes, self.num_bytes, *self.shape) < 0 or len(self.shape) > MAX_DIMS:
            raise ValueError(
                f"tensor {self.name}: want counts >= 0 and {MAX_DIMS} dimensions at most, got shape "
                f"{self.shape[: MAX_DIMS + 1]} offset_bytes={self.offset_bytes} num_bytes={self.num_bytes}"
            )


DIGEST_BYTES = 32
"""A BLAKE3 digest's size."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One data file of a snapshot and what its bytes hash to, chunk by chunk.

    So one bad chunk can be told from the others, and a broken download goes on where it stopped.
    """

    name: str
    num_bytes: int
    chunk_bytes: int
    """Size of every chunk but the last, which may be shorter."""
    chunk_hashes: bytes
    """The chunks' BLAKE3 digests, one after another."""
    blake3: str
    """BLAKE3 of `chunk_hashes`, in hex: two files of one chunk size are the same if and only if this is."""

    def __post_init__(self) -> None:
        """Refuses digests that are not one a chunk, and a name that leads out of the snapshot's folder."""
        check_file_name(self.name)
        if self.chunk_bytes < 1 or self.num_bytes < 0:
            raise ValueError(f"want chunk_bytes >= 1 and num_bytes >= 0, got {self.chunk_bytes}, {self.num_bytes}")
        if len(self.chunk_hashes) != self.num_chunks * DIGEST_BYTES:
            raise ValueError(
                f"{self.name} has {self.num_chunks} chunks and {len(self.chunk_hashes)} bytes of digests, "
                f"wanted {DIGEST_BYTES} each"
            )

    @property
    def num_chunks(self) -> int:
        """How many chunks the file has."""
        return -(-self.num_bytes // self.chunk_bytes)

    def chunk(self, index: int) -> tuple[int, int]:
        """Where a chunk begins and ends, in bytes."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def chunk_hash(self, index: int) -> bytes:
        """A chunk's digest."""
        return self.chunk_hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEntry:
    """A file that leads from an older version's data to this one's: their XOR, compressed chunk by chunk."""

    base_version: Version
    """Whose data it is XORed with; both have the same tensors at the same offsets."""
    codec: str
    """How a chunk is compressed (`bridge.snapshots.delta`)."""
    name: str
    """The file's name."""
    chunk_ends: Annotated[tuple[int, ...], Meta(max_length=MAX_DELTA_CHUNKS)]
    """Where each compressed chunk ends in it; one for each chunk of the full file, 0 bytes where nothing changed."""

    def __post_init__(self) -> None:
        """Refuses ends that decrease, and a name that leads out of the snapshot's folder."""
        check_file_name(self.name)
        if any(a > b for a, b in zip((0, *self.chunk_ends), self.chunk_ends, strict=False)):
            raise ValueError("a delta's chunk_ends must not decrease")

    @property
    def num_bytes(self) -> int:
        """The file's size."""
        return self.chunk_ends[-1] if self.chunk_ends else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The same rectangle of some tensors that follow on one another and have one shape and dtype.

    A tensor counts as a matrix `[rows, cols]`: its last dim has the columns, all others are rows, and a vector is one.
    """

    first_tensor: int
    """Index in the manifest's `tensors`."""
    num_tensors: int
    first_row: int
    num_rows: int
    first_col: int
    num_cols: int

    def __post_init__(self) -> None:
        """Refuses what is empty or begins before the first."""
        if min(self.first_tensor, self.first_row, self.first_col) < 0 or self.num_values < 1:
            raise ValueError(f"a block must hold something and begin at 0 or later, got {self}")

    @property
    def num_values(self) -> int:
        """In all its tensors; 0 where a count is not positive."""
        counts = (self.num_tensors, self.num_rows, self.num_cols)
        return math.prod(counts) if min(counts) > 0 else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """What one of the learner's hosts wrote of a snapshot, in a file of its own.

    The file holds its blocks' tensors one after another, each at a 64-byte aligned offset, zeros between them. So the
    one piece of a single host is the whole file.
    """

    host: int
    """Index of the learner's process."""
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)]
    """Which values it has, in the order of its file."""
    file: FileEntry
    delta: DeltaEntry | None = None
    """A shorter way for whoever holds its base version; the full file is there all the same."""

    def __post_init__(self) -> None:
        """Refuses a host that can't be, and a delta of another number of chunks."""
        if not 0 <= self.host < MAX_HOSTS:
            raise ValueError(f"a piece's host must be in [0, {MAX_HOSTS}), got {self.host}")
        if self.delta is not None and len(self.delta.chunk_ends) != self.file.num_chunks:
            raise ValueError(f"the delta has {len(self.delta.chunk_ends)} chunks, the full file {self.file.num_chunks}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """A weight snapshot's table of contents; what it does not list is not in the snapshot."""

    run: str
    version: Version
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_TENSORS)]
    """Where each lies in the whole file, which readers put together from the pieces."""
    shards: Annotated[tuple[ShardEntry, ...], Meta(max_length=MAX_HOSTS)]
    """By host. Readers check that they are all there and none overlaps (`bridge.snapshots.snapshot_format`)."""
    tokenizer_hash: str
    hmac: str | None = None
    """Keyed hash over the rest of the manifest, where snapshots cross machines."""
    created_s: float = 0.0
    base_steps: Annotated[tuple[Version, ...], Meta(max_length=MAX_BASE_STEPS)] = ()
    """Step that each of the run's incarnations began at, as far as they decide (`deciding_base_steps`), this version's
    own last; empty where the writer does not know them."""

    def __post_init__(self) -> None:
        """Refuses overlapping or out-of-range tensors and double names."""
        if not math.isfinite(self.created_s):
            raise ValueError(f"created_s must be finite, got {self.created_s}")
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError("a manifest names a tensor twice")
        end = 0
        for t in sorted(self.tensors, key=lambda t: t.offset_bytes):
            if t.offset_bytes < end:
                raise ValueError(f"tensor {t.name} overlaps the one before it at byte {t.offset_bytes}")
            end = t.offset_bytes + t.num_bytes
        hosts = [p.host for p in self.shards]
        if sorted(set(hosts)) != hosts:
            raise ValueError(f"a manifest's pieces must be in the order of their hosts, one each, got {hosts[:8]}")

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return max((t.offset_bytes + t.num_bytes for t in self.tensors), default=0)


def deciding_base_steps(base_steps: Mapping[int, int]) -> tuple[Version, ...]:
    """Returns the base steps that decide which earlier weights are abandoned, oldest incarnation first.

    Weights are abandoned if a later incarnation began at an earlier step (`Version.is_abandoned`). So of incarnations
    that began at the same or at a later step than one after them nothing depends.

    Args:
      base_steps: the step that each incarnation began at.
    """
    deciding: list[Version] = []
    for incarnation, step in sorted(base_steps.items(), reverse=True):
        if not deciding or step < deciding[-1].step:
            deciding.append(Version(incarnation=incarnation, step=step))
    return tuple(reversed(deciding[:MAX_BASE_STEPS]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A version that is out, and from where those who don't share the learner's memory may fetch it."""

    manifest: WeightManifest
    sources: Annotated[tuple[str, ...], Meta(max_length=MAX_SOURCES)]
    """URLs under which the manifest's files lie (https://, http://, s3://, gs://, file://), the best one first; the
    learner's own memory is none of them. Last may come one whose name is an older version's: where that one lies whole,
    for whoever reaches none of the others (`bridge.snapshots.snapshot_format.older_place`)."""
    host_sources: Annotated[
        tuple[Annotated[tuple[str, ...], Meta(max_length=MAX_SOURCES)], ...], Meta(max_length=MAX_HOSTS)
    ] = ()
    """URLs under which the files of one piece lie, for each piece of the manifest, where hosts serve their own; else
    empty."""
    hmac: str | None = None
    """Keyed hash over all the rest, where snapshots cross machines: who holds the store can name no other sources."""

    def __post_init__(self) -> None:
        """Refuses what is no address of snapshots."""
        for source in self.all_sources:
            check_source(source)
        if self.host_sources and len(self.host_sources) != len(self.manifest.shards):
            raise ValueError(
                f"an announcement names sources of {len(self.host_sources)} pieces, the version has "
                f"{len(self.manifest.shards)}"
            )

    @property
    def all_sources(self) -> tuple[str, ...]:
        """Those of the whole version and those of one piece."""
        return (*self.sources, *(source for of_piece in self.host_sources for source in of_piece))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardFile:
    """A small file of the model's folder, kept in the store by its hash."""

    name: str
    num_bytes: int
    blake3: str

    def __post_init__(self) -> None:
        """Refuses a name that leads out of the model's folder."""
        check_file_name(self.name)
        if self.num_bytes < 0:
            raise ValueError(f"{self.name}: num_bytes must be >= 0, got {self.num_bytes}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """What an actor needs to know of a run that it shares no folder with."""

    run: str
    """The run's id (`configs.run_folder.run_id`)."""
    name: str
    """The name it was given."""
    config: str
    """The run's config.json."""
    files: Annotated[tuple[CardFile, ...], Meta(max_length=MAX_CARD_FILES)]
    """config.json, tokenizer and what else an engine reads of the model's folder, weights left out."""
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_TENSORS)]
    """What every snapshot holds: names, dtypes, shapes (offsets as in a snapshot)."""
    sluice: str
    """Version of Sluice that the learner runs."""
    vllm: str
    """The vLLM version that an actor needs; empty where any will do."""

    def __post_init__(self) -> None:
        """Refuses a file named twice, and texts that are shown to people but can't be read."""
        names = [f.name for f in self.files]
        if len(set(names)) != len(names):
            raise ValueError("a run card names a file twice")
        for what in ("run", "name", "sluice", "vllm"):
            check_text(what, getattr(self, what))
        if len(self.config) > MAX_TEXT_CHARS:
            raise ValueError(f"a run's config may have {MAX_TEXT_CHARS} characters, got {len(self.config)}")


SLUICE = "0.1.0"
"""Of this build, as in pyproject.toml."""
VLLM = "0.32.0"
"""Of the engine that this build is tested with; an actor's may say more behind it, as in 0.32.0+cpu."""
