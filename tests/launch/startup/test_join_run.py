"""Joining a run by its store: a real store, a card as a learner puts it, and no engine."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from actor.weights.model_folder import describe
from bridge import weight_types
from bridge.credentials import Token
from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_format import sign
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.group_blobs import GroupBlobs
from bridge.store.open import FinishedRunError, NoRunError, SqliteStore
from bridge.store.sqlite_database import since_boot_s
from bridge.store.store_types import NAME_LEASE_S, NameTakenError
from bridge.weight_types import Announcement, CardFile, RunCard, TensorEntry
from configs import overrides
from configs.run_folder import RunFolder, run_id, set_up_run
from configs.schema import Config
from configs.sections import PromptsConfig, PublishConfig, RunConfig, StoreConfig
from launch.startup import join_run
from tests.bridge.snapshots.whole import write_whole

TOKEN, OTHER = "a" * 40, "b" * 40
TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}).encode()
FILES = {"config.json": b"{}", "tokenizer.json": TOKENIZER}


class Place:
    """A run in a store, and a machine that shares only the store with it."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.path = root / "learner" / "store.sqlite"
        self.store = SqliteStore(self.path)
        self.config = Config(
            preset="test", run=RunConfig(name="trial"), publish=PublishConfig(snapshot_dir="/of/the/learner")
        )

    def raw_config(self) -> dict[str, Any]:
        return json.loads(overrides.to_json(self.config))

    @property
    def url(self) -> str:
        return f"sqlite:///{self.root}/learner/store.sqlite"

    def put_run_card(self, of: Config | None = None, **fields: Any) -> None:
        values: dict[str, Any] = {
            "run": "abc123",
            "name": "trial",
            "config": overrides.to_json(of or self.config),
            "files": tuple(CardFile(name=n, num_bytes=len(d), blake3=blake3(d).hexdigest()) for n, d in FILES.items()),
            "tensors": (TensorEntry(name="w", dtype="float32", shape=(4,), offset_bytes=0, num_bytes=16),),
            "sluice": weight_types.SLUICE,
            "vllm": weight_types.VLLM,
        }
        self.store.put_run_card(RunCard(**(values | fields)), {blake3(d).hexdigest(): d for d in FILES.values()})

    def announce(
        self,
        *,
        token: str | None = TOKEN,
        sources: tuple[str, ...] = ("https://learner:1/v",),
        forge: Callable[[Announcement], Announcement] = lambda announcement: announcement,
        **fields: Any,
    ):
        values: dict[str, Any] = {"run": "abc123", "tokenizer_hash": blake3(TOKENIZER).hexdigest()} | fields
        writer = SnapshotWriter(
            self.root / "snapshots",
            **values,
            token=(key := Token(token) if token else None),
        )
        manifest = write_whole(writer, Version(incarnation=0, step=0), {"w": np.zeros(4, np.float32)}, dtype="float32")
        writer.close()
        announcement = Announcement(manifest=manifest, sources=sources)
        self.store.announce(forge(sign(announcement, key) if key else announcement))

    @contextlib.contextmanager
    def join(self, name: str = "far-1", **arguments: Any):
        given = {
            "given": {},
            "allowed_modules": (),
            "work_dir": str(self.root / "work" / name),
            "memory": str(self.root / "shm"),
            "wait_s": 0.0,
            "on_wait": lambda: None,
        }
        joined = join_run.join_store(self.url, "trial", name, **(given | arguments))
        with joined.parts:
            yield joined


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SLUICE_TOKEN", TOKEN)
    monkeypatch.delenv("SLUICE_TOKEN_FILE", raising=False)
    monkeypatch.setattr(join_run, "installed_vllm", lambda: f"{weight_types.VLLM}+cpu")
    (tmp_path / "shm").mkdir()
    place = Place(tmp_path)
    yield place
    place.store.close()


def test_all_that_an_actor_needs_comes_from_the_store(place):
    place.put_run_card()
    place.announce()
    with place.join(given={"actor.max_num_seqs": "3"}) as joined:
        assert joined.run == "abc123"
        assert joined.config.actor.max_num_seqs == 3
        assert joined.config.rounds == place.config.rounds
        assert joined.config.publish.snapshot_dir == ""  # a folder of the learner's machine
        assert joined.model.tensors == {"w": ("float32", (4,))}
        assert joined.model.path.is_relative_to(place.root / "cache")
        assert {f.name: f.read_bytes() for f in joined.model.path.iterdir()} == FILES
        assert joined.work.path == place.root / "work" / "far-1"
        assert joined.store.claim("far-1", limit=1, lease_s=1) == []


def test_run_that_has_no_card_in_time_is_waited_for_no_longer(place):
    with pytest.raises(TimeoutError, match="timed out waiting for the run descriptor of run trial"), place.join():
        pass


