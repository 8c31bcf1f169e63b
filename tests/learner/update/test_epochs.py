"""Several passes over a batch, and the proximal policies, through the loop's own functions.

The oracle is written apart: plain, unpacked rows, the objectives as their papers write them, and AdamW in numpy. It
keeps its own parameters of the batch's start or of the last publish, and goes from pass to pass on its own.
"""

import collections
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.param_names import flatten, unflatten
from learner import train as learner_train
from learner.model.decoder import make_apply
from learner.policy_trainer import EpochCache, PolicyTrainer
from learner.update.frozen_policies import FrozenPolicies
from learner.update_metrics import StepMetrics
from tests.learner.streams import (
    MODEL,
    TEMPERATURE,
    NumpyAdamW,
    config_of,
    fresh_params,
    padded,
    random_groups,
    relative_differences,
    steps_of,
    stream,
)

NUM_UPDATES = 4
LOSSES: dict[str, dict[str, Any]] = {
    "decoupled_ppo": dict(name="decoupled_ppo", clip_low=0.02, clip_high=0.03, max_weight=5.0),
    "tis": dict(name="tis", clip_low=0.03, clip_high=0.02, max_weight=2.0),
    "grpo_clip": dict(name="grpo_clip", clip_low=0.2, clip_high=0.28),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "two passes": dict(epochs=2, publish_every=1, proximal="batch"),
    "three passes by rounds": dict(epochs=3, proximal="batch"),
    "two updates a version": dict(publish_every=2, proximal="published"),
    "two passes, two updates a version": dict(epochs=2, publish_every=2, proximal="published"),
    "two passes a published version": dict(epochs=2, publish_every=1, proximal="published"),
}
CASES = [
    ("decoupled_ppo", "two passes"),
    ("decoupled_ppo", "two updates a version"),
    ("decoupled_ppo", "two passes, two updates a version"),
    ("tis", "two passes"),
    ("tis", "three passes by rounds"),
    ("tis", "two updates a version"),
    ("tis", "two passes a published version"),
    ("grpo_clip", "two passes"),
    ("grpo_clip", "two passes, two updates a version"),
]


def config_in(loss: str, setting: str):
    fields = LOSSES[loss] | SETTINGS[setting]
    if loss == "grpo_clip":
        del fields["proximal"]
    return config_of(advantage="mean_baseline", **fields)


@functools.cache
def steps_in(loss: str, setting: str):
    """Compiled once for all tests."""
    return steps_of(config_in(loss, setting))


def run_in(loss: str, setting: str) -> Any:
    return run_of(config_in(loss, setting), steps=steps_in(loss, setting))


def run_of(config, *, steps=None, spans=None) -> Any:
    """What the loop's functions use of a run, its steps and books real."""
    steps = steps or steps_of(config)
    state = steps.init(fresh_params())

    def span(name, start_s, end_s, **fields):
        if spans is not None:
            spans.append((name, fields))

    def end_update():
        run.step = run.stream.step = run.step + 1

    publisher: Any = SimpleNamespace(metrics=lambda: {}, is_published=lambda step: True)
    checkpoints: Any = SimpleNamespace(num_failed=0)
    trainer = PolicyTrainer(
        config=config,
        architecture=MODEL,
        steps=steps,
        anchors=FrozenPolicies(steps, config, load_reference=fresh_params, params=state.params),
        kept=EpochCache(steps, epochs=config.rounds.epochs),
        state=state,
        publisher=publisher,
        checkpoints=checkpoints,
    )
    run: Any = SimpleNamespace(
        helper=None,
        config=config,
        step=0,
        trainer=trainer,
        has_devices=True,
        turn=None,
        do=lambda command: command.perform(trainer),
        stream=SimpleNamespace(
            step=0,
            wait_s=0.0,
            num_dropped_updates=0,
            planner=SimpleNamespace(num_blocked={}),
            group_filter=SimpleNamespace(dropped=collections.Counter(), fresh_from=None),
            trained=lambda *a: None,
            take_rewards=lambda: {},
            prompts=SimpleNamespace(metrics=lambda: {}),
            poll=lambda: None,
            end_update=end_update,
            drop_update=lambda needs_fresh: None,
            take_samples=lambda: (),
        ),
        samples=SimpleNamespace(trained=lambda step, samples: None),
        rows=[],
        timeline=SimpleNamespace(took=span),
        heartbeat=SimpleNamespace(check=lambda: None, report_progress=lambda: None, updated=lambda: None),
        publisher=publisher,
        checkpoints=checkpoints,
    )
    run.metrics = SimpleNamespace(write=lambda kind, step, row, **more: run.rows.append(row))
    return run


