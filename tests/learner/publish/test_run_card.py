"""A run's card: the model's files by hash, and the tensors as a snapshot of the very parameters has them."""

import jax
import numpy as np
import pytest
from blake3 import blake3

from bridge import codec, weight_types
from bridge.param_names import flatten
from bridge.rollout_types import Version
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.weight_types import RunCard
from learner.model.decoder import init_params
from learner.publish.run_card import make_run_card
from tests.bridge.snapshots.whole import write_whole
from tests.learner.streams import MODEL
from tests.param_tensors import iter_tensors


def card_of(folder, dtype="bfloat16"):
    params = jax.eval_shape(lambda key: init_params(MODEL, key), jax.random.key(0))
    return make_run_card(
        run="abc123",
        name="trial",
        config='{"preset": "test"}',
        model_folder=folder,
        names=MODEL.param_names,
        shapes={path: tuple(leaf.shape) for path, leaf in flatten(params).items()},
        dtype=dtype,
    )


def test_card_has_the_files_of_the_model_that_an_engine_reads_and_no_others(tmp_path):
    wanted = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ x }}"}
    others = {"model.safetensors": b"weights", "modeling_mine.py": b"import os", "README.md": b"#"}
    for name, data in (wanted | others).items():
        (tmp_path / name).write_bytes(data)
    card, blobs = card_of(tmp_path)
    assert {f.name: blobs[f.blake3] for f in card.files} == wanted
    assert all(blake3(data).hexdigest() == digest for digest, data in blobs.items())
    assert {f.num_bytes for f in card.files} == {len(d) for d in wanted.values()}


@pytest.mark.heavy
def test_cards_tensors_are_those_of_a_snapshot(tmp_path):
    card, _ = card_of(tmp_path, dtype="float32")
    params = init_params(MODEL, jax.random.key(0))
    tensors = {name: np.asarray(t) for name, t in iter_tensors(MODEL.param_names, flatten(params))}
    writer = SnapshotWriter(tmp_path / "snapshots", run="abc123", tokenizer_hash="t")
    manifest = write_whole(writer, Version(incarnation=0, step=0), tensors, dtype="float32")
    writer.remove()
    assert card.tensors == manifest.tensors


def test_card_says_what_runs_here_and_travels(tmp_path):
    card, _ = card_of(tmp_path)
    assert (card.sluice, card.vllm) == (weight_types.SLUICE, weight_types.VLLM)
    assert {t.dtype for t in card.tensors} == {"bfloat16"}
    assert codec.decode(RunCard, codec.encode(card)) == card
