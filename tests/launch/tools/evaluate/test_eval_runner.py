import asyncio
import json
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from actor.engine_protocol import EngineDeadError, Sample
from actor.rewards.scorer import RewardResult
from actor.rewards.types import Response
from actor.rewards.verifier_pool import VerifierError
from actor.sampling import Sampler
from bridge.rollout_types import RewardScore, Task, Version
from configs.run_folder import RunFolder
from configs.sections import EvaluationSet
from launch.tools.evaluate.eval_runner import LINE_S, EvalProblems, Progress, Runner, leaves, open_problems, tickets_of
from launch.tools.evaluate.results import keep_beside, print_table, results_of, write
from learner.data.problem import Problem
from learner.data.row_filter import write_gold_failures
from learner.evaluation.eval_sets import ProblemSet
from tests.learner.data.rooms import config_of, jsonl, rows_of
from tests.learner.model_folder import make_model_folder

HOW = EvaluationSet(task="chain_sum", verifier="exact", k=2, temperature=0.5, top_p=0.9, max_tokens=4, pass_reward=1.0)


def problem_set(count, name="a", **fields):
    problems = tuple(
        Problem(f"q{n}", np.array([n], np.int32), Task.judged_by("exact", answer="1")) for n in range(count)
    )
    return ProblemSet(name=name, config=HOW, problems=problems, **fields)


class Engine:
    """Answers a prompt token n with n, after others had their turn; remembers how many ran at once."""

    version = Version(incarnation=0, step=7)

    def __init__(self, *, dies=False) -> None:
        self.running = self.most = 0
        self.ids: list[str] = []
        self.dies = dies

    async def sample(self, prompt_tokens, sampling, *, request_id, priority, begun=None):
        if self.dies:
            raise EngineDeadError("gone")
        self.ids.append(request_id)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(int(prompt_tokens[0]) % 3 + 1):
            await asyncio.sleep(0)
        self.running -= 1
        return Sample(
            tokens=prompt_tokens, logprobs=np.zeros(1, np.float32), token_versions=(self.version,), finish="stop"
        )


class Rewards:
    """1 for even answers; fails on some, the first times that it is asked."""

    def __init__(self, failures: dict[str, int] | None = None) -> None:
        self.failures = dict(failures or {})

    async def score(self, response, task):
        if self.failures.get(response.text, 0) > 0:
            self.failures[response.text] -= 1
            raise VerifierError("broken")
        reward = float(int(response.text) % 2 == 0)
        score = RewardScore(name="exact", value=reward, verdict="ok" if reward else "wrong", answer=response.text)
        return RewardResult(reward=reward, scores=(score,))


def read_first(ticket, sample) -> Response:
    return Response(text=str(sample.tokens[0]), finish=sample.finish, num_tokens=1)


def run(count, *, places=3, failures=None, dies=False, attempts=3):
    engine: Any = Engine(dies=dies)
    rewards: Any = Rewards(failures)
    timeline: Any = None
    sampler = Sampler(engine, timeline=timeline, max_lag_steps=None)
    runner = Runner(sampler, rewards, read=read_first, places=places, max_attempts=attempts)
    tickets = tickets_of(problem_set(count), version=Engine.version, stop_token_ids=(9,), place=0)
    ended: list[tuple[str, bool]] = []
    groups = asyncio.run(runner.run(tickets, done=lambda t, g: ended.append((t.id, g is not None))))
    return engine, tickets, groups, ended


@pytest.mark.parametrize("places", [1, 3, 100])
def test_run_samples_every_problem_k_times_in_its_places_and_keeps_the_order(places):
    engine, tickets, groups, ended = run(10, places=places)
    assert [g.ticket_id for g in groups] == [t.id for t in tickets] and {len(g.rollouts) for g in groups} == {2}
    assert engine.most == min(places, 20) and len(engine.ids) == len(set(engine.ids)) == 20
    assert sorted(ended) == sorted((t.id, True) for t in tickets)
    assert [g.rollouts[0].reward for g in groups] == [1.0, 0.0] * 5 and {g.min_step for g in groups} == {7}
    sampling = tickets[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop_token_ids) == (0.5, 0.9, 4, (9,))


