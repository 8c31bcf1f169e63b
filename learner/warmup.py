"""Makes the tiny model: a character tokenizer, fresh weights, and a short supervised phase in JAX.

What it is shown then: `learner.data.corpus`.
"""

import json
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import tokenizers
from jaxtyping import Array

from bridge.chat_template import read_chat_template
from bridge.names import flatten, unflatten
from configs.sections import PromptsConfig
from configs.tiny_model import TinyModelRecipe
from learner.data.corpus import Corpus
from learner.model.config import Architecture
from learner.model.decoder import INIT_STD, Params, init_params, make_apply, output_head
from learner.model.hf import io as hf_io

_CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
_PAD, _EOS = "<pad>", "<eos>"
_THINK_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""Opens the assistant's thinking, as the templates of reasoning models do."""


def make_tiny_model(
    folder: pathlib.Path,
    recipe: TinyModelRecipe,
    prompts: PromptsConfig,
    *,
    on_progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Writes a Hugging Face folder (config.json, safetensors, tokenizer).

    Args:
      folder: must not exist yet.
      recipe: sizes and the supervised phase.
      prompts: the task and how its questions are cut.
      on_progress: called every few steps with the step and its loss (nats a token).

    Raises:
      ValueError: there are no examples of how to answer (`learner.data.corpus`).
      FileExistsError: `folder` has something in it.
    """
    parts = folder.with_name(f".{folder.name}.tokenizer")
    write_character_tokenizer(parts, thinks=recipe.thinks)
    tokenizer = tokenizers.Tokenizer.from_file(str(parts / "tokenizer.json"))
    config = Architecture.from_hf(_hf_config(recipe, tokenizer))
    corpus = Corpus(recipe, prompts, tokenizer, eos=_id(tokenizer, _EOS), chat=read_chat_template(parts))
    params = _train(config, recipe, corpus, on_progress)
    hf_io.save(folder, config, params, tokenizer_from=parts)
    for file in parts.iterdir():
        file.unlink()
    parts.rmdir()


def write_character_tokenizer(folder: pathlib.Path, *, thinks: bool = False) -> None:
    """Writes a tokenizer of printable ASCII, one token per character, with padding and end-of-sequence tokens.

    With `thinks` it has marks of thinking and of turns, and a chat template that opens the thinking.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate([*_CHARACTERS, _PAD, _EOS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=_PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([_PAD, _EOS])
    if thinks:
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _PAD, "eos_token": _EOS}
    if thinks:
        settings["chat_template"] = _THINK_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _train(
    config: Architecture, recipe: TinyModelRecipe, corpus: Corpus, on_progress: Callable[[int, float], None]
) -> Params:
    apply = make_apply(config, remat="none")
    rise = 50
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, recipe.learning_rate, rise),
            optax.cosine_decay_schedule(recipe.learning_rate, recipe.num_clean_steps - rise),
            optax.linear_schedule(recipe.typo_learning_rate, 0.0, recipe.num_typo_steps),
        ],
        [rise, recipe.num_clean_steps],
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))

    def loss(params: Params, tokens: Array, mask: Array, typo_rate: Array) -> Array:
        """Expected cross-entropy (nats) over answers whose characters are random ones with `typo_rate`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        # Padding comes last, so nothing that counts attends to it.
        hidden = apply(params, tokens, positions, jnp.ones_like(tokens))[:, :-1]
        logprobs = jax.nn.log_softmax(hidden @ output_head(params).T)
        right = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
        random = jnp.mean(logprobs[..., corpus.answer_ids], -1)
        wanted = mask[:, 1:]
        return -jnp.sum(((1 - typo_rate) * right + typo_rate * random) * wanted) / jnp.sum(wanted)

    @jax.jit
    def step(params: Params, opt_state: optax.OptState, tokens: Array, mask: Array, typo_rate: Array):
        value, grads = jax.value_and_grad(loss)(params, tokens, mask, typo_rate)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = _fresh_params(config, recipe)
    opt_state = optimizer.init(params)
    for i in range(recipe.num_clean_steps + recipe.num_typo_steps):
        typo_rate = jnp.float32(0.0 if i < recipe.num_clean_steps else corpus.typo_rate)
        params, opt_state, value = step(params, opt_state, *corpus.batch(), typo_rate)
        if i % 50 == 49:
            on_progress(i + 1, float(value))
    return params


def _fresh_params(config: Architecture, recipe: TinyModelRecipe) -> Params:
    """Wider than the decoder's own draw (0.02), which so small a model learns slowly from."""

    def rescale(path: str, value: Array) -> Array:
        if path == "embed/embedding":
            return value * (recipe.embedding_std / INIT_STD)
        if path.endswith("/kernel"):
            return value * (recipe.kernel_gain / value.shape[-1] ** 0.5 / INIT_STD)
        return value

    fresh = flatten(init_params(config, jax.random.key(recipe.seed)))
    return unflatten({path: rescale(path, value) for path, value in fresh.items()})


def _hf_config(recipe: TinyModelRecipe, tokenizer: tokenizers.Tokenizer) -> dict:
    eos, pad = _id(tokenizer, _EOS), _id(tokenizer, _PAD)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": recipe.max_position_embeddings,
        "tie_word_embeddings": recipe.tie_word_embeddings,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def _id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found
