"""A run's checkpoint as a Hugging Face folder: the very weights, and nothing of the run is changed by it."""

import contextlib
import dataclasses
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from bridge.files import replace_file
from configs import overrides
from configs.run_folder import RunFolder, set_up_run
from launch.evaluate import export
from learner.start import open_run
from tests.integration.support.models import read_weights
from tests.integration.support.processes import REPO

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path: Path, model: Path):
    """A run with checkpoints of steps 0 and 4, whose weights differ: those of step 4 are half those of the model."""
    config = overrides.load_preset(str(REPO / "configs/tiny.py"))
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=str(tmp_path / "run")),
        model=dataclasses.replace(config.model, path=str(model)),
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    folder = RunFolder(set_up_run(config))
    replace_file(folder.model_path_file, f"{model}\n".encode())
    with contextlib.closing(open_run(config, folder.path, model)) as opened:
        state = opened.trainer.state
        for step, factor in ((0, 1.0), (4, 0.5)):
            params = jax.tree.map(lambda x, factor=factor: x * factor, state.params)
            opened.trainer.state = dataclasses.replace(state, params=params)
            save = opened.checkpoint()
            opened._start(dataclasses.replace(save, step=step))
            opened.checkpoints.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


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


def test_step_that_is_not_there_or_damaged_is_refused_in_one_line(run: RunFolder, tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3; there are 0, 4"):
        export.model_of(run, 3)
    with pytest.raises(ValueError, match=r"has no checkpoint yet"):
        export.model_of(RunFolder(tmp_path), None)
    largest = max((p for p in (run.checkpoints / "4").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"the checkpoint of step 4 could not be exported: .*no intact checkpoint"):
        export.model_of(run, 4)
    assert not run.model(4).exists() and (run.checkpoints / "4").is_dir()
