"""Which text of a supervised row is trained, and that its context is the prompt of reinforcement learning."""

import dataclasses
import itertools
from typing import Any

import pytest

from bridge.text import text_tokens
from bridge.text.chat_template import TemplateSettings
from configs import sections
from learner.data.completions import joined, render_completions, tokenize_completions, turn_end
from learner.data.parse_row import RowFormat, parse_row
from learner.data.problem import Problem, RawProblem, is_held_out, task_of
from learner.data.source_context import SourceContext
from learner.data.tokenizer import Tokenizer, load_tokenizer, tokenize
from tests.bridge.text import published
from tests.learner.chat_folder import CHAT, sft_config, write_chat_tokenizer
from tests.learner.model_folder import VOCAB_SIZE, make_model_folder

USER, TURN = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n"
THINKING = (
    "{% set last = messages | map(attribute='role') | list | length - 1 %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1] if loop.index0 < last else m.content }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops the thinking of all messages but the last, as templates of reasoning models do."""
PROMPTS = sections.PromptsConfig(path="rows.jsonl")


def loaded(folder, template: str = "") -> Tokenizer:
    make_model_folder(folder)
    if template:
        write_chat_tokenizer(folder, template)
    return load_tokenizer(folder, vocab_size=VOCAB_SIZE)


@pytest.fixture
def chat(tmp_path) -> Tokenizer:
    return loaded(tmp_path / "m", CHAT)


def raw(prompt: Any, response: Any = None, prompts: sections.PromptsConfig = PROMPTS) -> RawProblem:
    form = dataclasses.replace(RowFormat.of(prompts, prompts.sources[""]), response_field="response")
    found = parse_row(1, {"prompt": prompt} | ({} if response is None else {"response": response}), form)
    assert isinstance(found, RawProblem), found
    return found


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def pieces(row: RawProblem, tokenizer: Tokenizer, prompts: sections.PromptsConfig = PROMPTS) -> list[list[tuple]]:
    return [[tuple(piece) for piece in sequence] for sequence in render_completions(row, tokenizer, prompts)]


def trained(problem: Problem, tokenizer: Tokenizer) -> list[list[str]]:
    """The trained runs of tokens of each sequence, as text."""
    found: list[list[str]] = []
    for c in problem.completions:
        runs = itertools.groupby(zip(c.tokens.tolist(), c.loss_mask.tolist(), strict=True), key=lambda pair: pair[1])
        found.append([tokenizer.decode([i for i, _ in run]) for is_trained, run in runs if is_trained])
    return found


def test_response_follows_the_prompt_of_reinforcement_learning_and_ends_its_turn(chat):
    row = raw("2 + 2?", 4)
    problem = tokenize_completions(row, chat, PROMPTS)
    assert problem.prompt_tokens.tolist() == tokenize(row, chat, PROMPTS).prompt_tokens.tolist()
    assert trained(problem, chat) == [["4<|im_end|>"]] and problem.completions[0].loss_mask.all()
    assert turn_end(chat, is_chat=True) == "<|im_end|>" != chat.chat.special_tokens["eos_token"]


def test_response_without_a_template_follows_the_text_and_ends_with_eos(tmp_path):
    plain = loaded(tmp_path / "m")
    problem = tokenize_completions(raw("2 + 2 =", "4"), plain, PROMPTS)
    assert plain.decode(problem.prompt_tokens.tolist()) == "2 + 2 =" and trained(problem, plain) == [["4<eos>"]]
    with pytest.raises(ValueError, match="a conversation, and no chat template is applied"):
        render_completions(raw(said("a", "b")), plain, PROMPTS)


def test_conversation_trains_every_assistant_message_in_one_sequence(chat):
    row = raw(said("a", "b", "c", "d", "e"))
    whole = [
        (USER.format("a") + TURN, False),
        ("b<|im_end|>", True),
        ("\n" + USER.format("c") + TURN, False),
        ("d<|im_end|>", True),
    ]
    assert pieces(row, chat) == [whole]
    assert trained(tokenize_completions(row, chat, PROMPTS), chat) == [["b<|im_end|>", "d<|im_end|>"]]
    assert row.question == "a"  # so that what is held out is held out, with a response or as a conversation
    assert is_held_out(row.question, 3) == is_held_out(raw("a", "x").question, 3)


def test_turn_whose_thinking_a_later_turn_drops_is_trained_as_it_is_generated(tmp_path):
    tokenizer = loaded(tmp_path / "m", THINKING)
    row = raw(said("a", "<think>1</think>b", "c", "<think>2</think>d"))
    first, second = pieces(row, tokenizer)
    assert first == [(USER.format("a") + TURN, False), ("<think>1</think>b<|im_end|>", True)]
    context = USER.format("a") + TURN + "b<|im_end|>\n" + USER.format("c") + TURN
    assert second == [(context, False), ("<think>2</think>d<|im_end|>", True)]
    problem = tokenize_completions(row, tokenizer, PROMPTS)
    sequences = [tokenizer.decode([*problem.prompt_tokens, *c.tokens]) for c in problem.completions]
    assert sequences == ["".join(text for text, _ in sequence) for sequence in (first, second)]
    assert trained(problem, tokenizer) == [["<think>1</think>b<|im_end|>"], ["<think>2</think>d<|im_end|>"]]
    assert problem.num_tokens == max(len(tokenizer.encode(text)) for text in sequences)


def test_response_that_continues_an_answer_begins_behind_it(chat):
    problem = tokenize_completions(raw(said("a", "b"), "c"), chat, PROMPTS)
    assert chat.decode(problem.prompt_tokens.tolist()) == USER.format("a") + TURN + "b"
    assert trained(problem, chat) == [["c<|im_end|>"]]


def test_control_token_in_a_response_is_text_and_no_end(chat):
    end = chat.backend.token_to_id("<|im_end|>")
    for row in (raw("a", "b<|im_end|>c"), raw(said("a", "b<|im_end|>c"))):
        (completion,) = tokenize_completions(row, chat, PROMPTS).completions
        assert completion.tokens.tolist().count(end) == 1 and completion.tokens[-1] == end
        assert completion.loss_mask.sum() == len("b<|im_end|>c") + 1


@pytest.mark.parametrize(
    ("name", "eos"),
    [
        ("gpt_oss", "<|return|>"),
        ("command_r7b", "<|END_OF_TURN_TOKEN|>"),
        ("mistral_v3", "</s>"),
        ("llama2", "</s>"),
        ("llama3_1", "<|eot_id|>"),
    ],
)
def test_response_is_trained_as_the_same_conversation_is(tmp_path, name, eos):
    template = (published.FOLDER / f"{name}.jinja").read_text()
    folder = published.make_folder(tmp_path / "m", template, eos_token=eos)
    tokenizer = load_tokenizer(folder, vocab_size=1024, template=TemplateSettings(date=published.DATE))
    rows = raw("Q", "Paris"), raw(said("Q", "Paris"))
    assert pieces(rows[0], tokenizer) == pieces(rows[1], tokenizer)


def test_response_in_the_models_own_format_keeps_its_control_tokens_but_no_end(tmp_path):
    template = (published.FOLDER / "gpt_oss.jinja").read_text()
    folder = published.make_folder(tmp_path / "m", template, eos_token="<|return|>")
    tokenizer = load_tokenizer(folder, vocab_size=1024, template=TemplateSettings(date=published.DATE))
    own = "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>A"
    (completion,) = tokenize_completions(raw("Q", f"{own}<|return|>B"), tokenizer, PROMPTS).completions
    ids = completion.tokens.tolist()
    assert [ids.count(published.id_of(t)) for t in ("<|channel|>", "<|message|>", "<|return|>")] == [2, 2, 1]


def test_measured_text_has_the_tokens_that_are_trained(chat):
    for row in (raw("a", "b<|im_end|>c"), raw(said("a", "b", "c", "d"))):
        problem = tokenize_completions(row, chat, PROMPTS)
        sizes = [len(text_tokens.encode(chat.backend, joined(s))) for s in render_completions(row, chat, PROMPTS)]
        assert max(sizes) == problem.num_tokens


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHAT.replace("<|im_start|>assistant\\n' }}{% endif", "<|im_start|>assistant\\n<think>' }}{% endif"),
            "does not write",
        ),
        (CHAT.replace("+ '<|im_end|>' }}{% endgen", "}}{% endgen"), "no end-of-sequence token"),
    ],
)
def test_template_that_does_not_continue_or_end_a_turn_refuses_the_row(tmp_path, template, message):
    assert template != CHAT
    with pytest.raises(ValueError, match=message):
        render_completions(raw(said("a", "b")), loaded(tmp_path / "m", template), PROMPTS)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "no field 'response', and no assistant message in 'prompt'"),
        ({"prompt": said("a")}, "no assistant message"),
        ({"prompt": said("", "a")[1:]}, "must have text before the first assistant message"),
        ({"response": "a"}, "no field 'prompt'"),
        ({"prompt": "a", "response": ""}, "'response' must be text or a number"),
        ({"prompt": "a", "response": ["b"]}, "'response' must be text or a number"),
        ({"prompt": [{"role": "user"}], "response": "b"}, "every message needs a role and a content"),
    ],
)
def test_row_that_says_nothing_to_learn_is_refused(row, reason):
    form = dataclasses.replace(RowFormat.of(PROMPTS, PROMPTS.sources[""]), response_field="response")
    found = parse_row(1, row, form)
    assert isinstance(found, str) and reason in found


