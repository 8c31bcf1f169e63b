"""Wire types of published weights: manifest, announcement, run card."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from bridge.rollout_types import Version
from bridge.validation import MAX_TEXT_CHARS, check_file_name, check_source, check_text

MAX_TENSORS = 2**18
"""Most tensors of a model; a large mixture of experts has 70,000."""
MAX_DIMS = 8
MAX_DELTA_CHUNKS = 2**16
MAX_SOURCES = 16
MAX_HOSTS = 1024
MAX_BLOCKS = 2**14
"""Most blocks of one shard. A sharded leaf of the learner is one block, or one per layer if its experts are split over
hosts."""
MAX_CARD_FILES = 64
MAX_BASE_STEPS = 2**12
"""Most base steps in a manifest. Older restarts are dropped, because no actor can still hold weights from before
them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Position of one tensor in a snapshot's data file."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Name in numpy or ml_dtypes: float32, bfloat16, float16."""
    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)]
    offset_bytes: int
    num_bytes: int

    def __post_init__(self) -> None:
        if min(self.offset_bytes, self.num_bytes, *self.shape) < 0 or len(self.shape) > MAX_DIMS:
            raise ValueError(
                f"tensor {self.name}: expected counts >= 0 and at most {MAX_DIMS} dimensions, got shape "
                f"{self.shape[: MAX_DIMS + 1]} offset_bytes={self.offset_bytes} num_bytes={self.num_bytes}"
            )


