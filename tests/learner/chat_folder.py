"""A tiny model folder with random weights, a character tokenizer and a chat template, and supervised runs on it."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from configs import schema, sections
from launch.startup.warmup import write_character_tokenizer
from tests.learner.model.tiny import SHAPE, reference_of
from tests.support.lazy import transformers

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Its `generation` tags tell transformers which tokens are the assistant's; they render nothing."""


def write_chat_tokenizer(folder: Path, template: str = CHAT) -> None:
    """A character tokenizer that knows the marks of turns and thinking, with a template."""
    write_character_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def make_chat_model(folder: Path, *, seed: int = 0) -> Any:
    """Writes the folder; returns the transformers model of its weights."""
    fields = SHAPE | dict(vocab_size=128, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=97)
    model = reference_of(transformers.AutoConfig.for_model("llama", **fields), seed)
    model.save_pretrained(folder)
    write_chat_tokenizer(folder)
    return model


def sft_config(folder: Path, rows: list[dict[str, Any]], *, num_updates: int = 4, **changed: Any) -> schema.Config:
    """A supervised run in folder/run on rows that none but every second update's are held out of, if any are."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = dict(
        run=sections.RunConfig(dir=str(folder / "run"), num_updates=num_updates, trackers=""),
        model=sections.ModelConfig(path=str(folder / "model"), max_tokens=128),
        prompts=sections.PromptsConfig(path=str(file), held_out_one_in=2**31 - 1),
        rounds=sections.RoundsConfig(groups_per_round=1, groups_per_update=1),
        publish=sections.PublishConfig(probe_every_n_publishes=0),
        loss=sections.LossConfig(name="sft"),
        sft=sections.SftConfig(rows_per_update=len(rows)),
        optimizer=sections.OptimizerConfig(learning_rate=3e-3),
        packing=sections.PackingConfig(rows=2, row_tokens=128),
        evaluation=sections.EvaluationConfig(num_problems=0),
    )
    return schema.Config(preset="test", **(fields | changed))
