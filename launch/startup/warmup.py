"""Supervised warm-up of the quickstart's model, and its corpus.

Corpora exist for tasks with whole-number answers, for files of rows with answers or programs
(`configs.tasks.code_functions`), and for environments with example episodes (`configs.tasks.catalog`).
"""

import itertools
import json
import pathlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jaxtyping import Array, Int32

from bridge import code_tests
from bridge.param_names import flatten, unflatten
from configs.model_sizes import TinyModelRecipe
from configs.sections import PromptsConfig
from configs.sections.prompts import PromptSource
from configs.tasks.catalog import EXAMPLES, ROWS
from configs.tasks.rows import Turn
from learner.data.generated import ReasoningGymSource
from learner.data.problem import is_held_out
from learner.data.row_filter import gold_rows
from learner.model import hf_save
from learner.model.architecture import Architecture
from learner.model.decoder import INIT_STD, Params, init_params, make_apply, output_head

_SEED = 3_000_017
_NUM_LOOKED_AT = 2000
_LONG = 16
"""Mean characters per answer above which answers get fewer typos, because every character must be right."""


Example = tuple[str, Sequence[Turn]]
"""A question and the turns after it."""


class Corpus:
    """Endless right-padded batches of examples: freshly generated ones, or a file's rows in shuffled order."""

    def __init__(
        self, recipe: TinyModelRecipe, prompts: PromptsConfig, tokenizer: tokenizers.Tokenizer, *, eos: int
    ) -> None:
        """Samples many examples to find their maximum length and their characters.

        Raises ValueError if there are no examples, or the task's answers are not whole numbers.
        """
        self._recipe = recipe
        self._one_in = prompts.held_out_one_in
        self._tokenizer, self.eos = tokenizer, eos
        self._examples = _examples(prompts, _SEED + recipe.seed)
        drawn = [self._draw() for _ in range(_NUM_LOOKED_AT)]
        written = ["".join(s.text for s in said if s.by_policy) for _, said in drawn]
        is_of_sums = not (prompts.path or prompts.environment)
        letters = "-0123456789" if is_of_sums else "".join(sorted(set("".join(written))))
        self.answer_ids = np.array([*self._encode(letters), eos], np.int32)
        """Token ids of the characters in answers, and the end token."""
        is_long = statistics.fmean(map(len, written)) > _LONG
        self.typo_rate = recipe.program_typo_rate if is_long else recipe.typo_rate
        # The longest of many samples; batches leave out longer examples.
        self.length = max(len(self._tokens(example)[0]) for example in drawn)

    def batch(self) -> tuple[Int32[np.ndarray, "B S"], Int32[np.ndarray, "B S"]]:
        """Returns token ids, and a mask with 1 for tokens that the policy writes (answers, turns, end tokens)."""
        tokens = np.zeros((self._recipe.batch_size, self.length), np.int32)
        mask = np.zeros_like(tokens)
        row = 0
        while row < len(tokens):
            ids, wanted = self._tokens(self._draw())
            if len(ids) > self.length:
                continue
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, wanted
            row += 1
        return tokens, mask

    def _draw(self) -> Example:
        return next(e for e in self._examples if not is_held_out(e[0], self._one_in))

    def _tokens(self, example: Example) -> tuple[list[int], list[int]]:
        question, pieces = example
        tokens = self._encode(question)
        mask = [0] * len(tokens)
        for said in pieces:
            added = [*self._encode(said.text), *([self.eos] if said.by_policy else [])]
            tokens += added
            mask += [int(said.by_policy)] * len(added)
        return tokens, mask

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _examples(prompts: PromptsConfig, seed: int) -> Iterator[Example]:
    if prompts.mixture:
        raise ValueError(
            "model.path: the tiny model supports one prompt source, but prompts.mixture has several; set model.path"
        )
    if prompts.path:
        return _of_rows(prompts, seed)
    return _of_episodes(prompts, seed) if prompts.environment else _of_sums(prompts, seed)


def _answered(question: str, answer: str) -> Example:
    return question, [Turn(answer, by_policy=True)]


def _of_sums(prompts: PromptsConfig, seed: int) -> Iterator[Example]:
    source = PromptSource(task=prompts.task, task_args=prompts.task_args, pattern=prompts.pattern, verifier="exact")
    problems = ReasoningGymSource(source, seed=seed)
    for index in itertools.count():
        raw = problems[index]
        try:
            yield _answered(raw.question, str(int(raw.task.answer)))
        except ValueError as e:
            raise ValueError(
                f"the tiny model requires a task with whole-number answers, got {raw.task.answer!r}"
            ) from e


def _of_rows(prompts: PromptsConfig, seed: int) -> Iterator[Example]:
    known = [
        _answered(gold.question, answer)
        for gold in gold_rows(prompts)
        for is_code in [any(part.name == "code" for part in gold.task.rewards)]
        if (answer := code_tests.read(json.loads(gold.task.metadata)).solution if is_code else gold.task.answer)
    ]
    if all(is_held_out(question, prompts.held_out_one_in) for question, _ in known):
        raise ValueError(f"{prompts.path} has no rows with answers, which the tiny model's warm-up needs")
    order = np.random.default_rng(seed)
    while True:
        for index in order.permutation(len(known)):
            yield known[index]


def _of_episodes(prompts: PromptsConfig, seed: int) -> Iterator[Example]:
    example = EXAMPLES.get(prompts.environment)
    if example is None or prompts.environment_rows:
        raise ValueError(
            f"model.path: the tiny model cannot be warmed up for prompts.environment={prompts.environment}; "
            f"example episodes exist for {', '.join(EXAMPLES)} with their own rows; set model.path"
        )
    row = ROWS[prompts.environment](seed, prompts.environment_args)
    drawn = random.Random(seed)
    for index in itertools.count():
        made = row(index)
        yield made.question, example(made, drawn)


_CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
_PAD, _EOS = "<pad>", "<eos>"


def make_tiny_model(
    folder: pathlib.Path,
    recipe: TinyModelRecipe,
    prompts: PromptsConfig,
    *,
    on_progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Writes a Hugging Face folder (config.json, safetensors, tokenizer), which must be absent or empty.

    `on_progress` is called every 50 steps with the step and its loss (nats per token). Raises ValueError if there are
    no examples of answers, and FileExistsError if `folder` is not empty.
    """
    parts = folder.with_name(f".{folder.name}.tokenizer")
    write_character_tokenizer(parts)
    tokenizer = tokenizers.Tokenizer.from_file(str(parts / "tokenizer.json"))
    config = Architecture.from_hf(_hf_config(recipe, tokenizer))
    corpus = Corpus(recipe, prompts, tokenizer, eos=_id(tokenizer, _EOS))
    params = _train(config, recipe, corpus, on_progress)
    hf_save.save(folder, config, params, tokenizer_from=parts)
    for file in parts.iterdir():
        file.unlink()
    parts.rmdir()


def write_character_tokenizer(folder: pathlib.Path) -> None:
    """Writes a tokenizer of printable ASCII, one token per character, with padding and end-of-sequence tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate([*_CHARACTERS, _PAD, _EOS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=_PAD))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([_PAD, _EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": _PAD, "eos_token": _EOS}
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
        """Returns the expected cross-entropy (nats per token) with a share `typo_rate` of random answer characters."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        # Padding comes last, so no scored token attends to it.
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
    """Draws parameters with a larger std than the decoder's 0.02, with which so small a model learns slowly."""

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
