"""Teachers of a whole learner, without an engine: which one scores a token, and where the student goes.

The student samples in numpy by its own float32 logits, so each update's batch is its current policy's.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.sections import LossConfig, PromptsConfig
from configs.sections.teacher import Teacher
from launch.startup.warmup import write_character_tokenizer
from learner.checkpoint import Checkpoints
from learner.distributed.sharding import make_mesh
from learner.model import hf_save
from learner.model.decoder import init_params, make_apply
from learner.restore import WeightLoader, restore, trainer_of
from learner.update.train_step import build_train_step
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.learner.model.publisher import NoPublisher
from tests.learner.streams import MODEL, TEMPERATURE, config_of, model_of, pack

_DEEPER: dict[str, Any] = dict(num_hidden_layers=3, hidden_size=24, intermediate_size=32, tie_word_embeddings=True)
DEEPER = model_of("qwen2", "Qwen2", **_DEEPER)
"""A teacher of another family and size."""
PROMPT, RESPONSE = np.array([[3, 1], [7, 2]], np.int32), 4
K = 16
FACTOR = 12
"""How much larger a teacher's weights are than at initialization, so that it has preferences."""


def random_params(architecture, seed, *, factor):
    params = jax.jit(init_params, static_argnums=0)(architecture, jax.random.key(seed))
    return jax.tree_util.tree_map_with_path(lambda path, x: x if "norm" in str(path) else factor * x, params)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A student and two teachers, with one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for name, architecture, seed, factor in (
        ("student", MODEL, 0, 1),
        ("a", DEEPER, 1, FACTOR),
        ("b", MODEL, 2, FACTOR),
    ):
        hf_save.save(root / name, architecture, random_params(architecture, seed, factor=factor))
        write_character_tokenizer(root / name)
    return root


def learner_of(config, folders, tmp_path, devices=1):
    steps = build_train_step(MODEL, config, make_mesh(**config.mesh.axes, devices=jax.devices()[:devices]))
    checkpoints, weights = Checkpoints(tmp_path / "checkpoints", keep=1), WeightLoader(config, MODEL)
    folder = folders / "student"
    state = restore(checkpoints, steps, weights, tmp_path, folder, None).state
    return trainer_of(
        config, MODEL, steps, state, weights, folder, publisher=NoPublisher(), checkpoints=checkpoints, base=None
    )


def config_with(folders, *, epochs=1, named=(), **loss):
    """Teachers by name, or `teacher_path` for rows that name none; rewards that are all alike have no advantage."""
    fields: dict[str, Any] = dict(name="truncated_is", teacher_coef=1.0) | loss
    if "teacher_path" in fields:
        fields["teacher_path"] = str(folders / fields["teacher_path"])
    teachers = {name: Teacher(path=str(folders / name)) for name in named}
    return dataclasses.replace(
        config_of(rows=8, row_tokens=32, epochs=epochs),
        loss=LossConfig(teachers=teachers, **fields),
        prompts=PromptsConfig(teacher_field="teacher" if named else ""),
    )


@functools.cache
def forward(architecture):
    return jax.jit(make_apply(architecture, remat="none"))


