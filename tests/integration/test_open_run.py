"""What `open_run` makes of a configuration and a real model's folder."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.rollout_types import Sampling
from bridge.snapshots.snapshot_format import SnapshotError
from bridge.snapshots.snapshot_writer import SnapshotWriter
from bridge.store.open import SqliteStore
from configs import overrides, schema
from configs.run_folder import RunFolder, set_up_run
from configs.sections import CriticConfig, LoraConfig
from learner.model.architecture import Architecture
from learner.open_run import open_run
from learner.run import Run
from tests.bridge.factories import make_group, make_rollout, make_ticket

pytestmark = pytest.mark.integration


def prepared(tmp_path: Path, model: Path, preset: str) -> schema.Config:
    config = overrides.load_preset(f"{preset}:tiny")
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=str(tmp_path / "run")),
        model=dataclasses.replace(config.model, path=str(model)),
    )


@pytest.fixture
def opened(tmp_path: Path, model: Path) -> Iterator[Callable[[str], Run]]:
    """Opens a run of a preset, as a learner does; it is closed, and the process's signals are as they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with contextlib.ExitStack() as stack:

        def open_it(preset: str) -> Run:
            config = prepared(tmp_path, model, preset)
            return stack.enter_context(contextlib.closing(open_run(config, set_up_run(config), model)))

        yield open_it
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("waits_for", ["groups", "probe", "evaluation"])
def test_learner_that_waits_for_samples_hears_that_their_weights_could_not_be_published(opened, waits_for, monkeypatch):
    def begin(*_):
        raise SnapshotError("no room")

    monkeypatch.setattr(SnapshotWriter, "begin", begin)
    run = opened("pipelinerl")
    version = run.publisher.publish(run.trainer.state.params, step=0)
    sampling = Sampling(max_tokens=4)
    with pytest.raises(SnapshotError, match="no room"):
        if waits_for == "groups":
            next(run.stream.micro_batches())
        if waits_for == "evaluation":
            run.evaluations.start(version=version, round=0)
            run.evaluations.wait()
        run.probe.start([(run.held_out[0], 1)], sampling, version=version, round=0)
        run.probe.wait()


@pytest.mark.parametrize("preset", ["serial", "pipelinerl"])
def test_publishes_wait_for_no_evaluation_and_groups_are_held_against_the_models_vocabulary(
    opened, model: Path, preset: str
):
    run = opened(preset)
    assert not run.evaluations.waits and run.probe.is_exact
    vocab_size = Architecture.from_hf(model).vocab_size
    ticket = make_ticket(num_samples=1)
    for token, is_sound in ((vocab_size - 1, True), (vocab_size, False)):
        rollout = make_rollout(tokens=np.array([1, 2, token], np.int32))
        assert run.stream.is_sound(make_group(ticket, rollouts=(rollout,)), ticket) == is_sound


def test_learner_keeps_its_lead_while_it_restores_and_no_longer_where_that_fails(opened, monkeypatch):
    kept = threading.Semaphore(0)
    real = SqliteStore.renew_leadership

    def renew_leadership(store: SqliteStore, *, lease_s: float) -> None:
        real(store, lease_s=lease_s)
        kept.release()

    def restore(*_: object) -> None:
        assert kept.acquire(timeout=60)
        raise RuntimeError("nothing to restore from")

    monkeypatch.setattr(SqliteStore, "renew_leadership", renew_leadership)
    monkeypatch.setattr("learner.open_run.restore", restore)
    with pytest.raises(RuntimeError, match="nothing to restore from"):
        opened("serial")
    assert "heartbeat" not in {t.name for t in threading.enumerate()}


def test_anchors_come_back_from_the_checkpoint_where_the_store_is_a_fresh_one(opened, tmp_path: Path):
    run = opened("serial")
    run.store.put_anchors({"task": (1.0, 2.5)})
    run.stream.group_filter.step = 1  # a checkpoint is of a step
    run.on_stop = run.checkpoint()
    run.store.put_anchors({"since": (4.0,)})  # after the books were made, and before they are written
    run.save_on_stop()
    run.close()
    stores = [path for path in (tmp_path / "run").iterdir() if path.name.startswith("store.")]
    assert stores
    for path in stores:
        path.unlink()
    again = opened("serial")
    assert again.step == 1
    assert again.store.all_anchors(limit=9) == {"task": (1.0, 2.5), "since": (4.0,)}


@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_critic_of_a_run_is_that_of_its_checkpoint(tmp_path: Path, model: Path, opened, backbone):
    del opened  # restores the process's signals
    config = prepared(tmp_path, model, "serial")
    config = dataclasses.replace(
        config,
        loss=dataclasses.replace(config.loss, advantage="gae"),
        critic=CriticConfig(backbone=backbone),
        lora=LoraConfig(rank=4 if backbone == "policy" else 0),
    )
    folder = set_up_run(config)
    bias = 0.25
    with contextlib.closing(open_run(config, folder, model)) as run:
        critic = run.trainer.critic
        assert critic is not None and "critic.gae_lambda" in RunFolder(folder).loss_constants.read_text()
        value_head = critic.state.params["value_head"] | {"bias": jnp.full(1, bias)}
        critic.state = dataclasses.replace(critic.state, params=critic.state.params | {"value_head": value_head})
        run.save()
    with contextlib.closing(open_run(config, folder, model)) as run:
        assert run.trainer.critic is not None
        assert float(run.trainer.critic.state.params["value_head"]["bias"][0]) == bias