def books_of(run) -> StepMetrics:
    store: Any = SimpleNamespace(num_unreadable=0, num_reissued=lambda: 0, heartbeats=lambda: [], now_s=lambda: 0.0)
    return StepMetrics(MODEL, stream=run.stream, store=store, num_skipped=0)


def train(run, books, groups) -> dict[str, Any]:
    """One update; its row."""
    for micro in stream(run.config, groups):
        learner_train.accumulate(run, micro, books)
    learner_train.update(run, books)
    return run.rows[-1]


def logprobs_of(params, ids):
    """By the book: unpacked rows, full logits; of every token but the first."""
    tokens, segments = ids
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = make_apply(MODEL, remat="none")(params, tokens, positions, segments)
    logp = jax.nn.log_softmax(hidden[:, :-1] @ params["lm_head"]["kernel"].T / TEMPERATURE)
    return jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


def book_loss(params, ids, mu, adv, weight, prox, *, loss):
    """DeepSeekMath eq. 3, and AReaL's objective with rho = min(pi_prox / mu, C), summed over the batch; and clips."""
    mu, adv, weight = mu[:, 1:], adv[:, 1:], weight[:, 1:]
    old, rho = (mu, 1.0) if loss.name == "grpo_clip" else (prox, jnp.minimum(jnp.exp(prox - mu), loss.max_weight))
    r = jnp.exp(logprobs_of(params, ids) - old)
    inside = jnp.clip(r, 1 - loss.clip_low, 1 + loss.clip_high)
    value = -(rho * jnp.minimum(r * adv, inside * adv) * weight).sum()
    return value, ((inside * adv < r * adv) & (weight > 0)).sum() / (weight > 0).sum()


@functools.cache
def oracle_of(loss: str):
    """Gradient and logprobs; a setting changes neither."""
    config = config_in(loss, "two passes").loss
    return jax.jit(jax.value_and_grad(functools.partial(book_loss, loss=config), has_aux=True)), jax.jit(logprobs_of)


@pytest.mark.heavy
@pytest.mark.parametrize(("loss", "setting"), CASES)
def test_every_pass_has_the_gradient_of_the_books(loss, setting):
    config = config_in(loss, setting)
    epochs, publish_every = config.rounds.epochs, config.publish.every_n_steps
    run, (gradient, score) = run_in(loss, setting), oracle_of(loss)
    books, adam, num_steps = books_of(run), NumpyAdamW(config.optimizer), 0
    published = start = fresh_params()
    num_clipped = 0.0
    for n in range(NUM_UPDATES):
        groups = random_groups(n, 5)
        rows = padded(groups, config, 16)
        start = jax.tree.map(np.array, run.trainer.state.params)
        if publish_every and n % publish_every == 0:
            run.trainer.anchors.publish(run.trainer.state.params)
            published = start
        row = train(run, books, groups)
        prox = score(published if config.loss.proximal == "published" else start, rows[0])
        want = start
        for epoch in range(epochs):
            (value, clipped), grads = gradient(want, *rows, prox)
            flat = flatten(grads)
            norm = np.sqrt(sum((np.float64(g) ** 2).sum() for g in flat.values()))
            if epoch in (0, epochs - 1):
                of = "last_epoch/{}" if epoch else "{}"
                np.testing.assert_allclose(row[of.format("loss")], value, rtol=2e-5, atol=2e-6)
                np.testing.assert_allclose(row[of.format("grad_norm")], norm, rtol=2e-5)
            rate = config.optimizer.learning_rate * min(1, (num_steps + 1) / config.optimizer.warmup_steps)
            want = unflatten(adam.update(flatten(want), flat, rate))
            want = jax.tree.map(lambda x: np.asarray(x, np.float32), want)
            num_steps, num_clipped = num_steps + 1, num_clipped + float(clipped)
        differences = relative_differences(flatten(run.trainer.state.params), flatten(want))
        assert max(differences.values()) <= 2e-5, (n, differences)
    assert int(run.trainer.state.step) == run.step == NUM_UPDATES and int(run.trainer.state.skipped_updates) == 0
    assert run.trainer.steps.num_compilations == 2
    assert num_clipped > 0.01, "the clip was never reached, so it was not tried"


@pytest.mark.heavy
@pytest.mark.parametrize("loss", ["decoupled_ppo", "tis"])
def test_decoupled_losses_are_truncated_is_in_the_first_pass_alone(loss):
    decoupled = run_in(loss, "two passes")
    fields: dict[str, Any] = dict(name="truncated_is", max_weight=LOSSES[loss]["max_weight"], advantage="mean_baseline")
    truncated = run_of(config_of(epochs=2, publish_every=1, **fields))
    groups = random_groups(0, 5)
    got, other = train(decoupled, books_of(decoupled), groups), train(truncated, books_of(truncated), groups)
    np.testing.assert_allclose(got["grad_norm"], other["grad_norm"], rtol=1e-6)
    assert abs(got["last_epoch/grad_norm"] / other["last_epoch/grad_norm"] - 1) > 1e-3
    assert got["last_epoch/clip_fraction"] > got["clip_fraction"]
    differences = relative_differences(flatten(decoupled.trainer.state.params), flatten(truncated.trainer.state.params))
    assert max(differences.values()) > 1e-4


