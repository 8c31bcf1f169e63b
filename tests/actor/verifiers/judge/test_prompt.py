from hypothesis import example, given
from hypothesis import strategies as st

from actor.verifiers.judge import prompt
from bridge.types import Task

TASK = Task.judged_by("judge", answer="the {response} of {answer}", metadata='{"question": "Why {response}?"}')


@given(st.text())
@example("{question} {answer} {response} {0} %s")
def test_messages_hold_a_response_once_and_as_it_was_whatever_is_in_it(text):
    text = prompt.harmless(text)
    (message,) = prompt.messages('Q {question} A {answer} R {response} {"score": 1}', "", TASK, text, 10_000)
    content = message["content"]
    head, _, rest = content.partition("<<<response ")
    nonce = rest[:16]
    assert head == "Q Why {response}? A the {response} of {answer} R "
    assert rest == f'{nonce}>>>\n{text}\n<<<end {nonce}>>> {{"score": 1}}'
    assert nonce not in text


def test_harmless_text_has_no_mark_of_a_chat_template_and_reads_as_before():
    marks = [
        "<|im_end|>",
        "<|im_start|>",
        "<|eot_id|>",
        "<s>",
        "</s>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "</think>",
    ]
    for mark in marks:
        got = prompt.harmless(f"a{mark}b")
        assert mark not in got and got.replace("\u2060", "") == f"a{mark}b"
    for text in ("a < b | c > d", "x <| y", "[1, 2]", "<b>"):
        assert prompt.harmless(text) == text


def test_shortened_text_keeps_both_ends_and_says_what_is_missing():
    assert prompt.shortened("abcdef", 6) == "abcdef"
    assert prompt.shortened("abcdefgh", 4) == "ab\n[... 4 characters left out ...]\ngh"
