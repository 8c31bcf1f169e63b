import dataclasses
import json
import pathlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from actor.engine_protocol import Episode, Sample
from actor.responses import ResponseReader
from actor.rewards import registry
from actor.rewards.types import Context, Response
from actor.rewards.verifiers import math, text_match
from bridge.rollout_types import Finish, Task, Ticket, Version
from bridge.text.chat_template import ChatTemplate
from configs.sections import RewardsConfig
from tests.actor.environments.chat import CHATML, EOS, IM_END, characters
from tests.bridge.factories import make_ticket
from tests.support.lazy import gym

OPENS = CHATML.replace("assistant\\n", "assistant\\n<think>\\n")
TOKENIZER = characters()


def ids(text: str) -> np.ndarray:
    return np.asarray(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32)


def reader(source: str = "", **fields: Any) -> ResponseReader:
    return ResponseReader(TOKENIZER, ChatTemplate(folder=pathlib.Path("m"), source=source, special_tokens={}), **fields)


def ticket(prompt: str) -> Ticket:
    one = make_ticket(prompt_tokens=ids(prompt))
    return dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, stop_token_ids=(EOS, IM_END)))


def sample(text: str, *, finish: Finish = "stop", sampled: np.ndarray | None = None) -> Sample:
    tokens = ids(text)
    return Sample(
        tokens=tokens,
        logprobs=np.zeros(tokens.size, np.float32),
        token_versions=(Version(incarnation=0, step=0),) * tokens.size,
        finish=finish,
        episode=None if sampled is None else Episode(sampled=sampled, turn_rewards=np.zeros(2, np.float32)),
    )


def asked(source: str, said: str = "x", **render: Any) -> Ticket:
    chat = ChatTemplate(folder=pathlib.Path("m"), source=source, special_tokens={})
    return ticket(chat.render([{"role": "user", "content": said}], **render))


def test_response_after_a_prompt_that_opened_the_thinking_has_its_parts():
    got = reader(OPENS)(asked(OPENS, "Write <think> first."), sample("a b</think>\n4<im><|im_end|>"))
    assert (got.text, got.begun_by_prompt) == ("a b</think>\n4<im>", "<think>\n")
    assert (got.thinking, got.answer, got.is_thinking_finished) == ("a b", "4<im>", True)
    assert got.message == "<think>\na b</think>\n4<im>"
    assert got.num_tokens == len("a b") + 1 + len("\n4<im>") + 1
    assert got.num_thinking_tokens == len("a b") + 1 + 1  # its closing mark, and the line break


def test_response_that_never_ends_its_thinking_has_no_answer():
    for finish in ("stop", "length"):
        got = reader(OPENS)(asked(OPENS), sample("it is 4", finish=finish))
        assert (got.thinking, got.answer, got.is_thinking_finished) == ("it is 4", "", False)
        assert got.num_thinking_tokens == got.num_tokens == 7


def test_special_tokens_are_in_the_message_and_not_in_the_answer():
    got = reader()(ticket("x"), sample("<think>a<pad></think>4<bos><eos>"))
    assert (got.message, got.thinking, got.answer) == ("<think>a<pad></think>4<bos>", "a", "4")
    plain = reader(thinking_marks="off")(ticket("x"), sample("<think>a</think>4<eos>"))
    assert (plain.answer, plain.thinking, plain.num_thinking_tokens) == ("a4", "", 0)
    by_hand = reader(thinking_marks="(...)")(ticket("x"), sample("(a)4<eos>"))
    assert (by_hand.answer, by_hand.thinking, by_hand.num_thinking_tokens) == ("4", "a", 3)


def test_response_without_thinking_is_what_was_written():
    got = reader(CHATML)(asked(CHATML), sample("4, no more<|im_end|>"))
    assert (got.answer, got.message, got.num_thinking_tokens) == ("4, no more", "4, no more", 0)


def test_response_of_an_episode_is_its_last_turn_and_counts_the_thinking_of_all():
    between = "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n<think>\n"
    text = f"ab</think>3<|im_end|>{between}c</think>4<|im_end|>"
    mask = np.array([True] * 5 + [False] * ids(between).size + [True] * 4)
    got = reader(OPENS)(asked(OPENS), sample(text, sampled=mask))
    assert (got.thinking, got.answer, got.begun_by_prompt) == ("c", "4", "<think>\n")
    assert (got.num_tokens, got.num_thinking_tokens) == (9, 3 + 2)


GYM = json.dumps({"question": "", "answer": "4", "metadata": {"source_dataset": "chain_sum"}})


@pytest.mark.parametrize("verifier", [text_match, math, gym])
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("is it 5?</think>4", 1.0),
        ("4, \\boxed{4}</think>5", 0.0),
        ("\\boxed{4} <answer>4</answer>", 0.0),
        ("4</think>", 0.0),
    ],
)
def test_verifiers_of_answers_read_what_stands_behind_the_thinking(verifier: ModuleType, text: str, reward: float):
    task = Task.judged_by("math", answer="4", metadata=GYM if verifier is gym else "{}")
    for source, begun in ((OPENS, ""), (CHATML, "<think>")):
        response = reader(source)(asked(source), sample(f"{begun}{text}<|im_end|>"))
        score = text_match.score_exact if verifier is text_match else verifier.score
        got = score(response, task, Context())
        assert got.value == pytest.approx(reward, abs=0.02)


@pytest.mark.parametrize("answer_in", ["text", "number"])
def test_math_looks_for_numbers_in_the_answer_alone(answer_in):
    task = Task.judged_by("math", answer="4", metadata=json.dumps({"answer_in": answer_in}))
    for text, reward in {
        "2 and 2 make 4": 0.0,
        "so 5</think>it comes to 4": 1.0,
        "so 4</think>it comes to 5": 0.0,
    }.items():
        response = reader(OPENS)(asked(OPENS), sample(text))
        assert math.score(response, task, Context()).value == reward


@pytest.mark.parametrize(
    ("source", "pattern", "text", "reward"),
    [
        (OPENS, r"<think>.*</think>.+", "a</think>4", 1.0),
        (OPENS, r"<think>.*</think>.+", "a, 4", 0.0),
        (CHATML, r"<think>.*</think>.+", "<think>a</think>4", 1.0),
        (CHATML, r"<think>.*</think>.+", "a</think>4", 0.0),  # the prompt opened nothing
        (CHATML, r".*<bos>\d", "<think>a</think><bos>4", 1.0),
    ],
)
def test_format_sees_special_tokens_and_what_the_prompt_opened(source, pattern, text, reward):
    task = Task.judged_by("format", answer="")
    response = reader(source)(asked(source), sample(f"{text}<|im_end|>"))
    assert text_match.score_format(response, task, Context(settings=RewardsConfig(format_pattern=pattern))) == reward


@pytest.mark.parametrize(
    ("text", "parts"),
    [("a</think>4", ("a", "4", True)), ("<think>a", ("a", "", False)), ("4", ("", "4", True))],
)
def test_response_of_a_text_alone_is_split_by_the_known_marks(text, parts):
    got = Response(text=text, finish="stop", num_tokens=1)
    assert (got.thinking, got.answer, got.is_thinking_finished) == parts
    assert registry.load("exact")(got, Task.judged_by("exact", answer="4"), Context()).value == float(parts[1] == "4")
