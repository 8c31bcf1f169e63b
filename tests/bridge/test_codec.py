import dataclasses
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.extra import numpy as npst

from bridge import codec
from bridge.heartbeat_types import MAX_SPEEDS, ActorReport, DecodeSpeed, Heartbeat
from bridge.progress_types import MAX_ACTORS, RequestProgress, TicketProgress
from bridge.rollout_types import (
    MAX_SAMPLES,
    Group,
    RewardPart,
    RewardScore,
    Rollout,
    Sampling,
    Task,
    Ticket,
    Verdict,
    Version,
)
from bridge.weight_types import Announcement, CardFile, DeltaEntry, FileEntry, RunCard, TensorEntry, WeightManifest
from tests.bridge.factories import (
    as_plain,
    make_group,
    make_report,
    make_rollout,
    make_ticket,
    one_piece,
)

UNHURRIED = settings(deadline=None, max_examples=200)
INT64 = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="+&/\\"), min_size=1, max_size=20
).filter(lambda name: not name.startswith("."))
KINDS = st.sampled_from(["train", "eval", "probe"])
PARTS = st.lists(
    st.builds(RewardPart, st.text(min_size=1), FINITE), min_size=1, max_size=3, unique_by=lambda part: part.name
).map(tuple)
SCORES = st.lists(
    st.builds(
        RewardScore,
        name=st.text(),
        value=FINITE,
        verdict=st.sampled_from(get_args(Verdict)),
        answer=st.none() | st.text(max_size=200),
    ),
    max_size=3,
).map(tuple)
FLOAT32 = st.floats(-(2.0**99), 2.0**99, width=32)
PROMPTS = npst.arrays(np.int32, st.integers(1, 20))
VERSIONS = st.builds(Version, incarnation=COUNTS, step=COUNTS)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(10, 1000),
    temperature=st.just(0.0) | st.floats(0.01, 2),
    top_p=st.floats(0.1, 1),
    top_k=COUNTS,
    min_tokens=st.integers(0, 10),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(INT64, max_size=3).map(tuple),
)
TICKETS = st.builds(
    Ticket,
    id=st.text(min_size=1),
    kind=KINDS,
    round=INT64,
    order=INT64,
    prompt_tokens=PROMPTS,
    task=st.builds(Task, rewards=PARTS, answer=st.text(), metadata=st.text(), environment=st.text()),
    num_samples=st.integers(1, 20),
    num_requests=st.integers(20, MAX_SAMPLES),
    sampling=SAMPLINGS,
    min_version=VERSIONS,
)


@st.composite
def rollouts(draw) -> Rollout:
    n = draw(st.integers(1, 20))
    mask = draw(npst.arrays(np.bool_, n))
    mask[draw(st.integers(0, n - 1))] = True
    num_turns = len([bits for bits in "".join("1" if m else "0" for m in mask).split("0") if bits])
    return Rollout(
        tokens=draw(npst.arrays(np.int32, n)),
        loss_mask=mask,
        behavior_logprobs=draw(npst.arrays(np.float32, n, elements=st.floats(-(2.0**99), 0, width=32))),
        token_versions=np.sort(draw(npst.arrays(np.int32, n, elements=st.integers(0, 2**31 - 1)))),
        finish=draw(st.sampled_from(["stop", "length"])),
        reward=draw(FINITE),
        scores=draw(SCORES),
        turn_rewards=draw(npst.arrays(np.float32, draw(st.sampled_from([0, num_turns])), elements=FLOAT32)),
    )


@st.composite
def requests(draw, index: int) -> RequestProgress:
    n = draw(st.integers(1, 20))
    counts = npst.arrays(np.int32, n, elements=st.integers(0, 2**31 - 1)).map(np.sort)
    finish = draw(st.sampled_from([None, "stop", "length"]))
    return RequestProgress(
        index=index,
        tokens=draw(npst.arrays(np.int32, n)),
        behavior_logprobs=draw(npst.arrays(np.float32, n, elements=st.floats(-(2.0**99), 0, width=32))),
        incarnations=draw(counts),
        steps=draw(counts),
        finish=finish,
        reward=None if finish is None else draw(st.none() | FINITE),
        scores=draw(SCORES),
    )


