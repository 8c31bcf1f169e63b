import contextlib
import functools
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from bridge.liveness import Activity, Liveness
from bridge.rollout_types import Version
from configs import schema, sections
from configs.run_folder import RunFolder
from learner import parity, train
from learner.commands import Discard, Publish
from learner.heartbeat import LearnerHeartbeat, Stopped
from learner.learner_process import LearnerProcess
from learner.run import Run
from learner.train import is_save_due


def run_of(*, when="every", save_every=3, num_updates=10, step=0, saved=0) -> Any:
    """A run of 4 updates a round, by rounds or by window."""
    run = SimpleNamespace(
        config=schema.Config(
            preset="test",
            run=sections.RunConfig(num_updates=num_updates),
            rounds=sections.RoundsConfig(groups_per_round=8, groups_per_update=2),
            admission=sections.AdmissionConfig(policy="window" if when == "every" else "fifo"),
            publish=sections.PublishConfig(when=when),  # pyright: ignore[reportArgumentType]
            checkpoint=sections.CheckpointConfig(every_n_steps=save_every),
        ),
        step=step,
        last_saved_step=saved,
        finished_step=None,
        checkpoint=mock.Mock(),
        has_devices=True,
        turn=None,
        helper=None,
        score=mock.Mock(),
        acknowledge=mock.Mock(),
    )
    run.save_last = functools.partial(LearnerProcess.save_last, cast(Any, run))
    return run


def saved_steps(run) -> list[int]:
    """The steps after which a run saves, when it asks after each of its updates."""
    saved = []
    for step in range(run.step + 1, run.config.run.num_updates + 1):
        run.step = step
        if is_save_due(run, ends_round=step % 4 == 0):
            run.last_saved_step = step
            saved.append(step)
    return saved


@pytest.mark.parametrize(
    ("when", "save_every", "step", "num_updates", "wanted"),
    [
        ("round_end", 1, 0, 12, [4, 8, 12]),
        ("round_end", 3, 0, 12, [4, 8, 12]),  # due at 3, 6, 9 and 12: at the first round's end after each
        ("round_end", 4, 0, 12, [4, 8, 12]),
        ("round_end", 5, 0, 12, [8, 12]),  # due at 5 and 10
        ("round_end", 12, 0, 12, [12]),
        ("round_end", 13, 0, 12, []),
        ("round_end", 5, 8, 16, [12, 16]),  # a restart from a late save keeps the multiples of n
        ("every", 1, 0, 12, [*range(1, 13)]),
        ("every", 3, 0, 12, [3, 6, 9, 12]),
        ("every", 5, 0, 12, [5, 10]),
        ("every", 3, 7, 12, [9, 12]),
    ],
)
def test_is_save_due_every_n_steps_by_rounds_at_the_first_end_after_them(when, save_every, step, num_updates, wanted):
    run = run_of(when=when, save_every=save_every, num_updates=num_updates, step=step, saved=step)
    assert saved_steps(run) == wanted


class Evaluations:
    """Of the weights published; `due` are the steps at which one falls due, what was started is there when settled."""

    def __init__(self, *, waits: bool = False, due: tuple[int, ...] = ()) -> None:
        self.waits, self.due = waits, due
        self.started: list[Version] = []
        self.num_settled = 0

    def is_due(self, step):
        return step in self.due and step not in [v.step for v in self.started[self.num_settled - 1 :]]

    def start(self, *, version, round):
        self.started.append(version)

    def wait(self):
        self.num_settled += 1

    def poll(self):
        pass


def publishing_run(when: str, **evaluations: Any) -> Any:
    run = run_of(when=when, num_updates=12)
    run.evaluations = Evaluations(**evaluations)
    run.stream = SimpleNamespace(aside=contextlib.nullcontext, round=0, is_sound=lambda group, ticket: True)
    run.timeline = SimpleNamespace(measure=lambda *_, **__: contextlib.nullcontext())
    run.publisher, run.heartbeat, run.do = mock.Mock(probe_is_due=False), mock.Mock(), mock.Mock()
    run.metrics, run.samples = mock.Mock(), mock.Mock()
    run.held_out, run.tokenizer = [], SimpleNamespace(stop_token_ids=(), folder=None)
    return run


def done_by(run) -> list[Any]:
    """The commands that all processes were told."""
    return [call.args[0] for call in run.do.call_args_list]


