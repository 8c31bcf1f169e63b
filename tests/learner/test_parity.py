"""Probes are settled against a real store and the real scorer; an independent forward makes the honest answers."""

import contextlib
import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from bridge.rollout_types import Group, Sampling, Task, Version
from bridge.store.open import SqliteStore
from bridge.store.store_types import FencedError
from learner import parity
from learner.data.problem import Problem
from learner.evaluation.pinned_requests import PinnedRequests
from learner.model.decoder import make_apply
from learner.update.packing import pack_groups
from tests.bridge.factories import make_group, make_rollout
from tests.learner.streams import MODEL, TEMPERATURE, config_of, fresh_params, steps_of

CONFIG = config_of()
VERSION = Version(incarnation=2, step=7)
OFF = 0.01
FORWARD = jax.jit(make_apply(MODEL))


@pytest.fixture(scope="module")
def steps():
    return steps_of(CONFIG)


def alone_logprobs(params, prompt, tokens):
    """log p of each response token, unpacked, by a float64 softmax over the whole vocabulary."""
    n = prompt.size + tokens.size
    ids, positions = np.zeros((1, 16), np.int32), np.arange(16)[None]
    ids[0, :n] = [*prompt, *tokens]
    hidden = np.asarray(FORWARD(params, ids, positions, (positions < n).astype(np.int32))[0, :n], np.float64)
    logits = hidden @ np.asarray(params["lm_head"]["kernel"], np.float64).T / TEMPERATURE
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(prompt.size - 1, n - 1), tokens].astype(np.float32)


def answer(ticket, params, actor: str, *, off: float = 0.0) -> Group:
    """Random responses with their true logprobs; `off` goes to one token of the last one."""
    random = np.random.default_rng(abs(ticket.order) % 1000)
    rollouts = []
    for i in range(ticket.num_samples):
        tokens = random.integers(0, MODEL.vocab_size, 7 + i).astype(np.int32)
        logprobs = alone_logprobs(params, ticket.prompt_tokens, tokens)
        if i == ticket.num_samples - 1:
            logprobs[2] -= off
        rollouts.append(
            make_rollout(
                tokens.size,
                step=ticket.min_version.step,
                tokens=tokens,
                behavior_logprobs=logprobs,
                finish="length",
                reward=0.0,
            )
        )
    return make_group(ticket, rollouts=tuple(rollouts), incarnation=ticket.min_version.incarnation, actor=actor)


@dataclasses.dataclass
class Actors:
    """Serves one ticket a poll, by each of its actors in turn; a fenced one drops out."""

    store: SqliteStore
    params: Any
    off: dict[str, float]
    served: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    max_polls: int = 10

    def __post_init__(self):
        self.turns = itertools.cycle(self.off)

    def __call__(self):
        self.max_polls -= 1
        assert self.max_polls >= 0, f"the probe is never settled; served {self.served}"
        actor = next(self.turns)
        try:
            (ticket,) = self.store.claim(actor, limit=1, lease_s=1000)
        except FencedError:
            return
        self.served.append((actor, ticket.id))
        self.store.put_group(answer(ticket, self.params, actor, off=self.off[actor]))


def settle(run) -> float:
    """The probe against the run's own parameters; who is fenced is fenced in the store too."""

    def fence(actor: str, reason: str, off_nats: float) -> None:
        run.store.fence(actor, reason)
        run.fenced_actors.add(actor)
        run.off.append(off_nats)

    return parity.settle(
        run.probe,
        score=functools.partial(run.steps.score, run.params),
        packing=run.config.packing,
        bound=run.config.parity_bound,
        fence=fence,
    )


@pytest.fixture
def start(tmp_path, steps):
    with contextlib.closing(SqliteStore(tmp_path / "store.db")) as store:

        def start(off: dict[str, float], *, num_problems=2, config=CONFIG) -> Any:
            """A run with a probe out; `off` says by how many nats each actor is wrong."""
            actors = Actors(store, fresh_params(), off)
            run = SimpleNamespace(
                config=config,
                steps=steps,
                params=fresh_params(),
                store=store,
                probe=PinnedRequests("probe", store, on_wait=actors),
                fenced_actors=set(),
                off=[],
                actors=actors,
            )
            task = Task.judged_by("exact", answer="")
            problems = [(Problem(str(n), np.array([n + 1, 3], np.int32), task), 2) for n in range(num_problems)]
            run.probe.start(problems, Sampling(max_tokens=12, temperature=TEMPERATURE), version=VERSION, round=0)
            return run

        yield start


@pytest.mark.heavy
def test_settle_answer_with_the_learners_logprobs_passes(start):
    run = start({"good": 0.0})
    worst = settle(run)
    assert 0 <= worst < 2e-5 < CONFIG.parity_bound
    assert run.probe.version is None
    assert run.fenced_actors == set() and run.store.fenced("good") is None
    assert len(run.actors.served) == 2  # each ticket once
    assert run.store.counts()["acknowledged"] == 2 and run.store.counts()["reissued"] == 0


def test_settle_says_that_a_wait_is_over_before_it_scores(start, steps):
    run, said = start({"good": 0.0}), []
    parity.settle(
        run.probe,
        score=lambda batch: said.append("score") or np.asarray(steps.score(run.params, batch)),
        packing=CONFIG.packing,
        bound=CONFIG.parity_bound,
        fence=lambda *_: pytest.fail("fenced"),
        before_score=lambda: said.append("before"),
    )
    assert said == ["before", "score"] * 2


