"""A learner with a real helper process, for tests and the bench of the stream trainer."""

import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from bridge.rollout_types import Version
from bridge.timeline import Timeline
from configs import sections
from configs.run_folder import RunFolder, set_up_run
from launch.services.helper_service import HelperService
from learner.distributed.channel import SingleProcess
from learner.gradient_helper.helper_client import GradientHelper, State, open_helper
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
        self.helper = open_helper(
            config, HelperService(self.folder, devices=""), num_own_devices=1, timeline=self.timeline
        )
        self.step = 0

    def publish(self) -> None:
        self.trainer.publish(self.step, must_publish=True)
        self.publisher.wait_until_published()

    def alone(self, micros) -> dict[str, Any]:
        """The gradient of an update by this process alone, with the same parameters; nothing of it is kept."""
        for micro in micros:
            self.trainer.accumulate(micro)
        sums = self.sums()
        self.trainer.discard()
        return sums

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
        helper.finish()
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


def wait_for(helper: GradientHelper, state: State) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while helper.state is not state:
        assert time.monotonic() < deadline, helper.state
        helper.poll()


def gradient_difference(tmp_path: pathlib.Path) -> float:
    """The largest difference of an update's gradient by two processes from that by one, relative to its tensor's
    largest entry; half of the micro-batches each."""
    config = config_with_helper(tmp_path)
    micros = stream(config, random_groups(0, NUM_GROUPS))
    with learner(config, tmp_path) as one:
        wanted = one.alone(micros)
        one.take()
        for micro in micros:
            one.helper.add(micro)
        got = one.finish_update(num_own=len(micros) // 2)
    return worst_difference(got, wanted)


def worst_difference(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Of the gradients, relative to the largest entry of each tensor."""
    gradients = {k: v for k, v in wanted.items() if k.startswith(".grads") and np.abs(v).max() > 0}
    return float(max(relative_differences(got, gradients).values()))


def check_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert worst_difference(got, wanted) < 1e-6
    assert got[".denominator"] == wanted[".denominator"]
    for name in (name for name in wanted if not name.startswith(".grads")):
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)
