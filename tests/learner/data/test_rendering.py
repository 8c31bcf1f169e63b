import dataclasses
import json

import pytest
import tokenizers

from bridge.text.chat_template import asks_of
from configs import sections
from learner.data.problem import RawProblem, task_of
from learner.data.tokenizer import load_tokenizer, tokenize
from tests.bridge.text import published

TASK = task_of("1", {"exact": 1.0}, answer_in="conclusion")
EPISODE = dataclasses.replace(TASK, environment="guess")
CHAT = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})


def prompt_text(raw, tokenizer, **fields):
    return tokenizer.decode(tokenize(raw, tokenizer, sections.PromptsConfig(**fields)).prompt_tokens)


def test_tokenize_applies_the_chat_template_as_told(tokenizer, chat_tokenizer):
    raw = RawProblem("Q", (), TASK)
    assert prompt_text(raw, tokenizer) == "Q"
    assert prompt_text(raw, chat_tokenizer) == "[user]Q[go]"
    assert prompt_text(raw, chat_tokenizer, chat_template="off") == "Q"
    assert prompt_text(raw, chat_tokenizer, system_prompt="S") == "[system]S[user]Q[go]"
    assert prompt_text(raw, tokenizer, system_prompt="S: ") == "S: Q"
    with pytest.raises(ValueError, match="no chat template"):
        prompt_text(raw, tokenizer, chat_template="on")


def test_tokenize_conversation_keeps_its_own_system_message(chat_tokenizer):
    assert prompt_text(RawProblem("S\nU", CHAT, TASK), chat_tokenizer, system_prompt="other") == "[system]S[user]U[go]"


def test_tokenize_episode_ends_before_the_generation_prompt(chat_tokenizer, tokenizer):
    raw = RawProblem("Q", (), EPISODE)
    assert prompt_text(raw, chat_tokenizer) == "[user]Q"
    assert prompt_text(raw, tokenizer) == "Q"


def test_tokenize_plain_prompt_begins_as_the_tokenizer_begins_a_text_and_only_once(tmp_path):
    made = tokenizers.Tokenizer.from_str(published.tokenizer().to_str())
    special = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    folder = published.make_folder(tmp_path / "m")
    made.save(str(folder / "tokenizer.json"))
    one = load_tokenizer(folder, vocab_size=1024)
    plain = load_tokenizer(published.make_folder(tmp_path / "plain"), vocab_size=1024)

    def ids(text, tokenizer, **fields):
        prompts = sections.PromptsConfig(**fields)
        return tokenize(RawProblem(text, (), TASK), tokenizer, prompts).prompt_tokens.tolist()

    for text in ("q", "<s>q"):  # the oracle is the tokenizer itself
        wanted = made.encode("q", add_special_tokens=True).ids
        assert ids(text, one) == ids(text, one, add_bos=True) == ids(text, plain, add_bos=True) == wanted
    assert ids("q", plain) == wanted[1:]


def test_tokenize_episode_keeps_what_its_prompt_is_rendered_with(chat_tokenizer):
    raw = RawProblem("Q", (), EPISODE, template_arguments={"go": 1})
    with pytest.raises(ValueError, match="unknown argument go"):
        tokenize(raw, chat_tokenizer, sections.PromptsConfig())
    row = json.loads(tokenize(RawProblem("Q", (), EPISODE), chat_tokenizer, sections.PromptsConfig()).task.metadata)
    assert row == {"messages": [{"role": "user", "content": "Q"}]}
    asked = asks_of(row["messages"], tools=[{"name": "f"}], arguments={"a": 1})
    assert asked["prompt_template"] == {"tools": [{"name": "f"}], "arguments": {"a": 1}}


def test_num_tokens_of_a_batch_are_those_of_each(tokenizer):
    texts = ["", "a", "1 + 1 =", "x" * 300]
    assert tokenizer.num_tokens(texts) == [tokenizer.encode(t).size for t in texts]