@pytest.mark.parametrize("when", ["every", "round_end"])
@pytest.mark.parametrize("waits", [False, True])
def test_publish_waits_for_the_evaluations_that_are_out_only_if_it_is_told_to(when, waits):
    run = publishing_run(when, waits=waits, due=(0,))
    for step in range(3):
        run.step = step
        train.publish(run)
    assert [told.step for told in done_by(run)] == [0, 1, 2]
    assert run.evaluations.num_settled == (3 if waits else 0) and len(run.evaluations.started) == 1


@pytest.mark.parametrize(
    ("probe_is_due", "evaluation_is_due", "must_publish"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_publish_of_a_version_that_is_probed_or_evaluated_says_that_it_must_go_out(
    probe_is_due, evaluation_is_due, must_publish
):
    run = publishing_run("every", due=(0,) if evaluation_is_due else ())
    version = Version(incarnation=0, step=0)
    run.publisher.probe_is_due, run.publisher.version = probe_is_due, version
    run.probe = mock.Mock()
    train.publish(run)
    assert done_by(run) == [Publish(0, must_publish=must_publish)]
    assert run.probe.start.called == probe_is_due and run.evaluations.started == [version] * evaluation_is_due


@pytest.mark.parametrize(("when", "wanted"), [("every", [0, 4]), ("round_end", [0, 2, 4, 4])])
def test_train_waits_for_the_weights_at_the_start_and_by_rounds_before_the_next_round(when, wanted, monkeypatch):
    trained = Trained(monkeypatch)
    trained.run.config = run_of(when=when, num_updates=4, save_every=100).config
    waited = []
    monkeypatch.setattr(train, "await_weights", lambda run: waited.append(run.step))
    monkeypatch.setattr(train, "finish", lambda run: train.await_weights(run))
    trained.round_steps = 2
    train.train(trained.run)
    assert waited == wanted  # the last one in `finish`


def test_last_weights_are_evaluated_though_an_earlier_evaluation_was_out_when_they_were_published():
    run = publishing_run("every")
    run.folder, run.architecture, run.checkpoints = Path("/none"), None, mock.Mock(latest=12)
    run.probe, run.stream.acknowledge, run.store = SimpleNamespace(version=None), mock.Mock(), mock.Mock()
    run.publisher.version, run.publisher.is_published = Version(incarnation=0, step=12), lambda step: True
    run.step, calls = 12, []
    # Due once what was out is settled, as the set is free then.
    run.evaluations.wait = lambda: calls.append("settle")
    run.evaluations.is_due = lambda step: calls == ["settle"]
    run.evaluations.start = lambda *, version, round: calls.append(version.step)
    train.finish(run)
    assert calls == ["settle", 12, "settle"]


@pytest.fixture
def aside():
    """A stream's `aside`, and whether one is within it."""

    class Aside:
        is_within = False

        @contextlib.contextmanager
        def __call__(self, what):
            self.is_within = True
            yield
            self.is_within = False

    return Aside()


def test_publishing_and_the_probe_are_set_aside_from_the_rounds_time(aside, monkeypatch):
    run, seen = publishing_run("round_end"), []
    run.stream.aside = aside
    run.step, run.publisher.version = 4, Version(incarnation=0, step=4)
    run.do.side_effect = lambda *_, **__: seen.append(("publish", aside.is_within))
    run.stream.fence, run.stream.packing, run.stream.routing = mock.Mock(), run.config.packing, None
    monkeypatch.setattr(parity, "settle", lambda *_, **__: seen.append(("probe", aside.is_within)) or 0.0)
    train.publish(run)
    run.probe = SimpleNamespace(version=run.publisher.version)
    train.check_parity(run)
    assert seen == [("publish", True), ("probe", True)]


class SharedDevices(SimpleNamespace):
    """A run whose engines have its devices in turns."""

    has_devices, take_devices, give_devices_back = Run.has_devices, Run.take_devices, Run.give_devices_back


def test_devices_are_taken_once_the_engines_owe_nothing_and_given_back_without_the_state(aside):
    calls: list[str] = []
    turn = SimpleNamespace(is_held=False)
    turn.take = lambda on_wait: (calls.append("take"), setattr(turn, "is_held", True))
    turn.give_back = lambda: (calls.append("give back"), setattr(turn, "is_held", False))
    run: Any = SharedDevices(
        turn=turn,
        trainer=SimpleNamespace(offload=lambda: calls.append("offload"), reload=lambda: calls.append("reload")),
        evaluations=SimpleNamespace(wait=lambda: calls.append("evaluations")),
        probe=SimpleNamespace(version=1, await_groups=lambda: calls.append("probe")),
        stream=SimpleNamespace(aside=aside),
        heartbeat=mock.Mock(),
    )
    for _ in range(2):  # the second time each has no effect
        train.take_devices(run)
    for _ in range(2):
        train.give_devices_back(run)
    assert calls == ["evaluations", "probe", "take", "reload", "offload", "give back"]


@pytest.mark.parametrize(("ess", "is_fresh", "stops"), [(0.5, False, False), (0.4, False, True), (0.4, True, False)])
def test_batch_below_the_ess_floor_is_dropped_unless_its_weights_are_the_newest(ess, is_fresh, stops):
    assert train.is_off_policy(ess, floor=0.5, is_fresh=is_fresh, step=1) == stops


def test_what_the_learner_computes_is_told_with_whether_it_was_compiled_first():
    run, num_compilations = mock.MagicMock(), iter([0, 1, 1, 1])  # read before and after each
    run.timeline.took.side_effect = lambda name, start, end, **about: told.append((name, start <= end, about))
    type(run.trainer.steps).num_compilations = mock.PropertyMock(side_effect=num_compilations)
    told: list[Any] = []
    results = [train.compute(run, mock.sentinel.command, "train", step=step)[0] for step in (0, 1)]
    assert results == [run.do.return_value] * 2 and run.do.call_args_list == [mock.call(mock.sentinel.command)] * 2
    assert told == [("train", True, {"step": 0, "compiled": True}), ("train", True, {"step": 1})]


def test_each_micro_batch_is_a_sign_of_life_in_every_pass():
    run = mock.MagicMock()
    micro: Any = SimpleNamespace(batch=None, ends_pack=True, ticket_ids=["a"])
    train.accumulate(run, micro, mock.Mock())
    assert run.heartbeat.report_progress.call_count == 1 and run.stream.poll.call_count == 1
    run.trainer.kept.ticket_ids = [("a",)] * 3
    train.accumulate_cached(run, mock.Mock(), 1)
    assert run.heartbeat.report_progress.call_count == 4 and run.stream.poll.call_count == 4


class Trained:
    """A run whose groups and probes are all waited for, and what its pulse says where work begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("learner.heartbeat.ACTORS_CHECK_S", math.inf)  # the store has none
        self.liveness = Liveness(Liveness.create())
        self.run = run_of(num_updates=2, save_every=100)
        self.run.heartbeat = LearnerHeartbeat(mock.Mock(), threading.Event(), self.liveness, leader_lease_s=30.0)
        self.run.stream, self.run.publisher = mock.MagicMock(), mock.Mock(is_due=lambda **_: False)
        self.run.stream.micro_batches, self.run.stream.has_fenced_groups = self.micro_batches, False
        for part in ("architecture", "store", "checkpoints", "probe", "evaluations", "trainer", "metrics"):
            setattr(self.run, part, mock.Mock())
        self.run.trainer.state.skipped_updates = 0
        self.seen: list[tuple[str, Activity]] = []
        self.round_steps = 100
        for name in ("publish", "finish", "StepMetrics"):
            monkeypatch.setattr(train, name, mock.Mock())
        monkeypatch.setattr(parity, "settle", self.settle)
        monkeypatch.setattr(train, "accumulate", lambda *_: self.see("accumulate"))
        monkeypatch.setattr(train, "update", self.update)

    def see(self, what: str) -> None:
        self.seen.append((what, self.liveness.read().activity))

    def micro_batches(self):
        while True:
            self.run.heartbeat.check()
            yield mock.Mock(ends_update=True, ends_round=(self.run.step + 1) % self.round_steps == 0)

    def settle(self, *_, before_score, **__) -> float:
        self.run.heartbeat.check()
        before_score()
        self.see("score")
        self.run.heartbeat.check()
        return 0.0

    def update(self, *_) -> None:
        self.see("update")
        self.run.on_stop = None
        self.run.step += 1


@pytest.mark.parametrize(("when", "step", "wanted"), [("every", 3, 3), ("round_end", 4, 4), ("round_end", 3, None)])
def test_train_that_is_told_to_stop_saves_what_may_be_saved(monkeypatch, when, step, wanted):
    trained = Trained(monkeypatch)
    run, made = trained.run, []
    run.config = run_of(when=when, num_updates=12, save_every=100).config
    trained.round_steps = 2
    run.checkpoint = lambda: run.step
    run.save_on_stop = lambda: made.append(run.on_stop)
    run.on_stop = None
    stop_at(run, step=step)
    with pytest.raises(Stopped):
        train.train(run)
    assert made == [wanted]


def test_full_batch_with_groups_of_a_fenced_actor_is_dropped_and_the_engines_get_the_devices(monkeypatch):
    trained = Trained(monkeypatch)
    run, settle, calls = trained.run, trained.settle, []

    def turn(name: str, has_devices: bool) -> None:
        run.has_devices = has_devices
        calls.append(name)

    def fence(*args, **options) -> float:
        if not run.stream.drop_update.called:
            run.stream.has_fenced_groups = True
            run.give_devices_back()  # the engines generate the probe again
        return settle(*args, **options)

    run.turn, run.do = mock.Mock(), lambda command: calls.append(command)
    run.take_devices = lambda on_wait: turn("take", True)
    run.give_devices_back = lambda: turn("give", False)
    run.stream.drop_update.side_effect = lambda **_: setattr(run.stream, "has_fenced_groups", False)
    monkeypatch.setattr(parity, "settle", fence)
    run.config = run_of(num_updates=1, save_every=100).config
    train.train(run)
    run.stream.drop_update.assert_called_once_with(needs_fresh=False)
    assert calls == ["give", "take", "give", "take", Discard(), "give", "take"]
    assert [what for what, _ in trained.seen] == ["accumulate", "score"] * 2 + ["update"]


def test_update_forgets_the_checkpoint_of_before_as_soon_as_parameters_change(monkeypatch):
    run = mock.MagicMock()
    run.config.rounds.epochs = 2
    run.on_stop, seen = "before", []
    run.do = lambda command: seen.append(run.on_stop) or {}
    run.heartbeat.check = mock.Mock(side_effect=Stopped)
    with pytest.raises(Stopped):
        train.update(run, mock.Mock())
    assert seen == [None]


def stop_at(run, *, step: int) -> None:
    """Told to stop when that step is made."""
    check = run.heartbeat.updated

    def updated() -> None:
        check()
        if run.step == step:
            raise Stopped

    run.heartbeat.updated = updated


def test_train_what_follows_a_wait_up_to_the_first_update_has_the_starts_bound(monkeypatch):
    trained = Trained(monkeypatch)
    train.train(trained.run)
    parts = ("accumulate", "score", "update")
    assert trained.seen == [(part, doing) for doing in (Activity.STARTING, Activity.WORKING) for part in parts]


def test_finish_each_part_of_it_is_felt(monkeypatch, tmp_path):
    pulse, felt = Liveness(Liveness.create()), []

    def feel(*_, **__) -> None:
        felt.append(pulse.read().num_works)

    run = run_of(step=10, saved=9)
    run.heartbeat, run.folder = LearnerHeartbeat(mock.Mock(), threading.Event(), pulse, leader_lease_s=30.0), tmp_path
    run.timeline = mock.MagicMock()
    run.probe, run.evaluations = mock.Mock(version=None), Evaluations()
    for part in ("publisher", "stream", "architecture", "tokenizer"):
        setattr(run, part, mock.MagicMock())
    run.publisher.wait_until_published = feel
    run.store = mock.Mock(finish=lambda step: felt.append(f"finished {step}"))
    run.checkpoints, run.save = mock.Mock(wait=feel), lambda: (feel(), run.heartbeat.report_progress())
    run.do = feel
    train.finish(run)
    # The weights, wait, save, wait, the model: a sign between any two. Actors end by the last.
    assert felt == [0, 1, 2, 3, 4, "finished 10"]


@pytest.mark.parametrize(
    ("finished", "step", "has_model"), [(10, 10, True), (None, 10, True), (10, 10, False), (8, 8, True)]
)
def test_finished_run_that_is_started_again_ends_at_once_and_waits_for_no_actor(
    monkeypatch, tmp_path, finished, step, has_model
):
    """What an earlier start did not do, or was not asked for, is done; that begins with weights for actors."""

    class PublishedError(Exception):
        pass

    run = run_of(step=step, saved=step, num_updates=10)
    run.folder, run.finished_step, run.store = tmp_path, finished, mock.Mock()
    if has_model:
        RunFolder(tmp_path).model(step).mkdir(parents=True)
    monkeypatch.setattr(train, "publish", mock.Mock(side_effect=PublishedError))
    if (finished, step, has_model) == (10, 10, True):
        train.train(run)
        run.store.finish.assert_called_once_with(10)
    else:
        with pytest.raises(PublishedError):
            train.train(run)