DIGEST_BYTES = 32
"""Size of a BLAKE3 digest, in bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Data file of a snapshot with one hash per chunk.

    Chunk hashes locate a corrupt chunk and let a broken download resume where it stopped.
    """

    name: str
    num_bytes: int
    chunk_bytes: int
    """Size of every chunk except the last, which may be shorter."""
    chunk_hashes: bytes
    """BLAKE3 digests of the chunks, concatenated."""
    blake3: str
    """Hex BLAKE3 of `chunk_hashes`. Two files with one chunk size are equal if and only if it is equal."""

    def __post_init__(self) -> None:
        check_file_name(self.name)
        if self.chunk_bytes < 1 or self.num_bytes < 0:
            raise ValueError(
                f"{self.name}: expected chunk_bytes >= 1 and num_bytes >= 0, got {self.chunk_bytes}, {self.num_bytes}"
            )
        if len(self.chunk_hashes) != self.num_chunks * DIGEST_BYTES:
            raise ValueError(
                f"{self.name} has {self.num_chunks} chunks and {len(self.chunk_hashes)} bytes of digests, "
                f"expected {DIGEST_BYTES} each"
            )

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the file."""
        return -(-self.num_bytes // self.chunk_bytes)

    def chunk(self, index: int) -> tuple[int, int]:
        """Returns the first byte of a chunk and the byte after its last."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def chunk_hash(self, index: int) -> bytes:
        """Returns a chunk's digest."""
        return self.chunk_hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEntry:
    """Delta file: XOR of this version's data with an older version's, compressed chunk by chunk."""

    base_version: Version
    """Version whose data is XORed; both versions have the same tensors at the same offsets."""
    codec: str
    """Compression of a chunk (`bridge.snapshots.delta`)."""
    name: str
    chunk_ends: Annotated[tuple[int, ...], Meta(max_length=MAX_DELTA_CHUNKS)]
    """End offset of each compressed chunk, one per chunk of the full file; an unchanged chunk has 0 bytes."""

    def __post_init__(self) -> None:
        check_file_name(self.name)
        if any(a > b for a, b in zip((0, *self.chunk_ends), self.chunk_ends, strict=False)):
            raise ValueError("a delta's chunk_ends must not decrease")

    @property
    def num_bytes(self) -> int:
        """Size of the delta file."""
        return self.chunk_ends[-1] if self.chunk_ends else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The same rectangle in each of several consecutive tensors that have one shape and dtype.

    A tensor counts as a matrix `[rows, cols]`: its last dim is the columns, and all other dims are rows. A vector is
    one row.
    """

    first_tensor: int
    """Index in the manifest's `tensors`."""
    num_tensors: int
    first_row: int
    num_rows: int
    first_col: int
    num_cols: int

    def __post_init__(self) -> None:
        if min(self.first_tensor, self.first_row, self.first_col) < 0 or self.num_values < 1:
            raise ValueError(f"block must not be empty and must begin at 0 or later, got {self}")

    @property
    def num_values(self) -> int:
        """Number of values in all its tensors; 0 if a count is not positive."""
        counts = (self.num_tensors, self.num_rows, self.num_cols)
        return math.prod(counts) if min(counts) > 0 else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """Shard of a snapshot: the file that one of the learner's hosts wrote.

    The file holds the tensors of its blocks in order, each at a 64-byte aligned offset, with zeros in between. The
    shard of a single host is therefore the whole file.
    """

    host: int
    """Index of the learner's process."""
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)]
    """Values in the shard, in file order."""
    file: FileEntry
    delta: DeltaEntry | None = None
    """Smaller alternative for readers that hold its base version; the full file is always available."""

    def __post_init__(self) -> None:
        if not 0 <= self.host < MAX_HOSTS:
            raise ValueError(f"a piece's host must be in [0, {MAX_HOSTS}), got {self.host}")
        if self.delta is not None and len(self.delta.chunk_ends) != self.file.num_chunks:
            raise ValueError(f"the delta has {len(self.delta.chunk_ends)} chunks, the full file {self.file.num_chunks}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Table of contents of a weight snapshot; files that it does not list are not part of the snapshot."""

    run: str
    version: Version
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_TENSORS)]
    """Position of each tensor in the whole file, which readers assemble from the shards."""
    shards: Annotated[tuple[ShardEntry, ...], Meta(max_length=MAX_HOSTS)]
    """Shards in host order. Readers check that they are complete and disjoint (`bridge.snapshots.snapshot_format`)."""
    tokenizer_hash: str
    hmac: str | None = None
    """Keyed hash over the rest of the manifest, set if snapshots cross machines."""
    created_s: float = 0.0
    base_steps: Annotated[tuple[Version, ...], Meta(max_length=MAX_BASE_STEPS)] = ()
    """Base steps of the run's incarnations that still decide (`deciding_base_steps`), ending with this version's
    incarnation; empty if the writer does not know them."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.created_s):
            raise ValueError(f"created_s must be finite, got {self.created_s}")
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError("manifest: tensor names must be unique")
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

    `base_steps` has the step that each incarnation began at. Weights are abandoned if a later incarnation began at an
    earlier step (`Version.is_abandoned`). An incarnation therefore does not matter if a later one began at the same or
    an earlier step.
    """
    deciding: list[Version] = []
    for incarnation, step in sorted(base_steps.items(), reverse=True):
        if not deciding or step < deciding[-1].step:
            deciding.append(Version(incarnation=incarnation, step=step))
    return tuple(reversed(deciding[:MAX_BASE_STEPS]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Published version and the sources from which actors on other machines can fetch it."""

    manifest: WeightManifest
    sources: Annotated[tuple[str, ...], Meta(max_length=MAX_SOURCES)]
    """URLs of the manifest's files (https://, http://, s3://, gs://, file://), best first; never the learner's memory.
    The last may name an older version as a fallback for readers that reach no other source
    (`bridge.snapshots.snapshot_format.older_place`)."""
    host_sources: Annotated[
        tuple[Annotated[tuple[str, ...], Meta(max_length=MAX_SOURCES)], ...], Meta(max_length=MAX_HOSTS)
    ] = ()
    """URLs of each shard's files, one tuple per shard, if hosts serve their own shards; otherwise empty."""
    hmac: str | None = None
    """Keyed hash over all other fields, set if snapshots cross machines. It prevents the store from naming other
    sources."""

    def __post_init__(self) -> None:
        for source in self.all_sources:
            check_source(source)
        if self.host_sources and len(self.host_sources) != len(self.manifest.shards):
            raise ValueError(
                f"an announcement names sources of {len(self.host_sources)} pieces, the version has "
                f"{len(self.manifest.shards)}"
            )

    @property
    def all_sources(self) -> tuple[str, ...]:
        """URLs of the whole version and of single shards."""
        return (*self.sources, *(source for of_piece in self.host_sources for source in of_piece))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardFile:
    """Small file of the model's folder, kept in the store under its hash."""

    name: str
    num_bytes: int
    blake3: str

    def __post_init__(self) -> None:
        check_file_name(self.name)
        if self.num_bytes < 0:
            raise ValueError(f"{self.name}: num_bytes must be >= 0, got {self.num_bytes}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCard:
    """Run description for actors that share no folder with the learner."""

    run: str
    """Id of the run (`configs.run_folder.run_id`)."""
    name: str
    config: str
    """Content of the run's config.json."""
    files: Annotated[tuple[CardFile, ...], Meta(max_length=MAX_CARD_FILES)]
    """config.json, the tokenizer and all other files of the model's folder that an engine reads, without weights."""
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_TENSORS)]
    """Tensors of every snapshot: names, dtypes, shapes, and offsets as in a snapshot."""
    sluice: str
    """Version of Sluice that the learner runs."""
    vllm: str
    """vLLM version that an actor requires; empty accepts any."""

    def __post_init__(self) -> None:
        names = [f.name for f in self.files]
        if len(set(names)) != len(names):
            raise ValueError("run card: file names must be unique")
        for what in ("run", "name", "sluice", "vllm"):
            check_text(what, getattr(self, what))
        if len(self.config) > MAX_TEXT_CHARS:
            raise ValueError(f"a run's config may have {MAX_TEXT_CHARS} characters, got {len(self.config)}")


SLUICE = "0.1.0"
"""Version of this build, as in pyproject.toml."""
VLLM = "0.32.0"
"""vLLM version that this build is tested with. An actor's may have a suffix, as in 0.32.0+cpu."""
