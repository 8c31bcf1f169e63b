"""Small valid wire values for tests; every field can be overridden."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import blake3
import numpy as np

from bridge.heartbeat_types import ActorReport
from bridge.progress_types import RequestProgress, TicketProgress, prompt_digest
from bridge.rollout_types import Group, Rollout, Sampling, Task, Ticket, Version
from bridge.weight_types import (
    Announcement,
    CardFile,
    DeltaEntry,
    FileEntry,
    RunCard,
    ShardEntry,
    TensorEntry,
    WeightManifest,
)
from tests.bridge.snapshots.whole import full_blocks


def make_rollout(num_tokens: int = 3, *, step: int = 0, **fields: Any) -> Rollout:
    values: dict[str, Any] = {
        "tokens": np.arange(num_tokens, dtype=np.int32),
        "loss_mask": np.ones(num_tokens, np.bool_),
        "behavior_logprobs": np.full(num_tokens, -0.5, np.float32),
        "token_versions": np.full(num_tokens, step, np.int32),
        "finish": "stop",
        "reward": 1.0,
    }
    return Rollout(**(values | fields))


def captured(of: Any) -> np.ndarray:
    """The routing of a sample, a rollout or a batch, which has one."""
    assert isinstance(of.routed_experts, np.ndarray)
    return of.routed_experts


def make_ticket(id_: str = "t", **fields: Any) -> Ticket:
    values: dict[str, Any] = {
        "id": id_,
        "kind": "train",
        "round": 0,
        "order": 0,
        "prompt_tokens": np.array([7, 8], np.int32),
        "task": Task.judged_by("exact", answer="42"),
        "num_samples": 2,
        "sampling": Sampling(max_tokens=16),
        "min_version": Version(incarnation=0, step=0),
    }
    values |= fields
    return Ticket(**({"num_requests": values["num_samples"]} | values))


def make_progress(id_: str = "t", *indexes: int, step: int = 0, **fields: Any) -> TicketProgress:
    """Progress of one token per request; by default of request 0."""
    requests = tuple(
        RequestProgress(
            index=index,
            tokens=np.array([index], np.int32),
            behavior_logprobs=np.array([-0.5], np.float32),
            incarnations=np.array([0], np.int32),
            steps=np.array([step], np.int32),
        )
        for index in indexes or (0,)
    )
    values: dict[str, Any] = {"ticket_id": id_, "actors": ("a",), "requests": requests}
    values["prompt"] = prompt_digest(make_ticket(id_))
    return TicketProgress(**(values | fields))


def make_group(ticket: Ticket, *, actor: str = "a", **fields: Any) -> Group:
    values: dict[str, Any] = {
        "ticket_id": ticket.id,
        "kind": ticket.kind,
        "round": ticket.round,
        "order": ticket.order,
        "prompt_tokens": ticket.prompt_tokens,
        "rollouts": tuple(make_rollout() for _ in range(ticket.num_samples)),
        "incarnation": 0,
        "actor": actor,
        "started_s": 1.0,
        "finished_s": 2.0,
    }
    return Group(**(values | fields))


def make_report(**fields: Any) -> ActorReport:
    counts = {f.name: 0 for f in dataclasses.fields(ActorReport) if f.name.startswith("num_")}
    values: dict[str, Any] = counts | {
        "is_shutting_down": False,
        "max_sequences": 8,
        "kv_usage": 0.25,
        "kv_usage_peak": 0.5,
    }
    return ActorReport(**(values | fields))


def one_piece(
    tensors: tuple[TensorEntry, ...], file: FileEntry, delta: DeltaEntry | None = None
) -> tuple[ShardEntry, ...]:
    """What a single host writes: all of it."""
    return (ShardEntry(host=0, blocks=full_blocks(tensors), file=file, delta=delta),)


def with_piece(manifest: WeightManifest, **fields: Any) -> WeightManifest:
    """The same with other fields of its first piece."""
    first, *others = manifest.shards
    return dataclasses.replace(manifest, shards=(dataclasses.replace(first, **fields), *others))


def with_file(manifest: WeightManifest, **fields: Any) -> WeightManifest:
    """The same with other fields of its first piece's file."""
    return with_piece(manifest, file=dataclasses.replace(manifest.shards[0].file, **fields))


def make_announcement(*, incarnation: int = 0, step: int = 0, sources: tuple[str, ...] = ()) -> Announcement:
    digest = blake3.blake3(b"\0" * 8).digest()
    file = FileEntry(
        name="slot-0", num_bytes=8, chunk_bytes=8, chunk_hashes=digest, blake3=blake3.blake3(digest).hexdigest()
    )
    tensors = (TensorEntry(name="w", dtype="float32", shape=(2,), offset_bytes=0, num_bytes=8),)
    manifest = WeightManifest(
        run="run",
        version=Version(incarnation=incarnation, step=step),
        tensors=tensors,
        shards=one_piece(tensors, file),
        tokenizer_hash="tokenizer",
    )
    return Announcement(manifest=manifest, sources=sources)


def make_run_card(*, name: str = "tiny", files: Mapping[str, bytes] | None = None) -> RunCard:
    return RunCard(
        run="run",
        name=name,
        config="{}",
        files=tuple(CardFile(name=h[:8], num_bytes=len(c), blake3=h) for h, c in (files or {}).items()),
        tensors=(),
        sluice="0.1.0",
        vllm="",
    )


def as_plain(value: Any) -> Any:
    """A wire value as nested tuples that `==` compares exactly: arrays by dtype and bytes."""
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        return (
            type(value).__name__,
            *(as_plain(getattr(value, f.name)) for f in dataclasses.fields(value)),
        )
    if isinstance(value, tuple):
        return tuple(as_plain(v) for v in value)
    return value
