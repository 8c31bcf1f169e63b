"""Random groups, a tiny model, and plain oracles of an update; shared by the tests of the learner's step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import schema, sections
from configs.sections.model import Dtype
from learner.distributed.sharding import make_mesh
from learner.model.architecture import Architecture
from learner.model.decoder import init_params, make_apply
from learner.update.packing import pack_groups
from learner.update.train_step import build_train_step
from tests.bridge.factories import make_group, make_rollout, make_ticket

HF_CONFIG: dict[str, Any] = dict(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=100.0,
    tie_word_embeddings=False,
    max_position_embeddings=64,
    attention_bias=False,
)


def model_of(family: str, architecture: str, **fields: Any) -> Architecture:
    """Another family's model of a config.json with these fields."""
    of_family = {"model_type": family, "architectures": [f"{architecture}ForCausalLM"]}
    return Architecture.from_hf(HF_CONFIG | of_family | fields)


MODEL = model_of("qwen3", "Qwen3")
NUM_SAMPLES = 3
ONE_DEVICE = sections.MeshConfig()
TEMPERATURE = 0.7


def config_of(
    *,
    rows=2,
    row_tokens=16,
    whole_groups=False,
    param_dtype: Dtype = "float32",
    mesh=ONE_DEVICE,
    epochs=1,
    publish_every=0,
    **loss,
):
    """By rounds of four updates, or by a window that publishes every so many."""
    by_window: dict[str, Any] = {}
    if publish_every:
        by_window["admission"] = sections.AdmissionConfig(policy="window")
        by_window["publish"] = sections.PublishConfig(when="every", every_n_steps=publish_every)
    return schema.Config(
        preset="test",
        rounds=sections.RoundsConfig(epochs=epochs),
        **by_window,
        model=sections.ModelConfig(max_tokens=row_tokens, param_dtype=param_dtype, remat="none"),
        sampling=sections.SamplingConfig(max_response_tokens=12, temperature=TEMPERATURE),
        loss=sections.LossConfig(**loss),
        # A large eps keeps Adam smooth where a gradient is nearly 0, so that params can be compared tightly.
        optimizer=sections.OptimizerConfig(
            learning_rate=1e-2, eps=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2
        ),
        packing=sections.PackingConfig(rows=rows, row_tokens=row_tokens, whole_groups=whole_groups),
        mesh=mesh,
    )


def steps_of(config, **mesh_options):
    return build_train_step(MODEL, config, make_mesh(**config.mesh.axes, **mesh_options))


@functools.cache
def fresh_params():
    """Kernels larger than at initialisation and uneven norms, so that no part of the gradient is negligible."""
    rng = np.random.default_rng(0)

    def one(path, p):
        factor = rng.uniform(0.5, 1.5, p.shape).astype(np.float32) if "norm" in str(path) else 4
        return np.asarray(p) * factor

    return jax.tree_util.tree_map_with_path(one, jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(0)))


def random_rollout(rng, max_tokens, *, reward=None):
    size = int(rng.integers(1, max_tokens + 1))
    mask = rng.random(size) < 0.8
    mask[rng.integers(size)] = True
    return make_rollout(
        tokens=rng.integers(0, MODEL.vocab_size, size).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, rng.uniform(-5, -0.5, size), 0).astype(np.float32),
        token_versions=np.sort(rng.integers(0, 4, size)).astype(np.int32),
        reward=float(rng.normal()) if reward is None else reward,
    )


def random_group(rng, name, *, max_prompt=4, max_response=12, rewards=(None,) * NUM_SAMPLES):
    prompt = rng.integers(0, MODEL.vocab_size, int(rng.integers(1, max_prompt + 1))).astype(np.int32)
    rollouts = tuple(random_rollout(rng, max_response, reward=r) for r in rewards)
    return make_group(make_ticket(name, prompt_tokens=prompt), rollouts=rollouts)


def random_groups(seed, num_groups):
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, f"t{i}") for i in range(num_groups - 1)]
    return [*groups, random_group(rng, "flat", rewards=(0.1,) * NUM_SAMPLES)]