def test_response_field_may_be_the_answers():
    form = dataclasses.replace(RowFormat.of(PROMPTS, PROMPTS.sources[""]), response_field="answer")
    found = parse_row(1, {"prompt": "a", "answer": 42.0}, form)
    assert isinstance(found, RawProblem) and found.response == "42" and form.columns[:2] == ["prompt", "answer"]


def test_turns_share_as_prompt_only_what_all_their_contexts_begin_with(tmp_path):
    tokenizer = loaded(tmp_path / "m", "{{ 'ab' + ('many' if messages|length > 2 else 'one') }}" + CHAT)
    problem = tokenize_completions(raw(said("a", "b", "c", "d")), tokenizer, PROMPTS)
    assert tokenizer.decode(problem.prompt_tokens.tolist()) == "ab"
    texts = [tokenizer.decode(c.tokens.tolist()) for c in problem.completions]
    assert [text[:4] for text in texts] == ["one<", "many"] and trained(problem, tokenizer) == [
        ["b<|im_end|>"],
        ["d<|im_end|>"],
    ]
    other = loaded(tmp_path / "n", "{{ 'many' if messages|length > 2 else 'one' }}" + CHAT)
    with pytest.raises(ValueError, match="begins the conversation differently when another turn follows"):
        tokenize_completions(raw(said("a", "b", "c", "d")), other, PROMPTS)


def test_generated_problem_without_an_answer_is_refused_and_another_one_teaches_its_answer(chat, tmp_path):
    context = SourceContext(config=sft_config(tmp_path, [{}]), tokenizer=chat)
    found = RawProblem("1+1=", (), task_of("2", {"exact": 1.0}, answer_in="text"))
    assert trained(context.tokenize(found, ""), chat) == [["2<|im_end|>"]]
    nothing = dataclasses.replace(found, task=task_of("", {"exact": 1.0}, answer_in="text"))
    with pytest.raises(ValueError, match="prompts: the task's problem has no reference answer to learn: '1[+]1='"):
        context.tokenize(nothing, "")
