"""Hostile messages: whatever bytes arrive, `decode` gives a valid value or a ValueError, in bounded memory and time."""

import copy
import functools
import io
import os
import pickle
import random
import resource
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from bridge import codec
from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Group, Ticket, Version
from bridge.weight_types import Announcement, CardFile, DeltaEntry, FileEntry, RunCard, TensorEntry, WeightManifest
from tests.bridge.factories import as_plain, make_group, make_progress, make_report, make_ticket, one_piece

NUM_MESSAGES = 10_000
VERSION = Version(incarnation=1, step=7)
TENSORS = tuple(
    TensorEntry(name=f"model.{i}.weight", dtype="bfloat16", shape=(4, 8), offset_bytes=64 * i, num_bytes=64)
    for i in range(3)
)
MANIFEST = WeightManifest(
    run="r",
    version=VERSION,
    tensors=TENSORS,
    shards=one_piece(
        TENSORS,
        FileEntry(name="slot-0", num_bytes=192, chunk_bytes=64, chunk_hashes=bytes(96), blake3="ab" * 32),
        DeltaEntry(base_version=VERSION, codec="zstd", name="delta", chunk_ends=(0, 5, 9)),
    ),
    tokenizer_hash="cd" * 32,
    hmac="ef" * 32,
    created_s=3.5,
)
TICKET = make_ticket()
SEEDS = (
    TICKET,
    make_group(TICKET),
    MANIFEST,
    Heartbeat(process="a", role="actor", pid=1, time_s=1.0, version=VERSION, report=make_report()),
    Announcement(
        manifest=MANIFEST,
        sources=("https://learner.example:8443/v", "file:///f"),
        host_sources=(("https://learner.example:8444/v",),),
        hmac="ab" * 32,
    ),
    RunCard(
        run="r",
        name="n",
        config='{"a": 1}',
        files=(CardFile(name="config.json", num_bytes=2, blake3="ab" * 32),),
        tensors=TENSORS,
        sluice="1",
        vllm="0",
    ),
    make_progress(TICKET.id, 0, 1),
)
"""One message of every wire type, with every optional part."""


class Gadget:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (66,)


PICKLE = pickle.dumps([Gadget()])
EXTREMES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    "0",
    "../../etc/passwd",
    "\x00",
    "\x1b[2J\n",
    "x" * 5000,
    "\n\x1b[2J" * 5000,
    b"",
    b"\xff" * 37,
    PICKLE,
    [],
    [[]],
    {},
    {"": None},
    ["<i4", b"\x00" * 7],
    ["|O", b"\x00" * 8],
    ["<i4", PICKLE],
    msgspec.msgpack.Ext(1, PICKLE),
)


