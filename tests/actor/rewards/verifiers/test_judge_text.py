import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actor.rewards.verifiers import judge_text
from bridge.rollout_types import Task
from configs.sections.rewards import JudgeConfig

JSON = JudgeConfig()
WORDS = JudgeConfig(parser="verdict", verdicts={"correct": 10.0, "incorrect": 0.0, "partly correct": 5.0})
NUMBER = JudgeConfig(parser="regex")
TRUTH = JudgeConfig(json_fields={"score": "number", "is_safe": "boolean"})


@pytest.mark.parametrize(
    ("config", "text", "score"),
    [
        (JSON, '{"reason": "r", "score": 7}', 7.0),
        (JSON, 'Well.\n```json\n{"score": 3.5, "reason": "}"}\n```\nDone.', 3.5),
        (JSON, '{"reason": "a draft", "score": 2.0} so: {"reason": "last", "score": 2}', 2.0),
        (JSON, '{"reason": {"score": 9}} {"reason": "r", "score": 2, "more": {"score": 8}}', 2.0),
        (JSON, '<think>{"reason": "r", "score": 10}</think>{"reason": "r", "score": 1}', 1.0),
        (JSON, '[THINK]{"reason": "r", "score": 10}[/THINK]{"reason": "r", "score": 1}', 1.0),
        (JSON, '{{{ {"reason": "r", "score": 4} }', 4.0),
        (TRUTH, '{"score": 4, "is_safe": false}', 4.0),
        (NUMBER, "Score: 7/10. So the score is given: score 7.0", 7.0),
        (NUMBER, "**Score:** 7", 7.0),
        (NUMBER, "Underscore 3, score: `4`", 4.0),
        (NUMBER, "score = -2.5", -2.5),
        (WORDS, "It is not that.\n\nINCORRECT.\n", 0.0),
        (WORDS, "correct", 10.0),
        (WORDS, "Is it correct? No.\n**Partly correct**", 5.0),
        (JudgeConfig(parser="verdict", verdicts={"A": 1.0, "A.": 2.0}), "A.", 2.0),
    ],
)
def test_raw_score_is_the_one_that_is_stated(config, text, score):
    assert judge_text.raw_score(text, config) == score


@pytest.mark.parametrize(
    ("config", "text", "kind"),
    [
        (JSON, "", "no_json"),
        (JSON, "[1, 2]", "no_json"),
        (JSON, "{" * 40_000, "no_json"),
        (JSON, '{"a":' * 9_000, "no_json"),
        (JSON, '{"reason": "r", "score": NaN}', "no_json"),
        (JSON, '{"reason": "r", "score": 7} {"reason": "r"}', "wrong_schema"),
        (JSON, '<think>{"reason": "r", "score": 10}</think>', "no_json"),
        (JSON, '<think>{"reason": "r", "score": 10}', "no_json"),
        (JSON, '{"reason": 3, "score": 7}', "wrong_schema"),
        (JSON, f'{{"reason": "r", "score": {"9" * 400}}}', "no_number"),
        (TRUTH, '{"score": 4, "is_safe": 1}', "wrong_schema"),
        (TRUTH, '{"score": true, "is_safe": true}', "wrong_schema"),
        (NUMBER, "fine", "no_match"),
        (JudgeConfig(parser="regex", pattern=r"score (\w+)"), "score high", "no_number"),
        (JudgeConfig(parser="regex", pattern=r"score (\w+)"), "score nan", "not_finite"),
        (JudgeConfig(parser="regex", pattern=r"score( \d)?"), "score", "no_number"),
        (JSON, '{"reason": "bad", "score": 1}\nIt said {"reason": "great", "score": 10}.', "ambiguous"),
        (JSON, '{"score": 10} {"reason": "bad", "score": 1}', "ambiguous"),
        (NUMBER, "Score: 7 (on the scale score 0 to 10)", "ambiguous"),
        (NUMBER, "Score: 7/10. No, score 4", "ambiguous"),
        (WORDS, "who knows", "no_verdict"),
        (WORDS, "The response is not correct.", "no_verdict"),
        (WORDS, "correct? No, incorrect", "no_verdict"),
        (WORDS, "correct\nThat is what it would be if it were 4.", "no_verdict"),
        (WORDS, " \n", "no_verdict"),
        (WORDS, "correctly so", "no_verdict"),
    ],
)
def test_raw_score_of_what_states_none_is_an_error_of_its_kind(config, text, kind):
    with pytest.raises(judge_text.JudgeParseError) as e:
        judge_text.raw_score(text, config)
    assert e.value.kind == kind


@given(st.floats(allow_nan=False), st.floats(-100, 100), st.floats(0.5, 100))
def test_scaled_is_between_0_and_1_and_grows_with_the_score(number, low, width):
    config = JudgeConfig(min_score=low, max_score=low + width)
    got = judge_text.scaled(number, config)
    assert 0.0 <= got <= 1.0 and math.isfinite(got)
    assert judge_text.scaled(low, config) == 0.0 and judge_text.scaled(low + width, config) == 1.0
    if low <= number <= low + width:
        assert got == pytest.approx((number - low) / width, abs=1e-9)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_objects_of_a_text_with_one_are_that_one(value):
    wanted = {"score": value}
    assert judge_text.objects(f"so {{ it is {json.dumps(wanted)} and that }} is all") == [wanted]


def test_schema_is_that_of_the_fields():
    wanted = {"score": {"type": "number"}, "is_safe": {"type": "boolean"}}
    assert judge_text.schema(TRUTH)["json_schema"]["schema"]["properties"] == wanted


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
