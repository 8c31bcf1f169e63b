import dataclasses
from pathlib import Path

import numpy as np
import pytest

from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError
from learner.restore import check_same, check_same_shapes
from tests.learner.streams import HF_CONFIG, MODEL


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
