"""A real helper process beside a learner: an update's gradient equals that of one process, whatever happens to it."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from typing import Any

import jax
import numpy as np
import pytest

from bridge.device_turns import HELPER, EngineTurn
from bridge.rollout_types import Version
from bridge.timeline import Timeline
from configs import sections
from configs.run_folder import RunFolder, set_up_run
from launch.services.helper_service import HelperService
from learner.distributed.channel import SingleProcess
from learner.helpers.gradient_helper import MAX_LOST_IN_A_ROW, GradientHelper, State, open_helper
from learner.model import hf_save
from learner.model.lora import LoraBase
from learner.policy_trainer import EpochCache, PolicyTrainer
from learner.publish.open_publisher import open_publisher
from learner.restore import WeightLoader, frozen_policies, load_base
from tests.learner.streams import MODEL, config_of, fresh_params, random_groups, relative_differences, steps_of, stream

DEADLINE_S = 120.0
NUM_GROUPS = 8


def config_with_helper(tmp_path: pathlib.Path, *, dtype="float32", rank=0, **loss: Any):
    config = config_of(**loss)
    return dataclasses.replace(
        config,
        preset="cgp",
        rounds=dataclasses.replace(
            config.rounds, groups_per_round=NUM_GROUPS, groups_per_update=NUM_GROUPS, samples_per_group=3
        ),
        model=dataclasses.replace(config.model, compute_dtype=dtype, served_dtype=dtype),
        lora=sections.LoraConfig(rank=rank),
        actor=dataclasses.replace(config.actor, num_engines=2),
        helpers=sections.HelpersConfig(num_engines=1),
        publish=dataclasses.replace(config.publish, snapshot_dir=str(tmp_path / "memory")),
        run=dataclasses.replace(config.run, dir=str(tmp_path / "run")),
    )


class Learner:
    """A trainer with its published weights, and a helper."""

    def __init__(self, config, tmp_path: pathlib.Path) -> None:
        model_folder = tmp_path / "model"
        if not model_folder.exists():
            hf_save.save(model_folder, MODEL, jax.tree.map(jax.numpy.asarray, fresh_params()))
        self.folder = set_up_run(config)
        RunFolder(self.folder).model_path_file.write_text(str(model_folder))
        (tmp_path / "memory").mkdir(exist_ok=True)
        weights, steps = WeightLoader(config, MODEL), steps_of(config)
        base: LoraBase | None = load_base(weights, model_folder)
        params = steps.init_adapters() if base else weights.load(model_folder, "float32")
        state = steps.init(params)
        nothing: Any = None
        names = MODEL.param_names
        self.publisher = open_publisher(
            config, self.folder, tokenizer_hash="t", names=names, hosts=SingleProcess(), token=None, destinations=[]
        )
        self.trainer = PolicyTrainer(
            config=config,
            architecture=MODEL,
            steps=steps,
            anchors=frozen_policies(steps, weights, model_folder, params=state.params, base=base),
            kept=EpochCache(steps, epochs=1),
            state=state,
            publisher=self.publisher,
            checkpoints=nothing,
            base=base,
        )
        self.timeline = Timeline(RunFolder(self.folder).events, "learner")
        self.helper = open_helper(config, HelperService(self.folder, devices=""), timeline=self.timeline)
        self.step = 0

    def publish(self) -> None:
        self.trainer.publish(self.step, must_publish=True)
        self.publisher.wait_until_published()

    def take(self) -> None:
        """Publishes the current weights, and lets the helper take its devices."""
        self.publish()
        wait_for(self.helper, State.IDLE)
        self.trainer.write_exact_params(self.helper.exact_file)
        self.helper.take_devices(Version(incarnation=0, step=self.step))

    def finish_update(self, *, num_own: int) -> dict[str, Any]:
        """Trains `num_own` micro-batches itself, or more if the helper has gone, and merges; returns the gradient."""
        helper, deadline = self.helper, time.monotonic() + DEADLINE_S
        num_left = num_own
        while not helper.is_complete:
            assert time.monotonic() < deadline
            has_gone = helper.state in (State.ENDED, State.PREPARING)
            if (file := helper.hand_over()) is not None:
                self.trainer.merge(file)
                helper.merged()
            elif (num_left or has_gone) and (micro := helper.next_own()) is not None:
                self.trainer.accumulate(micro)
                num_left = max(0, num_left - 1)
        return self.sums()

    def sums(self) -> dict[str, Any]:
        accumulator = jax.device_get(self.trainer.state.accumulator)
        leaves, _ = jax.tree_util.tree_flatten_with_path(accumulator)
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def update(self) -> None:
        self.trainer.optimizer_step(0)
        self.helper.end_update()
        self.step += 1

    def close(self) -> None:
        self.helper.close()
        self.publisher.close()
        self.timeline.close()


@contextlib.contextmanager
def learner(config, tmp_path):
    one = Learner(config, tmp_path)
    try:
        yield one
    finally:
        one.close()


def alone(config, tmp_path, updates):
    """Gradients of the updates, each by one process."""
    with learner(config, tmp_path / "alone") as one:
        for micros in updates:
            one.publish()
            for micro in micros:
                one.trainer.accumulate(micro)
            yield one.sums()
            one.update()


def wait_for(helper: GradientHelper, state: State) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while helper.state is not state:
        assert time.monotonic() < deadline, helper.state
        helper.poll()


def check_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    gradients = {k: v for k, v in wanted.items() if k.startswith(".grads") and np.abs(v).max() > 0}
    worst = max(relative_differences(got, gradients).values())
    assert worst < 1e-6
    assert got[".denominator"] == wanted[".denominator"]
    for name in wanted.keys() - gradients.keys():
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.integration
@pytest.mark.parametrize(
    "fields",
    [{}, {"dtype": "bfloat16"}, {"rank": 3}, {"kl_coef": 0.1}],
    ids=["float32", "bfloat16", "adapters", "reference"],
)
def test_gradient_of_two_processes_is_that_of_one(tmp_path, fields):
    config = config_with_helper(tmp_path, **fields)
    updates = [stream(config, random_groups(seed, NUM_GROUPS)) for seed in range(2)]
    oracle = alone(config_with_helper(tmp_path / "alone", **fields), tmp_path, updates)
    with learner(config, tmp_path) as one:
        for micros in updates:
            one.take()
            for micro in micros:
                one.helper.add(micro)
            wanted = next(oracle)
            check_equal(one.finish_update(num_own=2), wanted)
            assert 0 < one.helper.stats.num_batches < len(micros)
            one.update()
            wait_for(one.helper, State.IDLE)


def pid_of(helper: GradientHelper) -> int:
    process: Any = helper._process
    return process.process.pid


@pytest.mark.integration
def test_helper_that_is_killed_in_each_phase_costs_no_micro_batch(tmp_path):
    """While it starts, while it adds, with its sum in the file; it is stopped instead of killed where it adds."""
    config = config_with_helper(tmp_path)
    config = dataclasses.replace(config, supervision=dataclasses.replace(config.supervision, engine_timeout_s=5.0))
    phases = (State.STARTING, State.ADDING, State.HANDED_OVER, State.RELEASING)
    updates = [stream(config, random_groups(seed, NUM_GROUPS)) for seed in range(len(phases))]
    oracle = alone(config_with_helper(tmp_path / "alone"), tmp_path, updates)
    with learner(config, tmp_path) as one:
        for phase, micros in zip(phases, updates, strict=True):
            one.take()
            helper_pid = pid_of(one.helper)
            for micro in micros:
                one.helper.add(micro)
            if phase is not State.STARTING:
                wait_for(one.helper, State.ADDING)
            if phase is State.HANDED_OVER:
                while one.helper.hand_over() is None:
                    time.sleep(0.001)
            if phase is not State.RELEASING:
                os.kill(helper_pid, signal.SIGSTOP if phase is State.ADDING else signal.SIGKILL)
                wait_for(one.helper, State.PREPARING)
            gradient = one.finish_update(num_own=1)
            if phase is State.RELEASING:
                os.kill(helper_pid, signal.SIGKILL)
                wait_for(one.helper, State.PREPARING)
            check_equal(gradient, next(oracle))
            assert one.helper.is_usable
            one.update()


@pytest.mark.integration
def test_engine_and_helper_never_have_the_devices_at_once(tmp_path):
    config = config_with_helper(tmp_path)
    with learner(config, tmp_path) as one:
        engine = EngineTurn(one.folder, HELPER)
        assert engine.try_take()
        one.take()
        for micro in stream(config, random_groups(0, NUM_GROUPS)):
            one.helper.add(micro)
        deadline = time.monotonic() + DEADLINE_S
        while not engine.is_wanted():  # the helper asks for the devices, and waits
            assert time.monotonic() < deadline
            one.helper.poll()
        assert one.helper.state is State.STARTING
        engine.give_back()
        wait_for(one.helper, State.ADDING)
        assert not engine.try_take()
        one.finish_update(num_own=0)
        wait_for(one.helper, State.IDLE)
        assert engine.try_take()
        # The round ends while the helper still waits for the engine: it leaves the engine alone.
        one.update()
        one.take()
        one.helper.end_update()
        wait_for(one.helper, State.IDLE)
        assert not engine.is_wanted()


@pytest.mark.integration
def test_file_that_was_damaged_is_refused(tmp_path):
    config = config_with_helper(tmp_path)
    micros = stream(config, random_groups(0, NUM_GROUPS))
    oracle = alone(config_with_helper(tmp_path / "alone"), tmp_path, [micros])
    with learner(config, tmp_path) as one:
        one.take()
        for micro in micros:
            one.helper.add(micro)
        wait_for(one.helper, State.ADDING)
        while not one.helper.file.exists():
            # Not by `hand_over`, which would read the answer at once.
            time.sleep(0.001)
            if one.helper.state is not State.HANDING_OVER:
                one.helper.hand_over()
        data = bytearray(one.helper.file.read_bytes())
        data[len(data) // 2] ^= 1
        one.helper.file.write_bytes(data)
        check_equal(one.finish_update(num_own=0), next(oracle))
        assert one.helper.stats.num_lost == 1


def test_helper_is_not_used_after_too_many_losses(tmp_path):
    class Gone:
        """A process that ends at once."""

        num_devices = 1

        def start(self):
            from multiprocessing.connection import Pipe

            ours, its = Pipe()
            its.close()
            return type("Process", (), {"connection": ours, "kill": lambda self: ours.close()})()

    config = config_with_helper(tmp_path)
    (tmp_path / "run").mkdir()
    set_up_run(config)
    timeline = Timeline(tmp_path / "run" / "events", "learner")
    helper = open_helper(config, Gone(), timeline=timeline)
    num_tries = 0
    while helper.is_usable:
        num_tries += 1
        helper.poll()
        assert helper.state is State.ENDED
    assert num_tries == MAX_LOST_IN_A_ROW
    timeline.close()
