"""What `open_run` makes of a configuration and a real model's folder."""

import dataclasses
import signal
from pathlib import Path

import numpy as np
import pytest

from configs import overrides
from configs.run_folder import set_up_run
from learner.model.config import Architecture
from learner.start import open_run
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.integration.support.processes import REPO

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("preset", "is_exact"), [("serial", True), ("pipelinerl", False)])
def test_evaluations_are_of_one_version_by_rounds_and_groups_are_held_against_the_models_vocabulary(
    tmp_path: Path, model: Path, preset: str, is_exact: bool
):
    config = overrides.load_preset(str(REPO / "configs" / f"{preset}.py:tiny"))
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=str(tmp_path / "run")),
        model=dataclasses.replace(config.model, path=str(model)),
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    run = open_run(config, set_up_run(config), model)
    try:
        assert run.evaluation.is_exact == is_exact and run.probe.is_exact
        vocab_size = Architecture.from_hf(model).vocab_size
        ticket = make_ticket(num_samples=1)
        for token, is_sound in ((vocab_size - 1, True), (vocab_size, False)):
            rollout = make_rollout(tokens=np.array([1, 2, token], np.int32))
            assert run.stream.is_sound(make_group(ticket, rollouts=(rollout,)), ticket) == is_sound
    finally:
        run.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
