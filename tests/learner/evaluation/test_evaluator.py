import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from bridge.heartbeat_types import Heartbeat
from bridge.rollout_types import Task, Version
from bridge.store.open import SqliteStore
from configs import schema, sections
from configs.run_folder import RunFolder
from configs.sections.evaluation import EvaluationSet
from learner.data.problem import Problem
from learner.evaluation import evaluator
from learner.evaluation.eval_sets import ProblemSet
from learner.evaluation.evaluator import Evaluator, is_due, max_samples_out, row_kind
from learner.metrics.metrics_writer import MetricsWriter, read_rows
from tests.bridge.factories import make_group, make_report, make_rollout

SETS = {
    "heldout": EvaluationSet(every_n_steps=4),
    "hard": EvaluationSet(task="chain_sum", verifier="exact", num_problems=3, k=4, temperature=0.5, top_p=0.9),
}


def config_of(**evaluation: Any) -> schema.Config:
    values: dict[str, Any] = {"num_problems": 2, "every_n_steps": 2, "sets": SETS} | evaluation
    return schema.Config(
        preset="test",
        run=sections.RunConfig(num_updates=10),
        rounds=sections.RoundsConfig(groups_per_round=8, groups_per_update=2, samples_per_group=2),
        admission=sections.AdmissionConfig(policy="window"),
        publish=sections.PublishConfig(when="every"),
        evaluation=sections.EvaluationConfig(**values),
    )


class Job:
    """A learner's store and evaluations, and an actor that serves what is asked of it."""

    def __init__(self, folder, *, restored_step=0, incarnation=0, **evaluation: Any) -> None:
        self.config, self.incarnation = config_of(**evaluation), incarnation
        self.run = RunFolder(folder)
        self.store = SqliteStore(folder / "store.sqlite")
        self.store.withdraw_pinned()  # as a learner that resumes does
        self.metrics = MetricsWriter(folder, restored_step=restored_step, incarnation=incarnation)
        self.served: list[tuple[str, int]] = []
        self.serves = 10**9
        sets = [
            ProblemSet(
                name=name,
                config=how,
                problems=tuple(
                    Problem(f"{name} {n}", np.array([n], np.int32), Task.judged_by("exact", answer="7"))
                    for n in range(how.num_problems)
                ),
            )
            for name, how in self.config.evaluation_sets.items()
        ]
        self.evaluations = Evaluator(
            self.config,
            sets,
            self.store,
            stop_token_ids=(1,),
            metrics=self.metrics,
            accept=lambda group, ticket: True,
            fenced_actors=frozenset,
            on_wait=self.wait,
            kept=lambda step, name, groups: None,
        )

    def wait(self):
        assert self.serve(1), "the learner waits for a ticket that was never offered"
        self.evaluations.look()  # as a learner that waits does

    def serve(self, limit, *, step=None):
        """Claims and serves up to so many tickets; returns how many there were."""
        tickets = self.store.claim("actor", limit=limit, lease_s=1000)
        for ticket in tickets:
            self.served.append((ticket.id, ticket.num_samples))
            rewards = [float(i == 0) for i in range(ticket.num_samples)]
            at = ticket.min_version.step if step is None else step
            rollouts = tuple(make_rollout(reward=r, step=at) for r in rewards)
            group = make_group(ticket, actor="actor", rollouts=rollouts, incarnation=self.incarnation)
            self.store.put_group(group)
        return len(tickets)

    def publish(self, step):
        if self.evaluations.waits:
            self.evaluations.wait()
        self.evaluations.start(version=Version(incarnation=self.incarnation, step=step), round=0)

    def rows(self):
        return [(r["kind"], r["step"]) for r in read_rows(self.run.metrics) if r["kind"].startswith("eval")]

    def close(self):
        for part in (self.metrics, self.store):
            part.close()


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "LOOK_S", 0.0)  # it looks each time that it may
    with contextlib.ExitStack() as stack:

        def start_it(**values):
            return stack.enter_context(contextlib.closing(Job(tmp_path, **values)))

        yield start_it