def test_problem_that_a_verifier_fails_on_is_tried_again_and_left_out_in_the_end():
    _, tickets, groups, ended = run(4, failures={"1": 1, "2": 10**6})
    assert [g.ticket_id for g in groups] == [tickets[i].id for i in (0, 1, 3)]
    assert (tickets[2].id, False) in ended and len(ended) == 4


def test_engine_that_dies_ends_it():
    with pytest.raises(ExceptionGroup) as e:
        run(3, dies=True)
    assert set(leaves(e.value)) == {"gone"}


def test_problems_of_a_run_leave_out_the_rows_that_the_run_set_aside(tmp_path):
    model = make_model_folder(tmp_path / "m")
    config = config_of(path=jsonl(tmp_path, rows_of(100)), num_problems=100)
    first = open_problems(config, model).sets[0].problems
    run = RunFolder(tmp_path)
    row = next(i for i, r in enumerate(rows_of(100), start=1) if r["prompt"] == first[0].question)
    write_gold_failures(run.gold_failures, {"": {row: "its answer is wrong"}})
    assert [p.question for p in open_problems(config, model, run).sets[0].problems] == [p.question for p in first[1:]]


def results(count, **failures):
    _, _, groups, _ = run(count, **failures)
    problems: Any = EvalProblems([problem_set(count), problem_set(2, name="b")], None)  # pyright: ignore[reportArgumentType]
    return results_of(problems, {"a": groups}, decode=str, show=2, head={"model": "/m/tiny", "step": 7})


def test_results_have_each_set_with_its_estimates_and_samples(tmp_path, capsys):
    found = results(4, failures={"2": 10**6})
    first, second = found["sets"]
    assert (first["set"], first["problems"], first["left_out"], first["k"]) == ("a", 3, 1, 2)
    assert first["metrics"]["pass@1"]["value"] == pytest.approx(1 / 3) and "maj@2" in first["metrics"]
    assert [s["problem"] for s in first["samples"]] == [0, 3] and len(first["samples"][0]["responses"]) == 2
    assert (second["problems"], second["left_out"], second["metrics"]) == (0, 2, {})
    write(found, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(found))
    print_table(found, Console(width=80))
    out = capsys.readouterr().out
    assert "tiny" in out and "pass@2" in out and "0.3333" in out and "b: 2 problems not scored" in out


def test_progress_without_a_terminal_is_a_line_now_and_then_and_at_the_end(capsys):
    now = 0.0
    progress = Progress({"a": 8}, console=Console(width=80, force_terminal=False), clock=lambda: now)
    _, tickets, groups, _ = run(4)
    with progress:
        progress.begin("a")
        for i, (ticket, group) in enumerate(zip(tickets, groups, strict=True)):
            now += LINE_S if i == 1 else 0.5
            progress.done(ticket, group)
    lines = [line for line in capsys.readouterr().out.splitlines() if "samples" in line]
    assert len(lines) == 2 and lines[0].startswith("a: 4/8 samples, reward 0.500") and lines[1].startswith("a: 8/8")
    assert progress.num_tokens == 8 and progress.seconds == LINE_S + 1.5


def test_results_of_a_run_are_beside_it_or_it_is_said_why_not(tmp_path, capsys):
    found = results(4) | {"run_dir": str(tmp_path)}
    keep_beside(found, RunFolder(tmp_path))
    (file,) = (tmp_path / "evaluated").iterdir()
    assert file.name.startswith("7-") and json.loads(file.read_text())["sets"] == json.loads(json.dumps(found["sets"]))
    assert f"launch.tools.report --run_dir={tmp_path}" in capsys.readouterr().out
    keep_beside(found, RunFolder(tmp_path / "gone"))
    assert "gone/evaluated: " in (said := capsys.readouterr().err) and "takes --results" in said
