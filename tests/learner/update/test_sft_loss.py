"""Loss and gradient of supervised rows against transformers: its template, its mask, its model, row by row."""

from typing import Any

import jax
import numpy as np
import pytest

from configs import sections
from learner.data.prompt_stream import load_prompts
from learner.data.tokenizer import load_tokenizer
from learner.distributed.sharding import make_mesh
from learner.model.hf_load import load
from learner.update.example_stream import ExampleStream
from learner.update.train_step import build_train_step
from tests.learner.chat_folder import make_chat_model, sft_config
from tests.support.lazy import torch, transformers

SYSTEM = {"role": "system", "content": "be short"}


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 3?", "response": "5"},
    {"prompt": [SYSTEM, *said("a", "an answer that is not trained", "b")], "response": "the last\nturn alone"},
    {"prompt": said("what is 7 - 4?", "3", "and 9 + 9?", "18, I think")},
    {"prompt": [SYSTEM, *said("one", "two", "three", "four", "five")]},  # nothing answers the last message
]


def masked(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], np.ndarray]:
    """Tokens of the whole row by transformers, and where they are the assistant's to learn."""
    messages = row["prompt"] if isinstance(row["prompt"], list) else said(row["prompt"])
    num_context = 0
    if "response" in row:
        context = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        num_context = len(context["input_ids"])
        messages = [*messages, {"role": "assistant", "content": row["response"]}]
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.array(found["assistant_masks"], bool)
    mask[:num_context] = False
    return found["input_ids"], mask


@pytest.mark.heavy
@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_loss_and_gradient_of_packed_rows_are_transformers_own(tmp_path, normalization):
    folder = tmp_path / "model"
    reference = make_chat_model(folder)
    config = sft_config(
        tmp_path,
        ROWS,
        loss=sections.LossConfig(name="sft", normalization=normalization),
        packing=sections.PackingConfig(rows=1, row_tokens=160),
    )
    architecture, params = load(folder)
    tokenizer = load_tokenizer(folder, vocab_size=architecture.vocab_size)
    examples = ExampleStream(config, load_prompts(config, tokenizer)[0])
    steps = build_train_step(architecture, config, make_mesh(devices=jax.devices()[:1]))
    state = steps.init(params)
    micros = examples.next_update()
    assert len(micros) > 1 and max(int(m.batch.segment_ids.max()) for m in micros) > 1  # packed, and accumulated
    for micro in micros:
        state = steps.accumulate(state, micro.batch)
    divisor = float(state.accumulator.denominator)

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [masked(row, theirs) for row in ROWS]
    num_all = sum(int(mask.sum()) for _, mask in rows)
    total = torch.zeros(())
    for ids, mask in rows:
        labels = torch.tensor([i if m else -100 for i, m in zip(ids, mask, strict=True)])
        logits = reference(torch.tensor(ids)[None]).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        total = total + nll / (num_all if normalization == "token" else len(rows) * int(mask.sum()))
    total.backward()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.copy_(weight.grad)
    reference.save_pretrained(tmp_path / "grads")  # the loader brings them into our layout
    (tmp_path / "grads" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())

    assert divisor == (num_all if normalization == "token" else len(ROWS))
    np.testing.assert_allclose(float(state.accumulator.loss) / divisor, total.item(), rtol=1e-5)
    want = load(tmp_path / "grads")[1]
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(want))
    assert largest > 1e-2
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(np.asarray(g) / divisor, w, atol=1e-5 * largest, rtol=1e-5),
        state.accumulator.grads,
        want,
    )