def due_steps(how, *, num_updates, publish_every=1, first=0, last=None):
    """The steps at which a set is evaluated, asked after each publish, the last step's included."""
    found = []
    for step in [s for s in range(first, num_updates) if s % publish_every == 0] + [num_updates]:
        if is_due(how, step=step, last=last, num_updates=num_updates):
            last = step
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("every", "run", "wanted"),
    [
        (4, dict(num_updates=10), [0, 4, 8, 10]),
        (5, dict(num_updates=10), [0, 5, 10]),  # the end is a multiple too: once
        (20, dict(num_updates=10), [0, 10]),
        (0, dict(num_updates=10), [0, 10]),  # only at the start and the end
        (1, dict(num_updates=3), [0, 1, 2, 3]),
        (4, dict(num_updates=13, publish_every=3), [0, 6, 9, 12, 13]),  # due at 4, 8 and 12: at the next publish
        (4, dict(num_updates=10, first=6, last=6), [8, 10]),  # after a restart
        (0, dict(num_updates=10, first=10, last=10), []),  # after the last evaluation
    ],
)
def test_is_due_at_the_start_every_n_steps_and_at_the_end(every, run, wanted):
    assert due_steps(EvaluationSet(every_n_steps=every), **run) == wanted


def test_sets_are_asked_apart_each_at_its_own_steps_and_as_it_says(start):
    job = start()
    for step in range(11):
        job.publish(step)
        job.serve(100)
        job.evaluations.poll()
    assert job.rows() == job_rows([("heldout", s) for s in (0, 4, 8, 10)], [("hard", s) for s in range(0, 11, 2)])
    assert {n for id_, n in job.served if "hard" in id_} == {4} and {n for i, n in job.served if "hard" not in i} == {1}
    hard = next(r for r in read_rows(job.run.metrics) if r["kind"] == "eval/hard")
    assert hard["eval/hard/avg@4"] == 0.25 and hard["eval/hard/pass@4"] == 1.0 and hard["problems"] == 3
    held_out = next(r for r in read_rows(job.run.metrics) if r["kind"] == "eval")
    assert held_out["eval/reward"] == held_out["eval/heldout/avg@1"] == 1.0
    assert (hard["temperature"], hard["top_p"], hard["k"], hard["source"]) == (0.5, 0.9, 4, "chain_sum")
    assert hard["verdicts"]["unscored"] == 12 and hard["notes"] == []


def job_rows(*rows):
    return sorted(((row_kind(name), step) for of_set in rows for name, step in of_set), key=lambda r: (r[1], r[0]))


def test_evaluation_under_way_holds_up_no_publish_and_says_the_weights_that_it_is_by(start):
    job = start()
    job.publish(0)
    assert job.evaluations.in_progress
    job.serve(1)
    for step in (1, 2, 4):
        job.evaluations.poll()
        job.publish(step)
    assert job.rows() == [] and len(job.store.claim("other", limit=100, lease_s=1000)) == 4  # nothing was asked twice


def test_evaluation_that_ends_on_newer_weights_has_their_range(start):
    job = start(sets={})
    job.publish(0)
    job.serve(1)
    job.serve(1, step=3)
    job.evaluations.poll()
    (row,) = [r for r in read_rows(job.run.metrics) if r["kind"] == "eval"]
    assert (row["step"], row["eval/version"], row["eval/last_version"]) == (0, 0, 3)


def test_publish_that_waits_has_evaluations_of_one_version(start):
    job = start(at_publish="wait", sets={"heldout": EvaluationSet(k=2)})
    assert job.config.evaluation.at_publish == "wait" and job.evaluations.waits
    for step in (0, 2, 4):
        job.publish(step)
    assert job.rows() == [("eval", 0), ("eval", 2)] and len(job.served) == 4


