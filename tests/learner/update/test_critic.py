"""The critic's values, gradient and checkpoint, and a policy that learns from one response per prompt by it.

The oracle is written apart: unpacked rows, GAE in loops over numpy float64, and the value loss as one sum.
"""

import dataclasses
import json
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge import codec
from bridge.param_names import flatten
from configs import schema, sections
from learner.checkpoint import Checkpoints
from learner.checkpoint_hosts import CheckpointError
from learner.distributed.sharding import make_mesh
from learner.model import hf_save
from learner.model.decoder import init_params, make_apply
from learner.model.lora import merge
from learner.model.value_head import decoder_params
from learner.policy_trainer import EpochCache, PolicyTrainer
from learner.restore import WeightLoader, restore, trainer_of
from learner.update.critic_step import Critic, build_critic_step
from learner.update.frozen_policies import FrozenPolicies
from learner.update.train_step import build_train_step, combine_params
from tests.bridge.factories import make_group, make_rollout, make_ticket
from tests.learner import eight_devices, several_hosts
from tests.learner.model.publisher import NoPublisher
from tests.learner.objective.test_gae import Sequence, token_book, turn_book
from tests.learner.streams import (
    MODEL,
    ONE_DEVICE,
    config_of,
    fresh_params,
    pack,
    random_groups,
    relative_differences,
    stream,
)

TIED = dataclasses.replace(MODEL, tie_word_embeddings=True)
GAE: dict[str, Any] = dict(gae_lambda=0.9, discount=0.8, learning_rate=1e-2)


def config_with(*, mesh=ONE_DEVICE, rows=2, epochs=1, **critic):
    config = config_of(advantage="gae", epochs=epochs, mesh=mesh, rows=rows)
    return dataclasses.replace(config, critic=sections.CriticConfig(**critic))


def steps_with(config, model=MODEL):
    size = config.mesh.num_devices
    mesh = make_mesh(**config.mesh.axes, devices=jax.devices()[:size])
    steps = build_train_step(model, config, mesh)
    critic = build_critic_step(model, config, mesh, steps)
    assert critic is not None
    return steps, critic


def head():
    rng = np.random.default_rng(7)
    return {
        "kernel": rng.normal(size=(1, MODEL.hidden_size)).astype(np.float32),
        "bias": np.array([0.3], np.float32),
    }


def state_with_head(critic):
    state = critic.init({} if critic.reads_policy else fresh_params())
    assert not np.any(jax.tree.leaves(jax.device_get(state.params["value_head"]))[0])  # zeros at first
    return dataclasses.replace(state, params=jax.device_put(state.params | {"value_head": head()}))


def truncated(groups):
    """Some responses cut off by the token limit."""
    return [
        dataclasses.replace(g, rollouts=(dataclasses.replace(g.rollouts[0], finish="length"), *g.rollouts[1:]))
        for g in groups
    ]


def unpacked(groups):
    """One sequence a row: tokens, positions, segments and sampled tokens, and the rewards at the last of these."""
    sequences = [(g.prompt_tokens, r) for g in groups for r in g.rollouts]
    tokens, segments, mask = np.zeros((3, len(sequences), 16), np.int32)
    rewards = np.zeros(mask.shape)
    for i, (prompt, rollout) in enumerate(sequences):
        start, end = prompt.size, prompt.size + rollout.tokens.size
        tokens[i, :end], segments[i, :end] = np.append(prompt, rollout.tokens), 1
        mask[i, start:end] = rollout.loss_mask
        rewards[i, np.flatnonzero(mask[i])[-1]] = rollout.reward
    return tokens, np.broadcast_to(np.arange(16), tokens.shape), segments, mask.astype(bool), rewards


def plain_values(params, tokens, positions, segments):
    """Value of the state before each token but the first."""
    decoder = {name: part for name, part in params.items() if name != "value_head"}
    hidden = make_apply(TIED, remat="none")(decoder, tokens, positions, segments)
    return hidden[:, :-1] @ params["value_head"]["kernel"][0] + params["value_head"]["bias"]