def _spots(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a message."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [p for key in keys for p in ((*path, key), *_spots(node[key], (*path, key)))]


def _mutate(rng: random.Random, message: Any) -> None:
    """Changes one value anywhere: put another in its place, leave it out, double it, exchange it with a second one."""
    path, other = rng.choices(_spots(message), k=2)
    parent = functools.reduce(lambda node, key: node[key], path[:-1], message)
    kind = rng.randrange(4)
    if kind == 0:
        parent[path[-1]] = copy.deepcopy(rng.choice(EXTREMES))
    elif kind == 1:
        del parent[path[-1]]
    elif kind == 2 and isinstance(parent, list):
        parent.extend(copy.deepcopy(parent[path[-1]]) for _ in range(rng.choice((1, 2, 300))))
    elif kind == 2:
        parent[rng.choice(("new", "", "__class__", path[-1]))] = copy.deepcopy(parent[path[-1]])
    elif other[: len(path)] != path and path[: len(other)] != other:
        second = functools.reduce(lambda node, key: node[key], other[:-1], message)
        parent[path[-1]], second[other[-1]] = second[other[-1]], parent[path[-1]]


def _break_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flips bits, cuts, repeats or overwrites a stretch; or bytes that never were a message."""
    kind = rng.randrange(5)
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == 0:
        bits = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            bit = rng.randrange(8 * len(bits))
            bits[bit // 8] ^= 1 << bit % 8
        return bytes(bits)
    if kind == 1:
        return data[:start] + data[end:]
    if kind == 2:
        return data[:end] + data[start:end] * rng.randint(1, 20) + data[end:]
    if kind == 3:
        return data[:start] + rng.randbytes(end - start) + data[end:]
    return rng.choice((rng.randbytes(rng.randint(0, 300)), PICKLE, data[:start] + PICKLE))


def _hostile(rng: random.Random) -> tuple[type, bytes]:
    seed = rng.choice(SEEDS)
    message = msgspec.msgpack.decode(codec.encode(seed))
    for _ in range(rng.randint(1, 3)):
        if message and _spots(message):
            _mutate(rng, message)
    data = msgspec.msgpack.encode(message)
    return type(seed), _break_bytes(rng, data) if rng.random() < 0.4 else data


@pytest.mark.heavy
def test_decode_10000_fuzzed_messages_gives_a_valid_equal_value_or_a_value_error():
    """10,000 fuzzed messages over all wire types | ValueError, or a value that is valid and travels on as it is"""
    rng = random.Random(20261122)
    taken: dict[str, int] = {t.__name__: 0 for t in codec.TYPES}
    refused = dict(taken)
    for _ in range(NUM_MESSAGES):
        type_, data = _hostile(rng)
        try:
            value = codec.decode(type_, data)
        except ValueError as e:
            refused[type_.__name__] += 1
            assert len(str(e)) < 2500 and str(e).isprintable(), "an error repeats what a hostile message holds"
            continue
        taken[type_.__name__] += 1
        assert as_plain(codec.decode(type_, codec.encode(value))) == as_plain(value)
    assert sum(taken.values()) + sum(refused.values()) == NUM_MESSAGES
    assert min(taken.values()) > 20 and min(refused.values()) > 500, (taken, refused)  # both ways are reached, for all


def edited(value: Any, edit: Callable[[Any], object]) -> bytes:
    """A value's message with `edit` applied to its body, without the checks of the type."""
    format_, name, body = msgspec.msgpack.decode(codec.encode(value))
    edit(body)
    return msgspec.msgpack.encode([format_, name, body])


def _tiny_rollout(body: Any) -> Any:
    arrays = {key: [dtype, data[: 1 if dtype == "|b1" else 4]] for key, (dtype, data) in _arrays(body).items()}
    return body["rollouts"][0] | arrays


def _arrays(body: Any) -> dict[str, Any]:
    lists = {k: v for k, v in body["rollouts"][0].items() if isinstance(v, list)}
    return {k: v for k, v in lists.items() if len(v) == 2 and isinstance(v[1], bytes)}


HUGE = codec.MAX_BYTES - 2**20
BOMBS: dict[str, tuple[type, Callable[[], bytes]]] = {
    "claims four billion entries": (Ticket, lambda: b"\x93\x02\xa6Ticket\xdf\xff\xff\xff\xff"),
    "claims four gigabytes": (Group, lambda: b"\x93\x02\xa5Group\xc6\xff\xff\xff\xff"),
    "claims four billion elements": (Group, lambda: b"\x93\x02\xa5Group\x81\xa8rollouts\xdd\xff\xff\xff\xff"),
    "lists in lists": (Ticket, lambda: b"\x93\x02\xa6Ticket" + b"\x91" * HUGE),
    "maps in maps": (Ticket, lambda: b"\x93\x02\xa6Ticket" + b"\x81\xa1a" * (HUGE // 3)),
    "lists in an array": (Ticket, lambda: edited(TICKET, lambda b: b.update(prompt_tokens=_nested(900)))),
    "rollouts": (Group, lambda: edited(SEEDS[1], lambda b: b.update(rollouts=[_tiny_rollout(b)] * 350_000))),
    "stop tokens": (Ticket, lambda: edited(TICKET, lambda b: b["sampling"].update(stop_token_ids=[1] * HUGE))),
    "tensors": (WeightManifest, lambda: edited(MANIFEST, lambda b: b.update(tensors=b["tensors"][:1] * 800_000))),
    "dimensions": (
        WeightManifest,
        lambda: edited(MANIFEST, lambda b: b["tensors"][0].update(shape=[2**62] * 7_000_000)),
    ),
    "delta's chunks": (
        WeightManifest,
        lambda: edited(MANIFEST, lambda b: b["shards"][0]["delta"].update(chunk_ends=[9] * HUGE)),
    ),
    "pieces": (WeightManifest, lambda: edited(MANIFEST, lambda b: b.update(shards=b["shards"] * 100_000))),
    "blocks": (
        WeightManifest,
        lambda: edited(MANIFEST, lambda b: b["shards"][0].update(blocks=b["shards"][0]["blocks"] * 700_000)),
    ),
    "sources": (Announcement, lambda: edited(SEEDS[4], lambda b: b.update(sources=["s3://b"] * 9_000_000))),
    "hosts' sources": (
        Announcement,
        lambda: edited(SEEDS[4], lambda b: b.update(host_sources=[["s3://b"]] * 8_000_000)),
    ),
    "card's files": (RunCard, lambda: edited(SEEDS[5], lambda b: b.update(files=b["files"] * 700_000))),
}


def _nested(depth: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


def _survives(type_: type, data: bytes) -> int:
    """Decodes in a child that may use 64 MiB beyond what it has, and 5 s of processor; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 64 * 2**20, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (5, 6))
        try:
            codec.decode(type_, data)
        except ValueError:
            os._exit(0)
        except BaseException:
            os._exit(1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.heavy
@pytest.mark.parametrize("bomb", BOMBS)
def test_decode_message_that_would_grow_refused_in_bounded_memory_and_time(bomb):
    """A message within the size limit that would become gigabytes, or take minutes | refused before it is unpacked"""
    type_, make = BOMBS[bomb]
    assert _survives(type_, make()) == 0


@pytest.mark.parametrize("payload", [PICKLE, b"\x80\x05.", pickle.dumps(Version(incarnation=0, step=0), protocol=0)])
@pytest.mark.parametrize("type_", codec.TYPES, ids=lambda t: t.__name__)
def test_decode_pickle_refused_and_not_run(type_, payload):
    """A pickle as a message | refused as malformed; nothing of it runs"""
    with pytest.raises(ValueError, match=f"malformed {type_.__name__} message"):
        codec.decode(type_, payload)


def test_decode_array_of_objects_refused_and_not_run():
    """A pickle as an array's bytes (numpy's object arrays) | only three dtypes travel, none of objects"""
    objects = io.BytesIO()
    np.save(objects, np.array([Gadget()], object), allow_pickle=True)
    for array in (["|O", PICKLE], ["O", objects.getvalue()], ["<i4,O", PICKLE]):
        with pytest.raises(ValueError, match="dtype must be one of"):
            codec.decode(Ticket, edited(TICKET, lambda body, array=array: body.update(prompt_tokens=array)))


def test_decode_oversized_message_refused_before_it_is_read():
    """A message over 64 MiB | refused by its size"""
    with pytest.raises(ValueError, match=f"at most {codec.MAX_BYTES}"):
        codec.decode(Group, bytes(codec.MAX_BYTES + 1))
