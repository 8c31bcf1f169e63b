"""Groups as objects of a bucket: a folder, and S3 as moto serves it."""

import datetime
import logging as stdlib_logging
import os
import pathlib
import random
import urllib.request
import uuid
from collections.abc import Callable, Generator

import obstore
import pytest

from bridge.object_store import open_source
from bridge.store.group_blobs import BadBlobError, BlobReference, GroupBlobs
from bridge.store.store_types import StoreLostError

MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def s3() -> Generator[str]:
    """An S3 of this machine; its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    stdlib_logging.getLogger("werkzeug").setLevel(stdlib_logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.heavy)])
def bucket(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket."""
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    endpoint = request.getfixturevalue("s3")
    settings = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "REGION": "us-east-1"}
    for name, value in (settings | {"ALLOW_HTTP": "true", "VIRTUAL_HOSTED_STYLE_REQUEST": "false"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")) as answer:
        assert answer.status == 200
    return f"s3://{name}/sluice"


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def make(bucket: str, *, run: str = "run-1", retry_s: float = 600.0, clock: Clock | None = None) -> GroupBlobs:
    clock = clock or Clock()
    return GroupBlobs(bucket, run=run, max_bytes=MAX_BYTES, retry_s=retry_s, clock=clock, sleep=clock.sleep)


def names(bucket: str) -> set[str]:
    """The objects of a bucket, as another client lists them."""
    found = {entry["path"] for chunk in open_source(bucket).list() for entry in chunk}
    return {path for path in found if not path.endswith(".clock")}


def age(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Lets the bucket's time be so much later than it is, as `GroupBlobs` reads it."""
    real: Callable = obstore.head

    def head(place, path):
        meta = dict(real(place, path))
        return meta | {"last_modified": meta["last_modified"] + datetime.timedelta(seconds=seconds)}

    monkeypatch.setattr(obstore, "head", head)


def test_object_that_was_put_is_fetched_whatever_the_ticket_is_called(bucket):
    objects = make(bucket, run="a/../b: c")
    sent = {f"../{i}/\N{BEER MUG}\n": random.Random(i).randbytes(1000 * i) for i in range(4)}
    rows = [(ticket, str(objects.put(ticket, message))) for ticket, message in sent.items()]
    assert make(bucket, run="a/../b: c").fetch_all(rows) == list(sent.values())
    assert {path.rpartition("/")[0] for path in names(bucket)} == {"groups/a%2F..%2Fb%3A%20c"}


def test_same_group_put_twice_is_two_objects(bucket):
    objects = make(bucket)
    first, second = objects.put("t", b"x"), objects.put("t", b"x")
    objects.delete([("t", str(first))])
    assert objects.fetch("t", str(second)) == b"x"


def test_deleted_objects_are_gone_and_deleting_again_is_fine(bucket):
    objects = make(bucket)
    rows = [(f"t{i}", str(objects.put(f"t{i}", b"x"))) for i in range(20)]
    objects.delete(rows[:15])
    objects.delete(rows[:15])
    assert [isinstance(m, BadBlobError) for m in objects.fetch_all(rows)] == [True] * 15 + [False] * 5
    assert len(names(bucket)) == 5


def test_reference_of_one_ticket_does_not_lead_to_anothers_object(bucket):
    objects = make(bucket)
    reference = str(objects.put("theirs", b"x"))
    with pytest.raises(BadBlobError, match="ticket mine: its object is not in"):
        objects.fetch("mine", reference)
    objects.delete([("mine", reference)])
    assert objects.fetch("theirs", reference) == b"x"


def test_object_that_was_replaced_is_refused_by_size_before_it_is_read_or_by_hash(bucket, monkeypatch):
    objects = make(bucket)
    reference = objects.put("t", b"0123456789")
    (path,) = names(bucket)
    obstore.put(open_source(bucket), path, b"0123456780")
    with pytest.raises(BadBlobError, match=r"ticket t: .* its content differs from what was stored"):
        objects.fetch("t", str(reference))
    obstore.put(open_source(bucket), path, b"x" * MAX_BYTES)

    def get(place, path):
        result = real(place, path)
        return type("Unread", (), {"meta": result.meta})()

    real = obstore.get
    monkeypatch.setattr(obstore, "get", get)
    with pytest.raises(BadBlobError, match=f"expected 10 bytes, got {MAX_BYTES}"):
        objects.fetch("t", str(reference))
    assert objects.counts["bad"] == 2


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "x",
        "../" * 10,
        f"{'0' * 32}:5",
        f"{'0' * 32}:-5:{'0' * 64}",
        f"{'0' * 31}/:5:{'0' * 64}",
        f"{'0' * 32}:5:{'0' * 64}\n",
        f"{'0' * 32}:{'9' * 13}:{'0' * 64}",
    ],
)
def test_reference_of_another_form_is_refused(tmp_path, reference):
    with pytest.raises(BadBlobError, match="expected nonce:bytes:blake3"):
        make(f"file://{tmp_path}").fetch("t", reference)


def test_reference_to_more_than_is_taken_is_refused_without_a_look(tmp_path):
    reference = str(BlobReference("0" * 32, MAX_BYTES + 1, "0" * 64))
    with pytest.raises(BadBlobError, match="at most 100000 bytes, got 100001"):
        make(f"file://{tmp_path}").fetch("t", reference)
    with pytest.raises(ValueError, match="a group must have at most 100000 bytes, got 100001"):
        make(f"file://{tmp_path}").put("t", bytes(MAX_BYTES + 1))


def test_sweep_deletes_what_is_old_and_not_referred_to_and_nothing_else(bucket, monkeypatch):
    objects, other_run = make(bucket), make(bucket, run="run-12")
    kept = [(f"t{i}", str(objects.put(f"t{i}", b"x"))) for i in range(3)]
    for i in range(4):
        objects.put(f"t{i}", b"an orphan")
    other_run.put("t0", b"another run's orphan")
    asked: list[str] = []
    assert objects.sweep(lambda: asked.append("young") or kept) == 0
    age(monkeypatch, objects.min_age_s + 5)
    assert objects.sweep(lambda: asked.append("old") or kept) == 4
    assert asked == ["old"]
    assert objects.fetch_all(kept) == [b"x"] * 3
    assert len(names(bucket)) == 4
    assert objects.sweep(lambda: kept) == 0


def test_sweep_spares_what_gets_its_row_while_the_bucket_is_listed(bucket, monkeypatch):
    objects = make(bucket)
    row = ("t", str(objects.put("t", b"x")))
    age(monkeypatch, objects.min_age_s + 5)
    assert objects.sweep(lambda: [row]) == 0  # asked after the listing, so the row is there
    assert objects.fetch(*row) == b"x"


def test_what_is_still_tried_again_is_too_young_to_be_swept(tmp_path):
    objects = make(f"file://{tmp_path}", retry_s=100.0)
    assert objects.min_age_s > 2 * 100.0


def test_bucket_that_comes_back_is_asked_again(tmp_path, monkeypatch):
    clock = Clock()
    objects = make(f"file://{tmp_path}", clock=clock)
    reference = str(objects.put("t", b"x"))
    real, failures = obstore.get, iter(range(7))

    def get(place, path):
        if next(failures, None) is not None:
            raise obstore.exceptions.GenericError("connection refused")
        return real(place, path)

    monkeypatch.setattr(obstore, "get", get)
    assert objects.fetch("t", reference) == b"x"
    assert 5.0 < clock.now_s < 30.0


def test_bucket_that_stays_away_is_given_up_after_retry_s(tmp_path, monkeypatch):
    clock = Clock()
    objects = make(f"file://{tmp_path}", retry_s=60.0, clock=clock)

    def put(*args):
        raise obstore.exceptions.GenericError("connection refused\n\nDebug source: ...")

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(
        StoreLostError, match=r"could not be reached for 60 s \(put groups/run-1/.*\): connection refus"
    ):
        objects.put("t", b"x")
    assert 50.0 < clock.now_s <= 60.0


def test_bucket_that_refuses_is_not_asked_again(tmp_path, monkeypatch):
    clock = Clock()
    objects = make(f"file://{tmp_path}", clock=clock)

    def put(*args):
        raise obstore.exceptions.PermissionDeniedError("no rights")

    monkeypatch.setattr(obstore, "put", put)
    with pytest.raises(ValueError, match=r"permission denied to put .*: no rights"):
        objects.put("t", b"x")
    assert clock.now_s == 0.0


def test_what_cannot_be_deleted_is_left_to_the_sweep(tmp_path, monkeypatch):
    objects = make(f"file://{tmp_path}")
    row = ("t", str(objects.put("t", b"x")))

    def delete(*args):
        raise obstore.exceptions.GenericError("connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(obstore, "delete", delete)
        objects.delete([row])
    age(monkeypatch, objects.min_age_s + 5)
    assert objects.sweep(lambda: []) == 1


@pytest.mark.parametrize("url", ["https://example.org/x", "http://127.0.0.1/x"])
def test_place_that_cannot_be_written_to_is_refused(url):
    with pytest.raises(ValueError, match=r"store.bucket: expected s3://"):
        make(url)


def test_bucket_that_the_learner_marked_is_told_from_any_other(bucket: str, tmp_path: pathlib.Path):
    learner, actor = make(bucket), make(bucket)
    with pytest.raises(
        ValueError, match=r"is not the learner's bucket on this machine .*Use one bucket on all machines"
    ):
        actor.check_mark()
    learner.mark()
    actor.check_mark()
    for other in (make(bucket, run="run-2"), make(f"file://{tmp_path}/another")):
        with pytest.raises(ValueError, match="not the learner's bucket"):
            other.check_mark()


def test_mark_of_a_bucket_is_not_swept(tmp_path: pathlib.Path):
    objects = make(f"file://{tmp_path}/bucket", retry_s=0.0)
    objects.mark()
    for file in (tmp_path / "bucket").rglob(".run"):
        os.utime(file, (0, 0))
    assert objects.sweep(lambda: []) == 0
    objects.check_mark()
