import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actor.environments.tools import MAX_CALLS, PARSERS, ToolCall, parse

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


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=12).map("".join))
def test_parse_of_anything_raises_nothing(parser, text):
    parsed = parse(parser, text, TOOLS)
    assert not (parsed.calls and parsed.error)
    assert all(c.name in TOOLS for c in parsed.calls)
    json.dumps([c.arguments for c in parsed.calls])


def test_parse_by_a_parser_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no parser of tool calls 'xml'; there are hermes, llama3, tag"):
        parse("xml", "", TOOLS)