def test_store_that_is_not_there_is_not_made(place, tmp_path):
    with pytest.raises(NoRunError, match="store .* does not exist"):
        join_run.join_store(
            f"sqlite:///{tmp_path}/none/store.sqlite",
            "trial",
            "far-1",
            given={},
            allowed_modules=(),
            work_dir=None,
            memory=str(tmp_path),
            wait_s=0.0,
            on_wait=lambda: None,
        )
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"sluice": "9.9.9"}, "requires Sluice 9.9.9, got"),
        ({"vllm": "9.9.9"}, "requires vLLM 9.9.9, got"),
        ({"config": "{"}, "config of run trial: cannot be read"),
        ({"config": "[" * 100_000}, "config of run trial: cannot be read, nested too deeply"),
        ({"config": '{"a":' * 3_000 + "1" + "}" * 3_000}, "config of run trial: cannot be read"),
        ({"config": "[]"}, "config of run trial: cannot be read: expected a JSON object"),
        ({"config": '{"preset": "x", "run": 1}'}, "config of run trial: cannot be read"),
        ({"config": '{"preset": "x", "engine": {"of": "a later build"}}'}, "config has no field"),
    ],
)
def test_run_of_another_build_is_refused(place, card, said):
    place.put_run_card(**card)
    with pytest.raises(ValueError, match=said), place.join():
        pass


def test_override_that_is_not_the_actors_is_refused(place):
    place.put_run_card()
    said = "--config.sampling.temperature: expected a field of"
    with pytest.raises(ValueError, match=said), place.join(given={"sampling.temperature": "0.5"}):
        pass


def test_module_that_the_runs_config_names_is_imported_only_where_it_is_allowed(place):
    place.put_run_card(dataclasses.replace(place.config, prompts=PromptsConfig(verifier="theirs:score")))
    with pytest.raises(ValueError, match="--allow_module=theirs:score"), place.join():
        pass
    with pytest.raises(ValueError, match="--allow_module=theirs:score"), place.join(allowed_modules=("theirs:other",)):
        pass
    with place.join(allowed_modules=("theirs:score",)) as joined:
        assert joined.config.custom_verifiers == ("theirs:score",)


@pytest.mark.parametrize(
    ("announced", "said"),
    [
        ({"token": OTHER}, "signed"),
        ({"token": None}, "signed"),
        ({"tokenizer_hash": "another"}, "tokenizer"),
        ({"run": "another"}, "run"),
        ({"sources": ()}, "only in its learner's memory"),
    ],
)
def test_weights_that_could_never_be_served_here_are_refused_before_an_engine_starts(place, announced, said):
    place.put_run_card()
    place.announce(**announced)
    with pytest.raises(ValueError, match=said) as caught, place.join():
        pass
    assert TOKEN not in str(caught.value) and OTHER not in str(caught.value)


def test_weights_from_before_the_learner_was_restarted_with_a_server_are_no_reason_to_refuse(place):
    publish = dataclasses.replace(place.config.publish, serve="https", advertise="https://learner:1")
    place.put_run_card(dataclasses.replace(place.config, publish=publish))
    place.announce(sources=())
    with place.join():
        pass


def test_weights_of_the_token_before_the_learner_was_restarted_are_no_reason_to_refuse(place):
    place.put_run_card()
    place.announce(token=OTHER)
    for _ in range(2):  # incarnations 0 and 1
        place.store.acquire_leadership("learner", lease_s=60)
    with place.join():
        pass


@pytest.mark.parametrize("source", ["https://learner.example:1/v", "s3://bucket/v", "https://127.0.0.1.example/v"])
def test_run_with_weights_elsewhere_is_refused_without_its_token(place, monkeypatch, source):
    monkeypatch.delenv("SLUICE_TOKEN")
    place.put_run_card()
    place.announce(token=None, sources=("https://127.0.0.1:1/v", source))
    with pytest.raises(ValueError, match="set SLUICE_TOKEN_FILE") as caught, place.join():
        pass
    assert len(str(caught.value).splitlines()) == 1 and source in str(caught.value)


def test_run_with_weights_on_this_machine_needs_no_token(place, monkeypatch):
    monkeypatch.delenv("SLUICE_TOKEN")
    place.put_run_card()
    place.announce(token=None, sources=("http://127.0.0.1:1/v", "https://[::1]:1/v", "file:///bucket/v"))
    with place.join():
        pass


def test_sources_that_another_added_are_refused(place):
    place.put_run_card()
    place.announce(forge=lambda a: dataclasses.replace(a, sources=("https://theirs:1/v", *a.sources)))
    with pytest.raises(ValueError, match="announcement of version 0:0 was not signed with this actor's"), place.join():
        pass


@pytest.mark.parametrize("id_", ["../../home", "a/b", "", ".ssh", "a\nb"])
def test_id_that_the_store_gives_a_run_and_that_leads_elsewhere_is_refused(place, monkeypatch, id_):
    place.put_run_card()
    monkeypatch.setattr(join_run, "find_run", lambda *_, **__: id_)
    with pytest.raises(ValueError, match="the store returned the invalid id") as caught, place.join(work_dir=None):
        pass
    assert len(str(caught.value).splitlines()) == 1 and not (place.root / "cache").exists()


def test_id_of_a_card_that_leads_elsewhere_is_refused(place):
    place.put_run_card(run="../../home")
    with pytest.raises(ValueError, match="the store returned the invalid id"), place.join():
        pass