@pytest.mark.heavy
def test_update_steps_the_version_once_and_the_learning_rate_each_pass():
    config = config_of(epochs=3, publish_every=1)  # a warm-up of two optimizer steps
    spans: list[tuple[str, dict[str, Any]]] = []
    run = run_of(config, spans=spans)
    books = books_of(run)
    rates, groups = [], random_groups(1, 4)
    for n in range(2):
        row = train(run, books, groups)
        rates.append(float(row["learning_rate"]))
        assert int(run.trainer.state.step) == n + 1
    np.testing.assert_allclose(rates, [0.5e-2, 1e-2], rtol=1e-6)
    ages = np.concatenate([1 - r.token_versions[r.loss_mask] for g in groups for r in g.rollouts])
    np.testing.assert_allclose(row["lag/mean"], ages.mean(), rtol=1e-6)  # by version, in every pass
    applied = [(f["step"], f["epoch"]) for name, f in spans if name == "apply"]
    assert applied == [(step, epoch) for step in (1, 2) for epoch in range(3)]
    num_micro_batches = len(stream(config, groups))
    of_an_update = [epoch for epoch in range(3) for _ in range(num_micro_batches)]
    assert [f.get("epoch", 0) for name, f in spans if name == "train"] == of_an_update * 2
    assert list(run.trainer.kept) == []


@pytest.mark.heavy
def test_update_of_a_batch_that_is_not_finite_leaves_out_each_pass_and_advances_the_version():
    run = run_in("decoupled_ppo", "two passes")
    books = books_of(run)
    groups = random_groups(3, 3)
    before = jax.tree.map(np.array, run.trainer.state.params)
    micro = stream(run.config, groups)[0]
    micro.batch.advantages[micro.batch.loss_mask] = np.nan
    learner_train.accumulate(run, micro, books)
    learner_train.update(run, books)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, run.trainer.state.params), before)
    assert int(run.trainer.state.step) == 1
    assert (run.rows[0]["skipped_updates"], run.rows[0]["skipped_in_a_row"]) == (2, 1)
    row = train(run, books, groups)
    assert (row["skipped_updates"], row["skipped_in_a_row"]) == (2, 0)
    np.testing.assert_allclose(row["learning_rate"], 0.5e-2)  # the schedule counts what was applied


def test_drop_forgets_the_batch_that_was_kept():
    run = run_in("decoupled_ppo", "two passes")
    books = books_of(run)
    for micro in stream(run.config, random_groups(0, 4)):
        learner_train.accumulate(run, micro, books)
    learner_train.drop(run, books, needs_fresh=True)
    groups = random_groups(5, 4)
    row = train(run, books, groups)
    fresh = run_in("decoupled_ppo", "two passes")
    want = train(fresh, books_of(fresh), groups)
    assert row["last_epoch/grad_norm"] == want["last_epoch/grad_norm"]


@pytest.mark.heavy
def test_kept_batch_is_on_the_host_with_what_each_policy_said_once():
    config = config_of(epochs=2, publish_every=2, name="tis", proximal="published", kl_coef=0.1)
    run = run_of(config)
    scored = []
    anchors = run.trainer.anchors
    anchors.score = functools.partial(lambda score, *given: scored.append(0) or score(*given), anchors.score)
    books = books_of(run)
    micros = stream(config, random_groups(0, 6))
    for micro in micros:
        learner_train.accumulate(run, micro, books)
    kept = list(run.trainer.kept)
    assert [one.micro for one in kept] == micros and len(scored) == len(micros)
    for micro, anchors, values in kept:
        assert values is None
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves((micro.batch, anchors)))
        places, num_bytes = micro.batch.tokens.size, sum(x.nbytes for x in jax.tree.leaves((micro.batch, anchors)))
        assert num_bytes - 200 < (33 + 2 * 4) * places <= num_bytes  # and a few scalars
    learner_train.update(run, books)
    assert len(scored) == len(micros)


@pytest.mark.heavy
def test_kept_batch_of_a_single_pass_is_empty():
    run = run_of(config_of())
    for micro in stream(run.config, random_groups(0, 2)):
        learner_train.accumulate(run, micro, books_of(run))
    assert list(run.trainer.kept) == []
