"""What a restart checks of a checkpoint, and anchors: from a store, through JSON, into one that lacks them."""

import contextlib
import dataclasses
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bridge.store.open import SqliteStore
from bridge.store.store_types import StoreLostError
from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError
from learner.restore import TASKS_A_PAGE, TimeoutAnchors, check_same, check_same_shapes
from tests.learner.streams import HF_CONFIG, MODEL

MANY = {f"task-{i:05}": (i / 1000, 99_999.999) for i in range(2 * TASKS_A_PAGE + 3)}


@pytest.fixture
def stores(tmp_path):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(SqliteStore(tmp_path / f"{name}.db"))) for name in ("old", "new")]


def through_json(books):
    return json.loads(json.dumps(books))


def all_of(store):
    return store.anchors(MANY)


def test_books_of_one_store_give_a_fresh_one_all_anchors(stores):
    old, new = stores
    old.raise_anchors(MANY)
    TimeoutAnchors(new).resume(through_json({"model": {}} | TimeoutAnchors(old).state_dict()))
    assert all_of(new) == MANY


def test_books_of_a_run_without_anchors_say_nothing_of_them(stores):
    assert TimeoutAnchors(stores[0]).state_dict() == {}


@pytest.mark.parametrize("books", [None, {"model": {}, "queue": {}}], ids=["no checkpoint", "a checkpoint without any"])
def test_resume_without_saved_anchors_asks_the_store_nothing(books):
    TimeoutAnchors(mock.Mock(spec=[])).resume(books)


def test_resume_puts_what_the_store_lacks_and_lowers_nothing(stores):
    old, new = stores
    old.raise_anchors(MANY)
    books = through_json(TimeoutAnchors(old).state_dict())
    keys = list(MANY)
    new.raise_anchors(MANY | {keys[1]: (50_000.0, 1.0)})
    new.raise_anchors({"since": (1.0,)})
    with mock.patch.object(new, "put_anchors", wraps=new.put_anchors) as put:
        TimeoutAnchors(new).resume(books)
    assert [set(call.args[0]) for call in put.call_args_list] == [{keys[1]}]
    assert all_of(new) == MANY | {keys[1]: (50_000.0, 99_999.999)}
    assert new.anchors(["since"]) == {"since": (1.0,)}


def test_checkpoint_while_the_store_is_away_has_what_was_known_before(stores):
    old, _ = stores
    old.raise_anchors({"a": (1.0, 2.5)})
    anchors = TimeoutAnchors(old)
    books = anchors.state_dict()
    assert books != {}
    with mock.patch.object(old, "all_anchors", side_effect=StoreLostError("away")) as asked:
        assert anchors.state_dict() == books
    assert asked.call_args.kwargs["timeout_s"] <= 10


def test_restored_learner_whose_store_is_away_saves_what_it_restored(stores):
    old, new = stores
    old.raise_anchors({"a": (1.0, 2.5)})
    books = TimeoutAnchors(old).state_dict()
    anchors = TimeoutAnchors(new)
    anchors.resume(books)
    with mock.patch.object(new, "all_anchors", side_effect=StoreLostError("away")):
        assert anchors.state_dict() == books


def test_saved_anchors_are_bounded(stores):
    old, new = stores
    old.raise_anchors(MANY)
    books = through_json(TimeoutAnchors(old, max_bytes=2000).state_dict())
    TimeoutAnchors(new).resume(books)
    found = new.all_anchors(limit=len(MANY))
    assert 0 < len(found) < 100 and found.items() <= MANY.items()
    assert sum(len(k) + len(v) for k, v in books["timeout_anchors"].items()) <= 2000


def test_checkpoint_of_another_model_or_mesh_is_refused_with_the_fields_that_differ():
    check_same("model", HF_CONFIG, dict(HF_CONFIG), Path("runs/a"))
    with pytest.raises(
        CheckpointError, match="runs/a: the checkpoint is of another model: .*num_hidden_layers was 2, is 4"
    ):
        check_same("model", HF_CONFIG, HF_CONFIG | {"num_hidden_layers": 4}, Path("runs/a"))
    with pytest.raises(CheckpointError, match="another mesh: fsdp was 8, is 4; tensor was 1, is 2"):
        check_same("mesh", {"fsdp": 8, "tensor": 1}, {"fsdp": 4, "tensor": 2}, Path("runs/a"))


def test_checkpoint_of_another_model_is_refused_before_an_array_of_it_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(3, {"w": np.ones((4, 2), np.float32)}, {"model": {"num_layers": 2}})
    checkpoints.wait()

    def check(books):
        check_same("model", books["model"], {"num_layers": 4}, tmp_path)

    # An array of another shape, which Orbax would refuse in its own words.
    with pytest.raises(CheckpointError, match="another model: num_layers was 2, is 4"):
        checkpoints.restore_latest({"w": np.ones((8, 2), np.float32)}, check=check)
    checkpoints.close()


def test_reference_of_another_shape_is_refused_with_the_field():
    field = "loss.reference_path"
    check_same_shapes(dataclasses.replace(MODEL, hf_json='{"note": 1}'), MODEL, Path("ref"), source=field)
    with pytest.raises(
        ValueError, match="loss.reference_path ref: hidden_size must be 16 as in the run's model, got 8"
    ):
        check_same_shapes(dataclasses.replace(MODEL, hidden_size=8), MODEL, Path("ref"), source=field)
