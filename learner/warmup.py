"""Makes the tiny model: a character tokenizer, fresh weights, and a short supervised phase in JAX.

Needs a task whose answers are whole numbers, or a file of rows with answers, or programs (`configs.code_tasks`).
Held-out problems never enter (`learner.data.problems`).
"""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jaxtyping import Array, Int32

from bridge import code_tests
from bridge.names import flatten, unflatten
from configs.sections import PromptsConfig
from configs.sections.prompt_source import PromptSource
from configs.tiny_model import TinyModelRecipe
from learner.data.gold import gold_rows
from learner.data.problems import is_held_out
from learner.data.sources.reasoning_gym import ReasoningGymSource
from learner.model.config import Architecture
from learner.model.decoder import INIT_STD, Params, init_params, make_apply, output_head
from learner.model.hf import io as hf_io

_WARMUP_SEED = 3_000_017
_CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
_PAD, _EOS = "<pad>", "<eos>"


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
      ValueError: the task's answers are not whole numbers; or the file has no rows with answers.
      FileExistsError: `folder` has something in it.
    """
    parts = folder.with_name(f".{folder.name}.tokenizer")
    write_character_tokenizer(parts)
    tokenizer = tokenizers.Tokenizer.from_file(str(parts / "tokenizer.json"))
    config = Architecture.from_hf(_hf_config(recipe, tokenizer))
    params = _train(config, recipe, _Corpus(recipe, prompts, tokenizer), on_progress)
    hf_io.save(folder, config, params, tokenizer_from=parts)
    for file in parts.iterdir():
        file.unlink()
    parts.rmdir()


def write_character_tokenizer(folder: pathlib.Path) -> None:
    """A tokenizer of printable ASCII, one token a character, with padding and end-of-sequence tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate([*_CHARACTERS, _PAD, _EOS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=_PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([_PAD, _EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _PAD, "eos_token": _EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


class _Corpus:
    """Endless batches of prompt + answer + end, right-padded; a task's problems are fresh, a file's are shuffled."""

    def __init__(self, recipe: TinyModelRecipe, prompts: PromptsConfig, tokenizer: tokenizers.Tokenizer) -> None:
        self._recipe = recipe
        self._one_in = prompts.held_out_one_in
        self._tokenizer = tokenizer
        seed = _WARMUP_SEED + recipe.seed
        self._problems = _rows(prompts, seed) if prompts.path else _sums(prompts, seed)
        self.eos = _id(tokenizer, _EOS)
        letters = _letters(prompts) if prompts.path else "-0123456789"
        self.answer_ids = np.array([*self._encode(letters), self.eos], np.int32)
        """What an answer is made of."""
        self.typo_rate = recipe.program_typo_rate if "code" in prompts.parts else recipe.typo_rate
        # Long enough for the longest of many; a longer one is left out.
        drawn = [self._draw() for _ in range(2000)]
        self.length = max(len(p) + len(a) for p, a in drawn)

    def batch(self) -> tuple[Int32[np.ndarray, "B S"], Int32[np.ndarray, "B S"]]:
        """Token ids, and 1 where a token is to be predicted (the answer and its end)."""
        tokens = np.zeros((self._recipe.batch_size, self.length), np.int32)
        mask = np.zeros_like(tokens)
        row = 0
        while row < len(tokens):
            prompt, answer = self._draw()
            if len(prompt) + len(answer) > self.length:
                continue
            end = len(prompt) + len(answer)
            tokens[row, :end] = prompt + answer
            mask[row, len(prompt) : end] = 1
            row += 1
        return tokens, mask

    def _draw(self) -> tuple[list[int], list[int]]:
        question, answer = next(p for p in self._problems if not is_held_out(p[0], self._one_in))
        return self._encode(question), [*self._encode(answer), self.eos]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _sums(prompts: PromptsConfig, seed: int) -> Iterator[tuple[str, str]]:
    """(question, answer) of a task whose answers are whole numbers."""
    source = PromptSource(task=prompts.task, task_args=prompts.task_args, pattern=prompts.pattern, verifier="exact")
    problems = ReasoningGymSource(source, seed=seed)
    for index in itertools.count():
        raw = problems[index]
        try:
            yield raw.question, str(int(raw.task.answer))
        except ValueError as e:
            raise ValueError(f"the tiny model needs a task with whole-number answers, got {raw.task.answer!r}") from e


def _rows(prompts: PromptsConfig, seed: int) -> Iterator[tuple[str, str]]:
    """(question, answer) of a file's rows, shuffled anew each time they have all been there."""
    known = _answered(prompts)
    order = np.random.default_rng(seed)
    while True:
        for index in order.permutation(len(known)):
            yield known[index]


def _letters(prompts: PromptsConfig) -> str:
    """What a file's answers are made of."""
    return "".join(sorted({letter for _, answer in _answered(prompts) for letter in answer}))


def _answered(prompts: PromptsConfig) -> list[tuple[str, str]]:
    found = [
        (gold.question, code_tests.read(json.loads(gold.task.metadata)).solution if is_code else gold.task.answer)
        for gold in gold_rows(prompts)
        for is_code in [any(part.name == "code" for part in gold.task.rewards)]
    ]
    found = [(question, answer) for question, answer in found if answer]
    if all(is_held_out(question, prompts.held_out_one_in) for question, _ in found):
        raise ValueError(f"{prompts.path} has no rows with answers to warm the tiny model up on")
    return found


def _train(
    config: Architecture, recipe: TinyModelRecipe, corpus: _Corpus, on_progress: Callable[[int, float], None]
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
