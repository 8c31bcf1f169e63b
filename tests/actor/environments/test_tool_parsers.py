import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.environments.tool_parsers import MAX_CALLS, PARSERS, Calls, ToolCall, parse

TOOLS = ("calc", "look")
CALL = ToolCall(name="calc", arguments={"expression": "1+2"})


def hermes(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{b}\n</tool_call>" for b in bodies)


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("hermes", hermes('{"name": "calc", "arguments": {"expression": "1+2"}}'), [CALL]),
        ("hermes", "I think.\n" + hermes('{"name": "look"}', '{"name": "calc", "arguments": {}}') + " done", None),
        ("hermes", "just text", []),
        ("llama3", '{"name": "calc", "parameters": {"expression": "1+2"}}', [CALL]),
        ("llama3", '<|python_tag|>{"name": "calc", "parameters": {"expression": "1+2"}}', [CALL]),
        ("llama3", '{"name": "calc", "parameters": {"expression": "1+2"}}; {"name": "look", "parameters": {}}', None),
        ("llama3", "The answer is {3}.", []),
        ("tag", "so <calc> 1+2 </calc> then <look>x</look>", None),
        ("tag", "1 < 2 and 3 > 2", []),
    ],
)
def test_parse_finds_the_calls_in_order(parser, text, calls):
    parsed = parse(parser, text, TOOLS)
    assert parsed.error == ""
    if calls is not None:
        assert list(parsed.calls) == calls
    else:
        assert len(parsed.calls) == 2 and {c.name for c in parsed.calls} == {"calc", "look"}


BARE = {"name": "calc", "arguments": {"expression": "1+2"}}
LLAMA = {"name": "calc", "parameters": {"expression": "1+2"}}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"< tool_call >{json.dumps(BARE)}</ tool_call >"),
        ("hermes", f"<tool_call>```json\n{json.dumps(BARE, indent=2)}\n```</tool_call>"),
        ("hermes", f"```\n{hermes(json.dumps(BARE))}\n```"),
        ("hermes", hermes(json.dumps([BARE]))),
        ("hermes", hermes(json.dumps(LLAMA))),
        ("hermes", hermes(json.dumps({"type": "function", "function": BARE}))),
        ("hermes", hermes(json.dumps(BARE | {"arguments": json.dumps(BARE["arguments"])}))),
        ("hermes", "<think>" + hermes('{"name": "look"}') + "</think>" + hermes(json.dumps(BARE))),
        ("hermes", "maybe <tool_call></think>" + hermes(json.dumps(BARE))),
        ("llama3", "[THINK]" + json.dumps({"name": "look"}) + "[/THINK]" + json.dumps(LLAMA)),
        ("llama3", json.dumps(LLAMA, indent=4)),
        ("llama3", json.dumps([LLAMA])),
        ("llama3", json.dumps({"type": "function"} | LLAMA)),
        ("llama3", json.dumps(BARE)),
        ("llama3", "I add them: " + json.dumps(LLAMA) + " is what I need."),
        ("llama3", f"So [1] I call\n```json\n{json.dumps(LLAMA)}\n```"),
        ("llama3", hermes(json.dumps(BARE))),
    ],
)
def test_parse_takes_a_call_in_other_dress(parser, text):
    assert parse(parser, text, TOOLS) == Calls(calls=(CALL,))


@pytest.mark.parametrize("text", ["<think>{}</think>", "[THINK]{}", "{}</think>3"])
def test_parse_reads_all_of_what_is_an_answer_already_whatever_marks_of_thinking_it_has(text):
    """The run's own marks, which may be others or none, have parted it from the thinking before."""
    assert parse("hermes", text.format(hermes(json.dumps(BARE))), TOOLS, thinking=None) == Calls(calls=(CALL,))