@jax.jit
def plain_loss(params, rows, old, returns, is_start, clip):
    def loss(params):
        values = plain_values(params, *rows)
        inside = old[:, 1:] + jnp.clip(values - old[:, 1:], -clip, clip)
        worse = jnp.maximum((values - returns[:, 1:]) ** 2, (inside - returns[:, 1:]) ** 2)
        return (jnp.where(is_start[:, 1:], worse, 0).sum() / 2 / is_start.sum()), values

    (value, values), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, jnp.pad(values, ((0, 0), (1, 0))), grads


@pytest.mark.heavy
@pytest.mark.parametrize(("level", "backbone"), [("token", "own"), ("turn", "own"), ("token", "policy")])
def test_advantages_and_every_epochs_gradient_are_those_of_the_books(level, backbone):
    config = config_with(epochs=2, level=level, backbone=backbone, value_clip=0.02, **GAE)
    steps, critic = steps_with(config)
    groups = truncated(random_groups(0, 4))
    *rows, mask, rewards = unpacked(groups)
    book = token_book if level == "token" else turn_book
    is_start = mask if level == "token" else mask & ~np.pad(mask[:, :-1], ((0, 0), (1, 0)))
    policy, state = fresh_params(), state_with_head(critic)
    params = jax.device_get(decoder_params(policy) | state.params)
    nothing = np.zeros(mask.shape, np.float32)
    _, old, _ = plain_loss(params, rows, nothing, nothing, is_start, 1e9)
    old = np.asarray(old, np.float64)
    advantages = np.stack([book(Sequence(*s), 0.8, 0.9) for s in zip(mask, rewards, old, strict=True)])
    returns = (advantages + old).astype(np.float32)

    kept: list[Any] = []
    for epoch in range(2):
        if epoch and critic.reads_policy:  # which its own update moved
            policy = jax.tree.map(lambda x: 1.03 * x, policy)
            params = jax.device_get(decoder_params(policy) | state.params)
        kept_before, batches = kept, stream(config, groups)
        assert len(batches) > 2
        for n, micro in enumerate(batches):
            batch, values = (steps.put(micro.batch), None) if epoch == 0 else kept_before[n]
            state, given, values = critic.accumulate(state, policy, batch, values)
            if epoch == 0:
                kept = [*kept, (dataclasses.replace(batch, advantages=given), np.asarray(values))]
        loss, _, wanted = plain_loss(params, rows, old.astype(np.float32), returns, is_start, 0.02 if epoch else 1e9)
        found = jax.tree.map(lambda g, d=state.accumulator.denominator: np.asarray(g / d), state.accumulator.grads)
        wanted = {name: wanted[name] for name in state.params}
        differences = relative_differences(flatten(found), flatten(jax.device_get(wanted)))
        assert max(differences.values()) <= 2e-5, differences
        state, metrics = critic.apply(state, epoch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        params = jax.device_get(decoder_params(policy) | state.params)
        if epoch == 0:
            np.testing.assert_allclose(metrics["mean_value"], old[is_start].mean(), rtol=1e-5, atol=1e-6)
            explained = 1 - advantages[is_start].var() / returns[is_start].var()
            np.testing.assert_allclose(metrics["explained_variance"], explained, rtol=1e-4)
            assert metrics["clip_fraction"] == 0
    assert metrics["clip_fraction"] > 0.1, "the clip was never reached, so it was not tried"
    packed = np.concatenate([np.asarray(b.advantages)[np.asarray(b.loss_mask)] for b, _ in kept])
    np.testing.assert_allclose(np.sort(packed), np.sort(advantages[mask]), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_head_on_a_policy_with_adapters_reads_the_adapted_model():
    config = config_with(backbone="policy", **GAE)
    config = dataclasses.replace(config, lora=sections.LoraConfig(rank=3))
    steps, critic = steps_with(config)
    rng, base = np.random.default_rng(2), jax.device_get(fresh_params())
    adapters = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, steps.init_adapters())
    (micro,) = pack(config, random_groups(0, 2))[:1]
    found = critic.accumulate(state_with_head(critic), combine_params(base, adapters), steps.put(micro.batch))[2]
    merged = decoder_params(merge(base, adapters, scale=config.lora.scale, dtype="float32"))
    batch = micro.batch
    wanted = plain_values(merged | {"value_head": head()}, batch.tokens, batch.positions, batch.segment_ids)
    mask = np.asarray(batch.loss_mask)[:, 1:]
    np.testing.assert_allclose(np.asarray(found)[:, 1:][mask], np.asarray(wanted)[mask], rtol=1e-4, atol=1e-5)


NUM_PROMPTS, NUM_RESPONSES = 4, 32
WORTH = 3.0
NUM_UPDATES = 120


CRITICS: dict[str, Any] = {
    "own": lambda folder: sections.CriticConfig(path=folder, learning_rate=2e-2),
    # Its bias alone has to come to 7.5.
    "policy": lambda folder: sections.CriticConfig(backbone="policy", learning_rate=3e-1),
}


@pytest.fixture(scope="module", params=CRITICS)
def small_critic(request, tmp_path_factory):
    """The policy's folder, and a config with a critic of one layer from a folder of its own, or on the policy."""
    root = tmp_path_factory.mktemp("models")
    small = dataclasses.replace(MODEL, num_layers=1)
    hf_save.save(root / "policy", MODEL, jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(1)))
    fields = json.loads(MODEL.hf_json) | {"num_hidden_layers": 1}
    small = dataclasses.replace(small, hf_json=json.dumps(fields))
    hf_save.save(root / "critic", small, jax.jit(init_params, static_argnums=0)(small, jax.random.key(2)))
    config = schema.Config(
        preset="test",
        rounds=sections.RoundsConfig(samples_per_group=1),
        model=sections.ModelConfig(max_tokens=8, remat="none"),
        sampling=sections.SamplingConfig(max_response_tokens=4),
        loss=sections.LossConfig(name="truncated_is", advantage="gae"),
        critic=CRITICS[request.param](str(root / "critic")),
        # A head on the policy is tried on features that stand: what it learns on moving ones is a matter of luck.
        optimizer=sections.OptimizerConfig(learning_rate=5e-3 if request.param == "own" else 1e-9),
        packing=sections.PackingConfig(rows=4, row_tokens=32),
    )
    return root / "policy", config, steps_with(config)


