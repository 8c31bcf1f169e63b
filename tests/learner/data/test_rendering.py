import pytest

from configs import sections
from learner.data.problems import RawProblem, task_of
from learner.data.rendering import tokenize

TASK = task_of("1", {"exact": 1.0}, answer_in="conclusion")
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
    raw = RawProblem("Q", (), TASK, environment="guess")
    assert prompt_text(raw, chat_tokenizer) == "[user]Q"
    assert prompt_text(raw, tokenizer) == "Q"


def test_num_tokens_of_a_batch_are_those_of_each(tokenizer):
    texts = ["", "a", "1 + 1 =", "x" * 300]
    assert tokenizer.num_tokens(texts) == [tokenizer.encode(t).size for t in texts]