def test_settle_answer_with_exactly_steps_score_as_logprobs_is_off_by_nothing(start, steps):
    run = start({"good": 0.0}, num_problems=1)
    (ticket,) = run.store.claim("good", limit=1, lease_s=1000)
    group = answer(ticket, fresh_params(), "good")
    (micro,) = pack_groups([group], packing=CONFIG.packing, loss=CONFIG.loss, max_response_tokens=12)
    scores = np.asarray(steps.score(fresh_params(), micro.batch))
    rollouts = []
    for rollout in group.rollouts:  # find its packed place by its tokens
        whole = [*group.prompt_tokens, *rollout.tokens]
        places = [(b, s) for b in range(2) for s in range(16) if [*micro.batch.tokens[b, s : s + len(whole)]] == whole]
        ((b, s),) = places
        rollouts.append(dataclasses.replace(rollout, behavior_logprobs=scores[b, s + 2 : s + len(whole)]))
    run.store.put_group(dataclasses.replace(group, rollouts=tuple(rollouts)))
    assert settle(run) == 0.0
    assert run.actors.served == []


def test_settle_answer_off_by_a_hundredth_of_a_nat_fences_its_actor_and_is_asked_for_again(start):
    run = start({"bad": OFF, "good": 0.0})
    worst = settle(run)
    assert worst < 2e-5  # among the answers that pass
    assert run.fenced_actors == {"bad"}
    reason = run.store.fenced("bad")
    assert reason is not None and "0.01 nats at version 2:7" in reason and "0.0001" in reason
    with pytest.raises(FencedError):
        run.store.claim("bad", limit=1, lease_s=1)
    assert run.store.fenced("good") is None
    np.testing.assert_allclose(run.off, [OFF], atol=2e-5)
    # The bad actor's ticket was offered again, and both tickets were answered by the other one.
    (_, wrong), *later = run.actors.served
    assert [actor for actor, _ in later] == ["good", "good"] and wrong in [i for _, i in later]
    assert run.store.counts()["reissued"] == 1 and run.store.counts()["acknowledged"] == 2
    assert run.probe.version is None


def test_settle_answer_under_the_bound_counts_in_the_worst(start):
    run = start({"near": 5e-5})
    np.testing.assert_allclose(settle(run), 5e-5, atol=1e-5)
    assert run.fenced_actors == set()


def test_settle_answer_that_is_higher_than_the_learners_is_off_too(start):
    run = start({"bad": -OFF, "good": 0.0})
    settle(run)
    assert run.fenced_actors == {"bad"}


@dataclasses.dataclass
class NaNScorer:
    """The real scorer, but for one sampled token (the last of a batch) in every n-th batch, or for all of them."""

    steps: Any
    whole: bool = False
    one_batch_in: int = 1
    num_batches: int = 0

    def score(self, params, batch):
        logprobs = np.array(self.steps.score(params, batch))
        if self.num_batches % self.one_batch_in == 0:
            logprobs[... if self.whole else tuple(np.argwhere(batch.loss_mask)[-1])] = np.nan
        self.num_batches += 1
        return logprobs


@pytest.mark.heavy
@pytest.mark.parametrize("where", ["every token", "one token", "one token of the first of two batches"])
def test_settle_scorer_that_gives_nan_passes_nobody(start, steps, where):
    if "batches" in where:  # two sequences, of 9 and 10 tokens, in rows of 16: one a batch
        config = config_of(rows=1)
        run = start({"a": 0.0, "b": 0.0}, num_problems=1, config=config)
        run.steps = NaNScorer(steps_of(config), one_batch_in=2)
    else:
        run = start({"a": 0.0, "b": 0.0}, num_problems=1)
        run.steps = NaNScorer(steps, whole=where == "every token")
    with pytest.raises(AssertionError, match="never settled"):
        settle(run)
    assert run.steps.num_batches == 2 * run.steps.one_batch_in  # both answers were looked at, whole
    assert run.fenced_actors == {"a", "b"}
    assert run.store.fenced("a") and run.store.fenced("b")
    assert run.store.counts()["acknowledged"] == 0 and run.probe.version is not None


def test_settle_two_answers_of_a_bad_actor_that_are_here_already_are_both_asked_for_again(start):
    run = start({"good": 0.0})
    for ticket in run.store.claim("bad", limit=2, lease_s=1000):
        run.store.put_group(answer(ticket, fresh_params(), "bad", off=OFF))
    assert settle(run) < 2e-5
    assert run.fenced_actors == {"bad"}
    assert {i for _, i in run.actors.served} == {"probe-2:7-000000", "probe-2:7-000001"}
    assert run.store.counts() | {"acknowledged": 2, "open": 0, "claimed": 0, "done": 0} == run.store.counts()


def test_settle_actor_that_is_wrong_after_a_right_answer_is_fenced_too(start):
    run = start({"good": 0.0})
    for ticket, off in zip(run.store.claim("moody", limit=2, lease_s=1000), (0.0, OFF), strict=True):
        run.store.put_group(answer(ticket, fresh_params(), "moody", off=off))
    assert settle(run) < 2e-5
    assert run.fenced_actors == {"moody"}
    assert "probe-2:7-000001" in {i for _, i in run.actors.served}
    assert run.store.counts() | {"acknowledged": 2, "open": 0, "claimed": 0, "done": 0} == run.store.counts()