def start(folder, small_critic) -> PolicyTrainer:
    model_folder, config, (steps, critic) = small_critic
    checkpoints, weights = Checkpoints(folder / "checkpoints", keep=2), WeightLoader(config, MODEL)
    restored = restore(checkpoints, steps, weights, folder, model_folder, None, critic)
    return trainer_of(
        config,
        MODEL,
        steps,
        restored.state,
        weights,
        model_folder,
        publisher=NoPublisher(),
        checkpoints=checkpoints,
        base=None,
        critic=restored.critic,
    )


@jax.jit
def next_logits(params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return (
        make_apply(MODEL, remat="none")(params, tokens, positions, jnp.ones_like(tokens))
        @ params["lm_head"]["kernel"].T
    )


def responses(params, rng):
    """One response of two tokens to each of many prompts; it is right if its first has the prompt's parity."""
    prompts = rng.integers(0, NUM_PROMPTS, NUM_RESPONSES)
    tokens = np.zeros((NUM_RESPONSES, 4), np.int32)
    tokens[:, 0], tokens[:, 1] = MODEL.vocab_size - 1, prompts
    logprobs = np.zeros((NUM_RESPONSES, 2), np.float32)
    for i in range(2):
        logits = np.asarray(next_logits(params, tokens), np.float64)[:, 1 + i]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        tokens[:, 2 + i] = (logp + rng.gumbel(size=logp.shape)).argmax(-1)
        logprobs[:, i] = np.take_along_axis(logp, tokens[:, 2 + i, None], -1)[:, 0]
    is_right = tokens[:, 2] % 2 == prompts % 2
    # What a prompt is worth is far more than what an answer adds.
    rewards = WORTH * (1 + prompts) + is_right

    def response(n):
        logp = np.minimum(logprobs[n], 0)
        return make_rollout(2, tokens=tokens[n, 2:], behavior_logprobs=logp, reward=float(rewards[n]))

    groups = [
        make_group(make_ticket(f"t{n}", order=n, prompt_tokens=tokens[n, :2]), rollouts=(response(n),))
        for n in range(NUM_RESPONSES)
    ]
    return groups, is_right.mean()


def update(trainer, rng) -> tuple[dict[str, Any], float]:
    groups, share = responses(trainer.state.params, rng)
    for micro in pack(trainer.config, groups):
        trainer.accumulate(micro)
    return trainer.optimizer_step(0), share


def learned(trainer, *, without: tuple[str, ...] = ()) -> tuple[list[float], list[float]]:
    """Explained variances and shares of right answers of all updates; parts of the head may not be trained."""
    explained, shares, rng = [], [], np.random.default_rng(0)
    for _ in range(NUM_UPDATES):
        metrics, share = update(trainer, rng)
        explained.append(float(metrics["critic/explained_variance"]))
        shares.append(share)
        if without:
            state = trainer.critic.state
            head = state.params["value_head"]
            head = head | {name: jnp.zeros_like(head[name]) for name in without}
            trainer.critic.state = dataclasses.replace(state, params=state.params | {"value_head": head})
    return explained, shares


@pytest.mark.heavy
def test_critic_learns_and_the_policy_from_one_response_per_prompt_by_it_alone(tmp_path, small_critic):
    explained, shares = learned(start(tmp_path / "a", small_critic))
    assert abs(explained[0]) < 1e-5  # all values are 0
    is_own = small_critic[1].critic.backbone == "own"
    assert np.mean(explained[-20:]) > (0.9 if is_own else 0.25), explained
    if is_own:
        assert np.mean(shares[:10]) < 0.65 and np.mean(shares[-20:]) > 0.85, shares
    for without in (("kernel", "bias"), ("kernel",)):
        explained, shares = learned(start(tmp_path / without[-1], small_critic), without=without)
        assert np.mean(explained[-20:]) < 0.1 and np.mean(shares[-20:]) < 0.7, shares


def saved(trainer, step):
    assert trainer.critic is not None
    model, critic = json.loads(MODEL.hf_json), trainer.critic.steps.metadata
    host = {"format": codec.FORMAT, "model": model, "mesh": trainer.config.mesh.axes, "critic": critic}
    trainer.save(step, host)
    trainer.checkpoints.wait()


@pytest.mark.heavy
def test_a_restored_critic_trains_on_bit_for_bit(tmp_path, small_critic):
    def rest(trainer):
        rng = np.random.default_rng(5)
        rows = [update(trainer, rng)[0] for _ in range(2)]
        return rows, jax.device_get((trainer.state.params, trainer.critic.state.params, trainer.critic.state.opt_state))

    one = start(tmp_path / "a", small_critic)
    update(one, np.random.default_rng(4))
    saved(one, 1)
    want = rest(one)
    again = start(tmp_path / "a", small_critic)
    assert again.critic is not None and int(again.critic.state.step) == 1
    again.offload()
    assert {type(x) for x in jax.tree.leaves(again.critic.state)} == {np.ndarray}
    again.reload()
    groups, _ = responses(again.state.params, np.random.default_rng(6))
    again.accumulate(pack(again.config, groups)[0])
    again.discard()
    jax.tree.map(np.testing.assert_array_equal, rest(again), want)

    model_folder, config, (steps, _) = small_critic
    plain = WeightLoader(config, MODEL)
    with pytest.raises(CheckpointError, match="the checkpoint has a critic, got loss.advantage without one"):
        restore(again.checkpoints, steps, plain, tmp_path / "a", model_folder, None)
    for trainer in (one, again):
        trainer.checkpoints.close()


@pytest.mark.heavy
def test_checkpoint_of_a_critic_on_another_backbone_is_refused(tmp_path, small_critic):
    model_folder, config, _ = small_critic
    one = start(tmp_path, small_critic)
    saved(one, 1)
    was = config.critic.backbone
    is_now = "policy" if was == "own" else "own"
    other = dataclasses.replace(config, critic=sections.CriticConfig(backbone=is_now))
    steps, critic = steps_with(other)
    with pytest.raises(CheckpointError, match=f"backbone was '{was}', is '{is_now}'"):
        restore(one.checkpoints, steps, WeightLoader(other, MODEL), tmp_path, model_folder, None, critic)
    one.checkpoints.close()


SHAPE: dict[str, Any] = dict(vocab_size=20, hidden_size=32, num_heads=4, num_kv_heads=2, intermediate_size=48)


def on_mesh(axes, backbone):
    """Two updates of the critic; its metrics, and its parameters."""
    config = config_with(mesh=sections.MeshConfig(**axes), rows=4, level="turn", backbone=backbone, **GAE)
    model = dataclasses.replace(MODEL, **SHAPE)
    steps, critic = steps_with(config, model)
    policy = steps.init(jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))).params
    state, rows = critic.init({} if critic.reads_policy else jax.device_get(policy)), []
    for _ in range(2):
        for micro in stream(config, random_groups(0, 8)):
            state, _, _ = critic.accumulate(state, policy, steps.put(micro.batch))
        state, metrics = critic.apply(state)
        rows.append(jax.device_get(metrics))
    return rows, jax.device_get(state.params)