PROGRESS = st.builds(
    TicketProgress,
    ticket_id=st.text(),
    prompt=st.text(),
    actors=st.lists(NAMES, min_size=1, max_size=MAX_ACTORS).map(tuple),
    requests=st.tuples(requests(0)) | st.tuples(requests(1), requests(7)),
)
GROUPS = st.builds(
    Group,
    ticket_id=st.text(),
    kind=KINDS,
    round=INT64,
    order=INT64,
    prompt_tokens=PROMPTS,
    rollouts=st.lists(rollouts(), min_size=1, max_size=3).map(tuple),
    incarnation=st.integers(8, 2**63 - 1),
    older_versions=st.just(()) | st.just((Version(incarnation=0, step=1), Version(incarnation=7, step=2))),
    actor=st.lists(NAMES, min_size=1, max_size=3).map("+".join),
    started_s=FINITE,
    finished_s=FINITE,
)
SECONDS = st.floats(0, allow_infinity=False)
REPORTS = st.builds(
    ActorReport,
    **{n: st.none() | SECONDS for n in ("prefetch_s", "verify_s", "pause_s", "load_s")},
    **{f.name: COUNTS for f in dataclasses.fields(ActorReport) if f.name.startswith("num_")},
    is_shutting_down=st.booleans(),
    max_sequences=COUNTS,
    kv_usage=st.floats(0, 1),
    kv_usage_peak=st.floats(0, 1),
    decode_speeds=st.lists(
        st.builds(DecodeSpeed, num_steps=COUNTS, num_tokens=COUNTS, seconds=SECONDS), max_size=MAX_SPEEDS
    ).map(tuple),
)
HEARTBEATS = st.builds(
    Heartbeat,
    process=NAMES,
    role=st.sampled_from(["learner", "actor"]),
    pid=INT64,
    time_s=FINITE,
    version=st.none() | VERSIONS,
    report=st.none() | REPORTS,
)


@st.composite
def manifests(draw) -> WeightManifest:
    names = draw(st.lists(st.text(), max_size=4, unique=True))
    tensors = tuple(
        TensorEntry(name=n, dtype="bfloat16", shape=(4, 8), offset_bytes=64 * i, num_bytes=64)
        for i, n in enumerate(names)
    )
    num_chunks = 2 * len(names)
    ends = tuple(sorted(draw(st.lists(st.integers(0, 2**40), min_size=num_chunks, max_size=num_chunks))))
    delta = st.builds(DeltaEntry, base_version=VERSIONS, codec=st.text(), name=NAMES, chunk_ends=st.just(ends))
    file = FileEntry(
        name="slot-0",
        num_bytes=64 * len(names),
        chunk_bytes=32,
        chunk_hashes=draw(st.binary(min_size=32 * num_chunks, max_size=32 * num_chunks)),
        blake3=draw(st.text()),
    )
    return WeightManifest(
        run=draw(st.text()),
        version=draw(VERSIONS),
        tensors=tensors,
        shards=one_piece(tensors, file, draw(st.none() | delta)),
        tokenizer_hash=draw(st.text()),
        hmac=draw(st.none() | st.text()),
        created_s=draw(FINITE),
        base_steps=tuple(draw(st.lists(VERSIONS, max_size=3))),
    )


ANNOUNCEMENTS = st.builds(
    Announcement,
    manifest=manifests(),
    sources=st.lists(st.sampled_from(["https://l.example:8443/v", "s3://b/p", "file:///f"]), max_size=3).map(tuple),
    host_sources=st.just(()) | st.just((("https://l.example:8443/v", "http://127.0.0.1:1/v"),)),
    hmac=st.none() | st.text(),
)
CARDS = st.builds(
    RunCard,
    run=NAMES,
    name=NAMES,
    config=st.text(),
    files=st.lists(
        st.builds(CardFile, name=NAMES, num_bytes=COUNTS, blake3=st.text()), max_size=3, unique_by=lambda f: f.name
    ).map(tuple),
    tensors=manifests().map(lambda m: m.tensors),
    sluice=NAMES,
    vllm=NAMES,
)
VALUES = TICKETS | PROGRESS | GROUPS | HEARTBEATS | manifests() | ANNOUNCEMENTS | CARDS
TYPES = (Ticket, TicketProgress, Group, WeightManifest, Heartbeat, Announcement, RunCard)


def change(data: bytes, edit) -> bytes:
    """The message with `edit` applied to its body, read and written by msgpack alone."""
    format_, name, body = msgspec.msgpack.decode(data)
    edit(body)
    return msgspec.msgpack.encode([format_, name, body])


def try_decode(data: bytes) -> None:
    """Anything but a value of the type or a ValueError fails the test."""
    for type_ in TYPES:
        try:
            value = codec.decode(type_, data)
        except ValueError:
            continue
        assert type(value) is type_


@pytest.mark.heavy
@UNHURRIED
@given(VALUES)
def test_round_trip_gives_an_equal_value(value):
    assert as_plain(codec.decode(type(value), codec.encode(value))) == as_plain(value)


@UNHURRIED
@given(st.binary(max_size=200))
@example(b"\x93\x01\xa6Ticket" + b"\x91" * 100_000)  # nested too deep
@example(b"\x93\x01\xa6Ticket\xdf\xff\xff\xff\xff")  # claims four billion entries
@example(b"\x93\x01\xa5Group\xc6\xff\xff\xff\xff")  # claims four gigabytes
def test_decode_random_bytes_raise_only_value_error(data):
    try_decode(data)