def log_probabilities(architecture, params, tokens):
    """log softmax of all logits of whole sequences, one a row: [N, S, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(architecture)(params, tokens, positions, jnp.ones_like(tokens))
    head = params["embed"]["embedding"] if architecture.tie_word_embeddings else params["lm_head"]["kernel"]
    return np.asarray(jax.nn.log_softmax(hidden @ head.T / TEMPERATURE))


def sampled(rng, params, prompt):
    """K responses to a prompt, and the logprob of each token: [K, PROMPT + RESPONSE], [K, RESPONSE]."""
    tokens = np.zeros((K, prompt.size + RESPONSE), np.int32)
    tokens[:, : prompt.size] = prompt
    chosen = np.zeros((K, RESPONSE), np.float32)
    for t in range(RESPONSE):
        logp = log_probabilities(MODEL, params, tokens)[:, prompt.size + t - 1]
        draw = np.argmax(logp + rng.gumbel(size=logp.shape), axis=1)
        tokens[:, prompt.size + t], chosen[:, t] = draw, logp[np.arange(K), draw]
    return tokens, chosen


def group_of(rng, params, prompt, *, step, rewards):
    tokens, logprobs = sampled(rng, params, prompt)
    rollouts = tuple(
        make_rollout(
            RESPONSE,
            step=step,
            tokens=tokens[i, prompt.size :],
            behavior_logprobs=np.minimum(logprobs[i], 0),
            finish="length",
            reward=rewards(tokens[i, prompt.size :]),
        )
        for i in range(K)
    )
    return make_group(make_ticket(f"{step}-{prompt[0]}", round=step, prompt_tokens=prompt), rollouts=rollouts)


def reverse_kl(params, teacher, teacher_params, prompt):
    """KL(student, teacher) in nats per token, exact over the vocabulary, at states that the student samples."""
    tokens, _ = sampled(np.random.default_rng(5), params, prompt)
    models = ((MODEL, params), (teacher, teacher_params))
    own, others = (log_probabilities(*model, tokens)[:, prompt.size - 1 : -1] for model in models)
    return float((np.exp(own) * (own - others)).sum(-1).mean())


def train(learner, num_updates, *, teachers=(1, 1), rewards=lambda response: 0.0):
    """Updates by the student's own samples to both prompts; returns the metrics of each epoch."""
    rng, rows = np.random.default_rng(0), []
    for step in range(num_updates):
        params = learner.state.params
        groups = [group_of(rng, params, prompt, step=step, rewards=rewards) for prompt in PROMPT]
        for micro in pack(learner.config, groups, teachers=teachers if learner.config.loss.teacher_coef else ()):
            learner.accumulate(micro)
        rows.append(learner.optimizer_step(0))
        for epoch in range(1, learner.config.rounds.epochs):
            for index in range(len(learner.kept.ticket_ids)):
                learner.accumulate_cached(index)
            rows.append(learner.optimizer_step(epoch))
    return rows


TEACHERS = {"a": (DEEPER, 1), "b": (MODEL, 2)}


def kl_to(learner, name, prompt):
    architecture, seed = TEACHERS[name]
    return reverse_kl(learner.state.params, architecture, random_params(architecture, seed, factor=FACTOR), prompt)


@pytest.mark.heavy
def test_student_comes_near_its_teacher_and_stays_away_from_it_without_one(folders, tmp_path):
    def count_of_ones(response):
        return float((response == 1).sum())

    found = {}
    for name, loss in {
        "distilled": dict(teacher_path="a", advantage="none"),
        "rewarded": dict(teacher_coef=0.0),
        "both": dict(teacher_path="a"),
        "reverse_kl": dict(teacher_path="a", advantage="none", teacher_divergence="reverse_kl", teacher_top_k=6),
        "forward_kl": dict(teacher_path="a", advantage="none", teacher_divergence="forward_kl", teacher_top_k=6),
    }.items():
        learner = learner_of(config_with(folders, **loss), folders, tmp_path / name)
        before = np.mean([kl_to(learner, "a", prompt) for prompt in PROMPT])
        rows = train(learner, 40, rewards=count_of_ones)
        after = np.mean([kl_to(learner, "a", prompt) for prompt in PROMPT])
        found[name] = (before, after, [float(row["teacher_kl"]) for row in rows], float(rows[-1]["reward/mean"]))
    for name in ("distilled", "reverse_kl", "forward_kl"):
        before, after, metric, _ = found[name]
        assert after < 0.4 * before and metric[-1] < 0.5 * metric[0], name
    assert found["distilled"][2][0] == pytest.approx(found["distilled"][0], rel=0.3)
    before, after, metric, reward = found["rewarded"]
    assert after > 0.9 * before and not any(metric) and reward > found["distilled"][3]
    assert found["both"][1] < 0.8 * found["both"][0] and found["both"][3] > found["distilled"][3]