def test_evaluation_takes_no_more_than_its_share_beside_training_and_all_when_it_is_waited_for(start):
    # Two engines of 8 places: of 16 a half; a problem of `hard` has 4 samples.
    job = start(max_engine_fraction=0.5, sets=dict(SETS, hard=dataclasses.replace(SETS["hard"], num_problems=5)))
    for name in ("a", "b"):
        beat = Heartbeat(process=name, role="actor", pid=1, time_s=0.0, report=make_report(max_sequences=8))
        job.store.heartbeat(beat)
    job.publish(0)
    out = job.store.claim("actor", limit=100, lease_s=1000)
    assert sum(t.num_samples for t in out) == 6  # two of the held-out problems, and one of `hard`: two would be 10
    for ticket in out[:2]:
        job.store.put_group(make_group(ticket, actor="actor"))
    job.evaluations.poll()
    assert job.rows() == [("eval", 0)]
    assert sum(t.num_samples for t in job.store.claim("actor", limit=100, lease_s=1000)) == 4  # 4 + 4 are out
    for ticket in out[2:]:
        rollouts = (make_rollout(),) * 4
        job.store.put_group(make_group(ticket, actor="actor", rollouts=rollouts))
    job.evaluations.poll()
    assert len(job.store.claim("other", limit=100, lease_s=1000)) == 1
    assert job.store.counts()["open"] == 0 and job.evaluations.in_progress


@pytest.mark.parametrize(
    ("share", "reports", "wanted"), [(1.0, [8], None), (0.5, [8, 9], 8), (0.01, [8], 1), (0.5, [], 32)]
)
def test_max_samples_out_is_a_share_of_the_live_engines_places(share, reports, wanted):
    beats = [
        Heartbeat(process=f"a{i}", role="actor", pid=1, time_s=0.0, report=make_report(max_sequences=n))
        for i, n in enumerate(reports)
    ]
    starting = Heartbeat(process="new", role="actor", pid=1, time_s=0.0)
    assert max_samples_out(config_of(max_engine_fraction=share), [*beats, starting]) == wanted


@pytest.mark.parametrize("num_served", range(6))
def test_restart_in_the_middle_of_an_evaluation_loses_and_repeats_none(start, num_served):
    """Killed after any number of its groups: each set's rows are those of a run that was not."""
    job = start()
    job.publish(0)
    job.serve(100)
    job.evaluations.poll()
    job.publish(4)
    job.serve(num_served)
    job.evaluations.poll()
    job.close()
    again = start(restored_step=4, incarnation=1)
    again.publish(4)
    again.evaluations.wait()
    wanted = [("eval", 0), ("eval", 4), ("eval/hard", 0), ("eval/hard", 4)]
    assert sorted(again.rows()) == wanted
    # What was complete is not asked again.
    finished = {"heldout"} if num_served >= 2 else set()
    finished |= {"hard"} if num_served >= 5 else set()
    asked = {"hard" if "hard" in id_ else "heldout" for id_, _ in again.served}
    assert asked == {"heldout", "hard"} - finished


def test_restart_from_before_an_evaluation_makes_it_again_once(start):
    job = start(every_n_steps=4)
    for step in (0, 4):
        job.publish(step)
        job.serve(100)
        job.evaluations.poll()
    job.close()
    again = start(every_n_steps=4, restored_step=3, incarnation=1)  # the checkpoint is of before step 4
    again.publish(3)
    assert not again.evaluations.in_progress
    again.publish(4)
    again.evaluations.wait()
    assert again.rows() == job_rows([("heldout", 0), ("heldout", 4)], [("hard", 0), ("hard", 4)])


def test_sets_that_are_waited_for_while_it_is_looked_for_them_are_settled_once(start, caplog):
    job = start()
    job.publish(0)
    job.evaluations.wait()
    assert job.rows() == job_rows([("heldout", 0)], [("hard", 0)]) and not job.evaluations.in_progress
    assert not [r for r in caplog.records if "evaluation without scored responses" in r.getMessage()]


def test_evaluation_that_nobody_could_judge_has_no_row_and_training_goes_on(start):
    job = start(sets={})
    job.publish(0)
    for ticket in job.store.claim("actor", limit=10, lease_s=1000):
        job.store.fail_ticket(ticket.id, "no judge", max_attempts=1)
    job.evaluations.poll()
    assert job.rows() == [] and not job.evaluations.in_progress