def test_name_of_a_live_actor_elsewhere_is_refused_and_a_dead_ones_is_taken_when_its_lease_ends(place, monkeypatch):
    place.put_run_card()
    beat = Heartbeat(process="far-1", role="actor", pid=1, time_s=0.0)
    place.store.register_actor(beat, location="elsewhere")
    now_s, slept = [since_boot_s()], []
    monkeypatch.setattr(join_run, "open_store", lambda *_, **__: SqliteStore(place.path, clock=lambda: now_s[0]))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds
        if len(slept) == 2:
            place.store.heartbeat(beat)

    monkeypatch.setattr(join_run.time, "sleep", sleep)
    with pytest.raises(NameTakenError, match="far-1, at elsewhere; give another --name"), place.join():
        pass
    assert len(slept) == 2
    with place.join() as joined:
        assert NAME_LEASE_S - 1 <= len(slept) - 2 <= NAME_LEASE_S + 1
        with pytest.raises(NameTakenError):
            place.store.heartbeat(beat)  # it was only away
        joined.store.close()
    place.store.register_actor(beat, location="elsewhere")  # who left in order keeps nobody waiting


@pytest.mark.heavy
def test_second_actor_of_a_name_on_this_machine_is_refused(place):
    place.put_run_card()
    with place.join(), pytest.raises(ValueError, match="used by a live actor far-1; set another --name"), place.join():
        pass


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a+b", "a b", ".a"])
def test_name_that_is_none_is_refused(place, name):
    place.put_run_card()
    with pytest.raises(ValueError, match="--name must be"), place.join(name):
        pass


def test_actor_beside_its_learner_waits_until_the_learner_has_made_the_run_in_the_database(tmp_path, monkeypatch):
    config = Config(
        preset="test",
        run=RunConfig(dir=str(tmp_path / "run")),
        publish=PublishConfig(snapshot_dir=str(tmp_path)),
        store=StoreConfig(url="postgresql://learner@127.0.0.1/sluice"),
    )
    folder = set_up_run(config)
    RunFolder(folder).model_path_file.write_text("model\n")
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    monkeypatch.setattr(join_run, "read_model_folder", lambda *_, **__: describe(tmp_path, {}))
    monkeypatch.setattr(join_run, "_CARD_POLL_S", 0.01)
    asked: list[str] = []

    def find_run(url: str, run: str, **_: Any) -> str:
        asked.append(run)
        if len(asked) < 3:
            raise NoRunError("the store has no such run")
        return run

    def open_store(url: str, *, run: str, **_: Any) -> SqliteStore:
        assert len(asked) == 3 and url == config.store.url
        return SqliteStore(tmp_path / "stands in for it")

    monkeypatch.setattr(join_run, "find_run", find_run)
    monkeypatch.setattr(join_run, "open_store", open_store)
    with join_run.join_folder(str(folder), "actor-0", wait_s=30.0, on_wait=lambda: None).parts:
        assert asked == [run_id(folder)] * 3


def test_actor_that_is_started_before_its_learner_waits_for_it_rather_than_join_a_finished_run(place, monkeypatch):
    place.put_run_card()
    place.store.acquire_leadership("here", lease_s=30)
    place.store.finish(7)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            place.store.acquire_leadership("here", lease_s=30)  # a learner goes on with it

    monkeypatch.setattr(join_run.time, "sleep", sleep)
    with pytest.raises(FinishedRunError, match="run trial is finished, at step 7"), place.join():
        pass
    assert slept == []
    waits: list[int] = []
    with place.join(wait_forever=True, on_wait=lambda: waits.append(len(slept))) as joined:
        assert len(slept) == 3 and joined.store.finished() is None
    assert waits == [0, 1, 2], "whoever watches it is told each time that it waits"


@pytest.mark.parametrize("is_shared", [True, False])
def test_actor_whose_bucket_is_not_the_learners_is_refused_before_an_engine_starts(place, tmp_path, is_shared):
    url = (tmp_path / "bucket").as_uri()
    of_the_learner = url if is_shared else (tmp_path / "of-the-learners-machine").as_uri()
    place.store.use_bucket(GroupBlobs(of_the_learner, run="abc123", max_bytes=1000), inline_bytes=100)
    place.put_run_card(dataclasses.replace(place.config, store=StoreConfig(bucket=url)))
    if is_shared:
        with place.join() as joined:
            assert joined.config.store.bucket == url
        return
    with (
        pytest.raises(ValueError, match=f"store.bucket={url} is not the learner's bucket on this machine"),
        place.join(),
    ):
        pass


def test_actor_that_ends_well_leaves_nothing_in_the_cache_and_one_that_fails_what_it_wrote(place):
    place.put_run_card()
    for is_done in (False, True):
        with place.join(work_dir=None) as joined:
            assert joined.work.path.is_relative_to(place.root / "cache") and joined.model.path.is_dir()
            (joined.work.path / "note").write_text("x")
            if is_done:
                joined.done()
        assert joined.work.path.exists() == (not is_done)
        assert not joined.model.path.exists()
    assert not [p for p in (place.root / "cache").rglob("*") if p.is_file()]
