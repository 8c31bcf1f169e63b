"""A run's checkpoint as a Hugging Face folder: the very weights, and nothing of the run is changed by it."""

import contextlib
import dataclasses
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from bridge.files import replace_file
from configs import overrides
from configs.run_folder import RunFolder, set_up_run
from configs.sections import LoraConfig, PublishConfig
from launch.tools.evaluate import export
from learner.open_run import open_run
from tests.integration.support.models import merged, read_weights

pytestmark = pytest.mark.integration


def make_run(tmp_path: Path, model: Path, changes: Mapping[int, Callable[[Any], Any]], **sections: Any) -> RunFolder:
    """A run with a checkpoint of each step, whose weights are what its function makes of those it began with."""
    config = overrides.load_preset("tiny")
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=str(tmp_path / "run")),
        model=dataclasses.replace(config.model, path=str(model)),
        **sections,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    folder = RunFolder(set_up_run(config))
    replace_file(folder.model_path_file, f"{model}\n".encode())
    with contextlib.closing(open_run(config, folder.path, model)) as opened:
        state = opened.trainer.state
        for step, change in changes.items():
            opened.trainer.state = dataclasses.replace(state, params=jax.tree.map(change, state.params))
            save = opened.checkpoint()
            opened._start(dataclasses.replace(save, step=step))
            opened.checkpoints.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


def random_adapter(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(x.size), x.shape, x.dtype) / 5


@pytest.fixture
def run(tmp_path: Path, model: Path):
    """A run with checkpoints of steps 0 and 4, whose weights differ: those of step 4 are half those of the model."""
    return make_run(tmp_path, model, {0: lambda x: x * 1.0, 4: lambda x: x * 0.5})


def contents(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def test_checkpoint_is_exported_once_with_its_own_weights_and_the_run_stays_as_it_is(run: RunFolder, model: Path):
    before = contents(run.checkpoints), contents(run.checkpoints.with_name("checkpoints.hashes"))
    wanted = read_weights(model)
    for step, factor in ((4, 0.5), (0, 1.0), (None, 0.5)):
        found, folder = export.model_of(run, step)
        assert (found, folder) == (4 if step is None else step, run.model(4 if step is None else step))
        got = read_weights(folder)
        assert got.keys() == wanted.keys()
        for name, array in got.items():
            np.testing.assert_array_equal(array, wanted[name] * np.float32(factor))
    assert (contents(run.checkpoints), contents(run.checkpoints.with_name("checkpoints.hashes"))) == before
    assert (run.model(4) / "tokenizer.json").is_file() and export.steps_of(run) == [0, 4]


def test_checkpoint_is_exported_without_what_the_run_trains_by(run: RunFolder, model: Path):
    """Attention of another platform, a reference that is not here, and an optimizer whose state is not asked for."""
    trained_by = {
        "model.attention": "splash",
        "loss.kl_coef": "0.1",
        "loss.reference_path": "/nowhere/reference",
        "optimizer.name": "adafactor",
    }
    config = overrides.from_dict(json.loads(run.config_file.read_text()))
    replace_file(run.config_file, overrides.to_json(overrides.apply(config, trained_by)).encode())
    _, folder = export.model_of(run, 4)
    wanted = read_weights(model)
    for name, array in read_weights(folder).items():
        np.testing.assert_array_equal(array, wanted[name] * np.float32(0.5))


def test_checkpoint_of_adapters_is_exported_merged_and_beside_it_in_their_own_format(tmp_path: Path, model: Path):
    run = make_run(tmp_path, model, {4: random_adapter}, lora=LoraConfig(rank=2), publish=PublishConfig(lora="adapter"))
    _, folder = export.model_of(run, None)
    adapters = load_file(run.adapter(4) / "adapter_model.safetensors")
    got, wanted = read_weights(folder), merged(read_weights(model), adapters, scale=32 / 2)
    assert got.keys() == wanted.keys() and all(np.abs(x).max() > 0.1 for x in adapters.values())
    for name, array in got.items():
        np.testing.assert_allclose(array, wanted[name], atol=1e-5)


def test_step_that_is_not_there_or_damaged_is_refused_in_one_line(run: RunFolder, tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected one of 0, 4, got 3"):
        export.model_of(run, 3)
    with pytest.raises(ValueError, match=r"has no checkpoint"):
        export.model_of(RunFolder(tmp_path), None)
    largest = max((p for p in (run.checkpoints / "4").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"export of checkpoint 4 failed: .*no intact checkpoint"):
        export.model_of(run, 4)
    assert not run.model(4).exists() and (run.checkpoints / "4").is_dir()