def test_parse_takes_tags_within_a_call_for_its_text():
    tagged = parse("tag", "<look>a <calc>1</calc> <calc></look>< calc >2</calc>", TOOLS)
    assert [(c.name, c.arguments["input"]) for c in tagged.calls] == [
        ("look", "a <calc>1</calc> <calc>"),
        ("calc", "2"),
    ]
    quoted = {"name": "look", "arguments": {"q": "</tool_call><tool_call>"}}
    (call,) = parse("hermes", hermes(json.dumps(quoted)), TOOLS).calls
    assert call.arguments == quoted["arguments"]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "calc", "parameters": {"expression": "1+2"',
        "{'name': 'calc', 'parameters': {'expression': '1+2'}}",
        '{"function": "calc", "args": {"expression": "1+2"}}',
        '{"name": "calc", "args": {"expression": "1+2"}}',
        'I say {"tool": "calc", "input": "1+2"}',
        'calc(expression="1+2")',
        '[calc(expression="1+2"), look(q="x")]',
        "```python\nprint(calc('1+2'))\n```",
        '<function=calc>{"expression": "1+2"}</function>',
        "<function_call>calc 1+2</function_call>",
        '[TOOL_CALLS][{"name": "calc", "args": {}}]',
        '<calc expression="1+2"/>',
        "1+2</calc>",
        "<|python_tag|>calc.call(query='1+2')",
        '{"name": "rm", "kwargs": {"path": "/"}}',
        "Thought: I look it up.\nAction: look\nAction Input: x",
        "**Action:** calc\n**Action Input:** 1+2",
    ],
)
def test_parse_of_a_call_in_a_form_of_its_own_is_an_error_that_the_policy_reads(parser, text):
    parsed = parse(parser, text, TOOLS)
    assert parsed.error and not parsed.calls and len(parsed.error) < 400


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "The answer is 3.",
        "Action: none is needed.\nThe answer is 3.",
        '{"answer": 3, "steps": [1, 2]}',
        'The row is {"name": "Ann", "age": 3}.',
        "I would calc (by hand) and look it up.",
        "x < calc and y > look",
        "<b>3</b>",
    ],
)
def test_parse_of_an_answer_finds_no_call_in_it(parser, text):
    assert parse(parser, text, TOOLS) == Calls()


@pytest.mark.parametrize("key", ["args", "Arguments", "input", "params"])
@pytest.mark.parametrize(("parser", "form"), [("hermes", "<tool_call>%s</tool_call>"), ("llama3", "%s")])
def test_parse_never_drops_arguments_under_another_key(parser, form, key):
    parsed = parse(parser, form % json.dumps({"name": "calc", key: {"expression": "1+2"}}), TOOLS)
    assert not parsed.calls and repr(key) in parsed.error
    both = parse(parser, form % json.dumps({"name": "calc", "arguments": {}, "parameters": {"expression": "1"}}), TOOLS)
    assert not both.calls and "alone" in both.error


def test_parse_tag_orders_calls_of_different_tools_by_their_place():
    parsed = parse("tag", "<look>a</look><calc>b</calc><look>c</look>", TOOLS)
    assert [(c.name, c.arguments["input"]) for c in parsed.calls] == [("look", "a"), ("calc", "b"), ("look", "c")]


@pytest.mark.parametrize(
    ("parser", "text", "said"),
    [
        ("hermes", "<tool_call>{", "does not end with </tool_call>"),
        ("hermes", hermes("{not json}"), "a call is not JSON"),
        ("hermes", hermes("[1]"), "a call must be"),
        ("hermes", hermes('{"name": 3}'), "a call must be"),
        ("hermes", hermes('{"name": "calc", "arguments": "1+2"}'), "must be a JSON object"),
        ("hermes", hermes('{"name": "rm", "arguments": {}}'), "there is no tool 'rm'; there are calc, look"),
        ("hermes", hermes("[" * 100_000), "a call is not JSON"),
        ("hermes", hermes("9" * 10_000), "a call is not JSON"),
        ("hermes", hermes(*['{"name": "calc"}'] * (MAX_CALLS + 1)), "at most 32"),
        ("llama3", "<|python_tag|>print(1)", "a call is not JSON"),
        ("llama3", '{"name": "calc", "parameters": {}', "a call is not JSON"),
        ("llama3", "<|python_tag|>" + "[" * 100_000, "a call is not JSON"),
        ("llama3", '{"name": "calc", "parameters": {}} and so on', "a call is not JSON"),
        ("tag", "<calc>1+2", "does not end with </calc>"),
    ],
)
def test_parse_of_a_call_that_is_wrong_says_what(parser, text, said):
    parsed = parse(parser, text, TOOLS)
    assert parsed.calls == () and said in parsed.error and len(parsed.error) < 400


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<calc>",
        "</calc>",
        "<|python_tag|>",
        '{"name": "calc"',
        ', "arguments": {',
        "}",
        ";",
    ]
)


@pytest.mark.heavy
@given(st.sampled_from(sorted(PARSERS)), st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=12).map("".join))
def test_parse_of_anything_raises_nothing(parser, text):
    parsed = parse(parser, text, TOOLS)
    assert not (parsed.calls and parsed.error)
    assert all(c.name in TOOLS for c in parsed.calls)
    json.dumps([c.arguments for c in parsed.calls])


def test_parse_by_a_parser_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no tool call parser 'xml'; expected one of hermes, llama3, tag"):
        parse("xml", "", TOOLS)