def stream(config, groups, **flags):
    """Micro-batches as the learner makes them when these groups are there, two after two, in this order."""
    return [micro for i in range(0, len(groups), 2) for micro in pack(config, groups[i : i + 2], **flags)]


def pack(config, groups, **flags):
    return pack_groups(
        groups,
        packing=config.packing,
        loss=config.loss,
        max_response_tokens=config.sampling.max_response_tokens,
        **flags,
    )


def padded(groups, config, length):
    """One sequence a row: (tokens, segments), mu, advantages and final weights, computed in numpy float64."""
    sequences = [(g, r) for g in groups for r in g.rollouts]
    ids = np.zeros((2, len(sequences), length), np.int32)
    mu, adv, weight = np.zeros((3, len(sequences), length))
    for i, (g, r) in enumerate(sequences):
        start, end = g.prompt_tokens.size, g.prompt_tokens.size + r.tokens.size
        ids[0, i, :end] = np.concatenate([g.prompt_tokens, r.tokens])
        ids[1, i, :end] = 1
        rewards = [x.reward for x in g.rollouts]
        mean = sum(rewards) / len(rewards)
        std = (sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1)) ** 0.5
        a = r.reward - mean
        if config.loss.advantage == "grpo":
            a /= std + config.loss.advantage_eps
        mu[i, start:end], adv[i, start:end] = r.behavior_logprobs, a * r.loss_mask
        per_token = {
            "token": 1 / sum(x.loss_mask.sum() for _, x in sequences),
            "sequence": 1 / (len(sequences) * r.loss_mask.sum()),
            "sequence_sum": 1 / len(sequences),
            "constant": 1 / (len(sequences) * config.sampling.max_response_tokens),
        }[config.loss.normalized_by]
        weight[i, start:end] = per_token * r.loss_mask
    return ids, *(x.astype(np.float32) for x in (mu, adv, weight))


def plain_loss(params, ids, mu, adv, weight, *, loss):
    """The whole update's loss by the book: unpacked rows, full logits, one sum."""
    tokens, segments = ids
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = make_apply(MODEL, remat="none")(params, tokens, positions, segments)
    logp = jax.nn.log_softmax(hidden[:, :-1] @ params["lm_head"]["kernel"].T / TEMPERATURE)
    lp = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
    mu, adv, weight = mu[:, 1:], adv[:, 1:], weight[:, 1:]
    ratio = jnp.exp(lp - mu)
    if loss.name == "truncated_is":
        objective = jax.lax.stop_gradient(jnp.clip(ratio, None, loss.max_weight)) * adv * lp
    else:
        clipped = jnp.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        objective = jnp.minimum(ratio * adv, clipped * adv)
    objective += loss.entropy_coef * -(jnp.exp(logp) * logp).sum(-1)
    return -(objective * weight).sum()


class NumpyAdamW:
    """AdamW with global-norm clipping, by the book, in float64."""

    def __init__(self, config):
        self.c, self.t = config, 0
        self.m: dict[str, Any] = {}
        self.v: dict[str, Any] = {}

    def update(self, params, grads, rate):
        c = self.c
        grads = {k: np.asarray(g, np.float64) for k, g in grads.items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        grads = {k: g * min(1.0, c.max_grad_norm / norm) for k, g in grads.items()}
        self.t += 1
        self.m = {k: c.beta1 * self.m.get(k, 0.0) + (1 - c.beta1) * g for k, g in grads.items()}
        self.v = {k: c.beta2 * self.v.get(k, 0.0) + (1 - c.beta2) * g**2 for k, g in grads.items()}
        out = {}
        for k, p in params.items():
            m, v = self.m[k] / (1 - c.beta1**self.t), self.v[k] / (1 - c.beta2**self.t)
            decay = 0.0 if "norm" in k or "bias" in k else c.weight_decay
            out[k] = p - rate * (m / (np.sqrt(v) + c.eps) + decay * np.asarray(p, np.float64))
        return out


def relative_differences(got, want):
    """max |got - want| / max |want| of each tensor, by name."""
    return {k: np.abs(np.asarray(got[k]) - w).max() / np.abs(w).max() for k, w in want.items()}
