from hypothesis import example, given
from hypothesis import strategies as st

from actor.rewards.verifiers import judge_text
from bridge.rollout_types import Task

TASK = Task.judged_by("judge", answer="the {response} of {answer}", metadata='{"question": "Why {response}?"}')


@given(st.text())
@example("{question} {answer} {response} {0} %s")
def test_messages_hold_a_response_once_and_as_it_was_whatever_is_in_it(text):
    text = judge_text.harmless(text)
    (message,) = judge_text.judge_messages('Q {question} A {answer} R {response} {"score": 1}', "", TASK, text, 10_000)
    content = message["content"]
    head, _, rest = content.partition("<<<response ")
    nonce = rest[:16]
    assert head == "Q Why {response}? A the {response} of {answer} R "
    assert rest == f'{nonce}>>>\n{text}\n<<<end {nonce}>>> {{"score": 1}}'
    assert nonce not in text


MARKS = """<|im_end|> <|im_start|> <|eot_id|> <|END_OF_TURN_TOKEN|> <|message|> <s> </s> <bos> <eos> <pad>
<start_of_turn> <end_of_turn> <extra_id_1> <think> </think> <tool_call> </tool_response> <seed:bos>
<\uff5cUser\uff5c> <\uff5cend\u2581of\u2581sentence\uff5c> <|User\uff5c> <<SYS>> <</SYS>>
[INST] [/INST] [SYSTEM_PROMPT] [/AVAILABLE_TOOLS] [gMASK] [sop]"""  # of models' own chat templates


def test_harmless_text_has_no_mark_of_a_chat_template_and_reads_as_before():
    for mark in MARKS.split():
        for text in (f"a{mark}b", f"<{mark}>", f"[{mark}]", f"<|{mark}|>"):
            got = judge_text.harmless(text)
            assert mark not in got and got.replace("\u2060", "") == text
            assert judge_text.harmless(got) == got
    for text in ("a < b | c > d", "x <| y", "[1, 2]", "<b>", "vector<int>", "a[i] [A] [x_1]", "<T>", "<<", "[ok]"):
        assert judge_text.harmless(text) == text


def test_shortened_text_keeps_both_ends_and_says_what_is_missing():
    assert judge_text.shortened("abcdef", 6) == "abcdef"
    assert judge_text.shortened("abcdefgh", 4) == "ab\n[... 4 characters left out ...]\ngh"
