"""The learner's side of a gradient helper, whose process is a pipe that the test answers on."""

import types
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from bridge.rollout_types import Version
from bridge.timeline import Timeline
from learner.gradient_helper import helper_client
from learner.gradient_helper.helper_client import GradientHelper, State
from learner.gradient_helper.messages import DevicesTaken, HelperReady, ParamsRead, Reply, encode


class Setup:
    """A helper, its clock, and the process's end of the pipe."""

    def __init__(self, folder) -> None:
        self.now_s = 0.0
        self.theirs: Connection
        self.helper = GradientHelper(
            self._start,
            folder / "helper",
            prepare_s=1000.0,
            answer_s=120.0,
            num_ahead=1,
            timeline=Timeline(folder / "events", "learner"),
            clock=lambda: self.now_s,
        )
        self.helper.poll()
        self.answer(HelperReady())

    def _start(self) -> Any:
        ours, self.theirs = Pipe()
        return types.SimpleNamespace(connection=ours, kill=lambda: None)

    def answer(self, reply: Reply) -> None:
        self.theirs.send_bytes(encode(reply))
        self.helper.poll()

    def train_alone(self) -> None:
        """Adds a micro-batch, which the learner takes, and has the devices asked for."""
        micro: Any = types.SimpleNamespace(batch=types.SimpleNamespace(denominator=np.float32(8)))
        self.helper.add(micro)
        self.helper.take_devices(Version(incarnation=0, step=1))


@pytest.mark.parametrize("got", [(), (DevicesTaken(wait_s=1.0),)], ids=["waits", "reads"])
def test_helper_that_the_learner_outran_took_at_least_so_long_to_start(tmp_path, got):
    setup = Setup(tmp_path)
    setup.train_alone()
    assert setup.helper.next_own() is not None
    for reply in got:
        setup.answer(reply)
    setup.now_s = 15.0
    setup.helper.finish()
    assert setup.helper.state is State.RELEASING and setup.helper.end_update().start_s == 15.0


def test_micro_batch_that_cannot_be_written_costs_the_helper_and_not_the_run(tmp_path, monkeypatch):
    def full(path, tree) -> str:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(helper_client, "write_tree", full)
    setup = Setup(tmp_path)
    setup.train_alone()
    setup.answer(DevicesTaken(wait_s=1.0))
    setup.answer(ParamsRead(read_s=1.0))
    assert setup.helper.stats.num_lost == 1 and setup.helper.next_own() is not None
    assert setup.helper.is_complete