def compare_meshes():
    """Runs in the subprocess of the test below."""
    whole = {"fsdp": 2, "sequence": 2, "tensor": 2}
    for backbone, meshes in (("own", [{"fsdp": 2}, whole]), ("policy", [whole])):
        want = on_mesh({}, backbone)
        for axes in meshes:
            found = on_mesh(axes, backbone)
            jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), found, want)
            print("equal on", axes, flush=True)


@pytest.mark.integration
def test_two_updates_of_the_critic_on_a_mesh_equal_one_device():
    code = "from tests.learner.update import test_critic as t; t.compare_meshes()"
    assert eight_devices.run(code).count("equal on") == 3


def two_epochs(backbone: Literal["own", "policy"]) -> str:
    """Metrics of an update on two devices; runs in one process or in two, of which the first alone has the batches."""
    config = config_with(mesh=sections.MeshConfig(fsdp=2), epochs=2, value_clip=0.02, backbone=backbone, **GAE)
    model = dataclasses.replace(MODEL, **SHAPE)
    steps, critic = steps_with(config, model)
    params = jax.device_get(jax.jit(init_params, static_argnums=0)(model, jax.random.key(0)))
    state = steps.init(params)
    trainer = PolicyTrainer(
        config=config,
        architecture=model,
        steps=steps,
        anchors=FrozenPolicies(steps, config, load_reference=lambda: params, params=state.params),
        kept=EpochCache(steps, epochs=2),
        state=state,
        publisher=NoPublisher(),
        checkpoints=cast(Any, None),
        critic=Critic(critic, critic.init({} if critic.reads_policy else params)),
    )
    micros = stream(config, random_groups(0, 4))
    if jax.process_index():
        micros = [dataclasses.replace(m, batch=jax.tree.map(np.zeros_like, m.batch)) for m in micros]
    for micro in micros:
        trainer.accumulate(micro)
    first = trainer.optimizer_step(0)
    for index in range(len(micros)):
        trainer.accumulate_cached(index)
    rows = first, trainer.optimizer_step(1)
    return json.dumps([{name: float(x) for name, x in row.items() if not np.isnan(x)} for row in rows])


@pytest.mark.integration
@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_two_epochs_with_a_critic_by_two_processes_equal_those_by_one(backbone):
    code = several_hosts.CONNECT + "from tests.learner.update import test_critic as t; "
    code += f"print(t.two_epochs({backbone!r}))"
    (one,), both = (several_hosts.run(code, count=n, devices_each=2 // n) for n in (1, 2))
    want, *found = (json.loads(text.splitlines()[-1]) for text in (one, *both))
    assert want[1]["critic/clip_fraction"] > 0 and want[0]["critic/loss"] > want[1]["critic/loss"]
    for rows in found:
        for got, row in zip(rows, want, strict=True):
            assert got == pytest.approx(row, rel=1e-4, abs=1e-5)