@pytest.mark.heavy
@UNHURRIED
@given(VALUES, st.data())
def test_decode_truncated_or_extended_refused(value, data):
    message = codec.encode(value)
    end = data.draw(st.integers(0, len(message) - 1))
    for bad in (message[:end], message + b"\x00"):
        with pytest.raises(ValueError):
            codec.decode(type(value), bad)


@pytest.mark.heavy
@UNHURRIED
@given(VALUES, st.data())
def test_decode_bit_flipped_raises_only_value_error(value, data):
    message = bytearray(codec.encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        message[bit // 8] ^= 1 << bit % 8
    try_decode(bytes(message))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.heavy
@UNHURRIED
@given(VALUES, st.data())
def test_decode_field_of_another_kind_raises_only_value_error(value, data):
    """Reaches deeper than random bytes: a well-formed message with one wrong value in it."""

    def put_junk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and data.draw(st.booleans()):
            put_junk(node[key])
        else:
            node[key] = data.draw(JUNK)

    try_decode(change(codec.encode(value), put_junk))


def nested(body: dict, path: tuple) -> dict:
    for step in path:
        body = body[step]
    return body


@pytest.mark.parametrize("path", [(), ("task",), ("sampling",), ("min_version",)])
def test_decode_unknown_field_refused(path):
    data = codec.encode(make_ticket())
    with pytest.raises(ValueError, match="unknown field"):
        codec.decode(Ticket, change(data, lambda body: nested(body, path).update(new=1)))


@pytest.mark.parametrize(
    ("path", "field"),
    [((), "id"), (("task",), "metadata"), (("sampling",), "top_k"), (("min_version",), "step")],
)
def test_decode_missing_field_refused_even_with_a_default(path, field):
    data = codec.encode(make_ticket())
    with pytest.raises(ValueError, match="missing required field"):
        codec.decode(Ticket, change(data, lambda body: nested(body, path).pop(field)))


def test_decode_optional_and_repeated_parts_are_strict_too():
    beat = Heartbeat(process="p", role="actor", pid=1, time_s=0.0, version=Version(incarnation=0, step=1))
    with pytest.raises(ValueError, match="unknown field"):
        codec.decode(Heartbeat, change(codec.encode(beat), lambda body: body["version"].update(new=1)))
    beat = dataclasses.replace(beat, report=make_report())
    with pytest.raises(ValueError, match="missing required field `pause_s`"):
        codec.decode(Heartbeat, change(codec.encode(beat), lambda body: body["report"].pop("pause_s")))
    row = {"num_steps": 1, "num_tokens": 1, "seconds": 1.0}
    for rows in ([row] * (MAX_SPEEDS + 1), [row | {"seconds": -1.0}], [row | {"num_tokens": -1}]):
        with pytest.raises(ValueError, match="malformed Heartbeat"):
            codec.decode(
                Heartbeat, change(codec.encode(beat), lambda body, rows=rows: body["report"].update(decode_speeds=rows))
            )
    group = codec.encode(make_group(make_ticket()))
    with pytest.raises(ValueError, match="unknown field"):
        codec.decode(Group, change(group, lambda body: body["rollouts"][1].update(new=1)))


def test_decode_runs_the_types_own_checks():
    data = codec.encode(make_group(make_ticket()))
    nan = np.full(3, np.nan, np.float32).tobytes()

    def spoil(body):
        body["rollouts"][0]["behavior_logprobs"][1] = nan

    with pytest.raises(ValueError, match="finite"):
        codec.decode(Group, change(data, spoil))


def test_decode_other_format_or_type_refused():
    format_, name, body = msgspec.msgpack.decode(codec.encode(make_ticket()))
    with pytest.raises(ValueError, match="Ticket: expected format 14, got 13. Another build made it"):
        codec.decode(Ticket, msgspec.msgpack.encode([format_ - 1, name, body]))
    with pytest.raises(ValueError, match="expected a Group, got a 'Ticket'"):
        codec.decode(Group, codec.encode(make_ticket()))
    with pytest.raises(ValueError, match="wire type: expected one of"):
        codec.decode(Rollout, b"")  # pyright: ignore[reportArgumentType]


def test_answers_travel_and_a_long_one_is_refused():
    for answer in (None, "", "12"):
        score = RewardScore(name="math", value=0.5, verdict="ok", answer=answer)
        group = make_group(make_ticket(num_samples=1), rollouts=(make_rollout(scores=(score,)),))
        assert codec.decode(Group, codec.encode(group)).rollouts[0].scores[0].answer == answer
    with pytest.raises(ValueError, match="at most 200 characters"):
        RewardScore(name="math", value=0.5, verdict="ok", answer="x" * 201)


def test_score_of_an_unknown_verdict_is_refused():
    with pytest.raises(ValueError, match="verdict"):
        RewardScore(name="math", value=0.5, verdict="fine")  # pyright: ignore[reportArgumentType]