@pytest.mark.heavy
def test_rows_go_to_the_teachers_that_they_name(folders, tmp_path):
    config = config_with(folders, named=("a", "b"))
    assert [config.loss.teacher_number(name) for name in ("", "a", "b")] == [0, 1, 2]
    learner = learner_of(config, folders, tmp_path)
    train(learner, 40, teachers=(1, 2))
    of_a, of_b = PROMPT
    assert kl_to(learner, "a", of_a) < 0.5 * kl_to(learner, "a", of_b)
    assert kl_to(learner, "b", of_b) < 0.5 * kl_to(learner, "b", of_a)


@pytest.mark.heavy
def test_teachers_logprobs_are_those_of_whole_sequences_and_rows_without_one_are_not_distilled(folders, tmp_path):
    config = config_with(folders, named=("a", "b"))
    learner = learner_of(config, folders, tmp_path)
    rng = np.random.default_rng(1)
    prompts = (*PROMPT, np.array([4], np.int32))
    groups = [group_of(rng, learner.state.params, p, step=0, rewards=lambda _: 0.0) for p in prompts]
    for names, teachers in ((("a", "b", None), (1, 2, 0)), ((None, "b", "b"), (0, 2, 2)), ((None,) * 3, (0, 0, 0))):
        total, count = 0.0, 0
        for prompt, group, name in zip(prompts, groups, names, strict=True):
            if name is None:
                continue
            architecture, seed = TEACHERS[name]
            tokens = np.stack([np.concatenate([prompt, r.tokens]) for r in group.rollouts])
            logp = log_probabilities(architecture, random_params(architecture, seed, factor=FACTOR), tokens)
            of_tokens = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[:, prompt.size - 1 :, 0]
            total += sum(r.behavior_logprobs.sum(dtype=np.float64) for r in group.rollouts) - of_tokens.sum()
            count += of_tokens.size
        micros = pack(config, groups, teachers=teachers)
        assert set().union(*(micro.teachers for micro in micros)) == set(teachers) - {0}
        for micro in micros:
            learner.accumulate(micro)
        metrics = learner.optimizer_step(0)
        assert float(metrics["teacher_kl"]) == pytest.approx(total / max(count, 1), rel=1e-4)
        if not count:
            assert float(metrics["grad_norm"]) == 0  # neither reward nor teacher
        learner = learner_of(config, folders, tmp_path / str(teachers))  # the same student again


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_divergence_is_the_kl_of_each_rows_teacher_over_the_students_vocabulary(folders, tmp_path, kind):
    """Also of a teacher with more words than the student."""
    wider = model_of("qwen2", "Qwen2", **_DEEPER, vocab_size=MODEL.vocab_size + 5)
    hf_save.save(tmp_path / "wider", wider, random_params(wider, 1, factor=FACTOR))
    write_character_tokenizer(tmp_path / "wider")
    config = config_with(folders, named=("b",), teacher_divergence=kind, teacher_top_k=MODEL.vocab_size)
    teachers = config.loss.teachers | {"wider": Teacher(path=str(tmp_path / "wider"))}
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, teachers=teachers))
    learner = learner_of(config, folders, tmp_path)
    prompts = (*PROMPT, np.array([4], np.int32))
    rng, params = np.random.default_rng(1), learner.state.params
    groups = [group_of(rng, params, p, step=0, rewards=lambda _: 0.0) for p in prompts]
    kls = []
    for prompt, group, (teacher, seed) in zip(prompts, groups, ((MODEL, 2), (wider, 1)), strict=False):
        tokens = np.stack([np.concatenate([prompt, r.tokens]) for r in group.rollouts])
        of_teacher = log_probabilities(teacher, random_params(teacher, seed, factor=FACTOR), tokens)
        log_p, log_q = (
            x[:, prompt.size - 1 : -1, : MODEL.vocab_size]
            for x in (log_probabilities(MODEL, params, tokens), of_teacher)
        )
        log_q = log_q - np.log(np.exp(log_q).sum(-1, keepdims=True))
        log_p, log_q = (log_p, log_q) if kind == "reverse_kl" else (log_q, log_p)
        kls.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
    for micro in pack(config, groups, teachers=(1, 2, 0)):
        learner.accumulate(micro)
    assert float(learner.optimizer_step(0)["teacher_kl"]) == pytest.approx(np.mean(kls), rel=1e-4)


@pytest.mark.heavy
@pytest.mark.parametrize("loss", [{}, dict(teacher_divergence="forward_kl", teacher_top_k=4)])
def test_later_epochs_reuse_the_teachers_logprobs_and_follow_the_student(folders, tmp_path, monkeypatch, loss):
    learner = learner_of(config_with(folders, teacher_path="b", epochs=3, **loss), folders, tmp_path)
    [teacher] = learner.anchors._teachers
    scored, score = [], teacher.score
    monkeypatch.setattr(teacher, "score", lambda *args: scored.append(args) or score(*args))
    rows = train(learner, 3)
    assert len(scored) == 3  # one micro-batch an update
    kl = np.reshape([float(row["teacher_kl"]) for row in rows], (3, 3))
    assert np.all(kl[:, 2] < kl[:, 0])


def on_server(group, architecture, params):
    """The group with its tokens' logprobs by a teacher, as a server would give them."""
    tokens = np.stack([np.concatenate([group.prompt_tokens, r.tokens]) for r in group.rollouts])
    logp = log_probabilities(architecture, params, tokens)
    chosen = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[:, group.prompt_tokens.size - 1 :, 0]
    rollouts = [dataclasses.replace(r, teacher_logprobs=own) for r, own in zip(group.rollouts, chosen, strict=True)]
    return dataclasses.replace(group, rollouts=tuple(rollouts))


@pytest.mark.heavy
def test_teacher_on_a_server_trains_as_the_same_teacher_in_the_learner(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEMPERATURE", 1.0)
    plain = config_with(folders, named=("a", "b"))
    plain = dataclasses.replace(
        plain,
        sampling=dataclasses.replace(plain.sampling, temperature=1.0),
        packing=dataclasses.replace(plain.packing, share_prompts=True),
    )
    teachers = {"a": Teacher(url="http://127.0.0.1:1/v1"), "b": Teacher(path=str(folders / "b"))}
    of_server = dataclasses.replace(plain, loss=dataclasses.replace(plain.loss, teachers=teachers))
    rng = np.random.default_rng(1)
    learner = learner_of(plain, folders, tmp_path / "plain")
    prompts = (*PROMPT, np.array([4], np.int32))
    groups = [group_of(rng, learner.state.params, p, step=0, rewards=lambda r: float(r[0])) for p in prompts]
    taught = [on_server(groups[0], DEEPER, random_params(DEEPER, 1, factor=FACTOR)), *groups[1:]]
    found = {}
    for name, config, own in (("plain", plain, groups), ("server", of_server, taught), ("none", of_server, groups)):
        learner = learner_of(config, folders, tmp_path / f"{name}-learner")
        for micro in pack(config, own, teachers=[config.loss.teacher_number(t) for t in ("a", "b", "")]):
            learner.accumulate(micro)
        found[name] = learner.optimizer_step(0), jax.tree.leaves(learner.state.params)
    (metrics, params), (others, of_others), (wrong, _) = found.values()
    assert float(others["teacher_kl"]) == pytest.approx(float(metrics["teacher_kl"]), rel=1e-4)
    assert float(others["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
    assert abs(float(wrong["teacher_kl"]) - float(metrics["teacher_kl"])) > 0.1
    for a, b in zip(params, of_others, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_teachers_move_to_the_host_with_the_other_frozen_policies(folders, tmp_path):
    learner = learner_of(config_with(folders, teacher_path="b"), folders, tmp_path)
    want = jax.tree.map(np.asarray, learner.anchors.params[3])
    learner.offload()
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(learner.anchors.params[3]))
    learner.reload()
    jax.tree.map(np.testing.assert_array_equal, learner.anchors.params[3], want)
