"""Templates with the features of published families give what transformers gives: text and token ids."""

import copy
import json

import pytest

from bridge.text.chat_template import TemplateSettings
from learner.data.tokenizer import load_tokenizer
from tests.bridge.text import published

pytestmark = pytest.mark.heavy

VOCAB_SIZE = 1024
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "How warm a city is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    },
]
CALL = {"type": "function", "id": "abc123xyz", "function": {"name": "temperature", "arguments": {"city": "Malmö"}}}
SYSTEM = {"role": "system", "content": "Be brief, <b>please</b> & exact."}
USER = {"role": "user", "content": 'Wie geht\'s?\n\n2 < 3 "quoted"'}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine. "}
MORE = {"role": "user", "content": "  And in words?  "}
PREFILL = {"role": "assistant", "content": "Let me think: "}
CALLS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "12 °C", "tool_call_id": "abc123xyz", "name": "temperature"},
]
ASKED = {
    "question": ([USER], {"add_generation_prompt": True}),
    "question without a generation prompt": ([USER], {}),
    "system": ([SYSTEM, USER], {"add_generation_prompt": True}),
    "turns": ([SYSTEM, USER, ANSWER, MORE], {"add_generation_prompt": True}),
    "turns that end": ([USER, ANSWER], {}),
    "prefill": ([USER, PREFILL], {"continue_final_message": True}),
    "prefill after turns": ([USER, ANSWER, MORE, PREFILL], {"continue_final_message": True}),
    "tools": ([SYSTEM, USER], {"add_generation_prompt": True, "tools": TOOLS}),
    "tool calls": (CALLS, {"add_generation_prompt": True, "tools": TOOLS}),
    "tool calls and a question": ([*CALLS, ANSWER, MORE], {"add_generation_prompt": True, "tools": TOOLS[:1]}),
}
WRITES_NONE = ("chatml", "command_r7b", "falcon", "llama3", "qwen3_training", "solar")
"""Templates that write "None" for a message without content; ours has nothing there."""
ARGUMENTS = {
    "qwen3": {"enable_thinking": False},
    "llama3_1": {"date_string": "1 Jan 2000"},
    "smollm3": {"enable_thinking": False},
    "gpt_oss": {"reasoning_effort": "high"},
    "nemotron": {"thinking": False},
    "granite": {"documents": [{"text": "one"}, {"text": "two"}], "controls": {"length": "short"}},
    "command_r7b": {"documents": [{"title": "one"}]},
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return {
        name: load_tokenizer(
            published.make_folder(folder / name, (published.FOLDER / f"{name}.jinja").read_text()),
            vocab_size=VOCAB_SIZE,
            template=TemplateSettings(date=published.DATE),
        )
        for name in published.NAMES
    }


def as_taken(name, messages):
    """The form of the messages that a template takes, where it is not the one that rows have."""
    found = copy.deepcopy(messages)
    for message in found:
        if name == "llava" and message["content"]:  # it shows parts alone
            message["content"] = [{"type": "text", "text": message["content"]}]
        if name == "deepseek_v3":  # it appends arguments as they are
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if name in WRITES_NONE and message["content"] is None:
            message["content"] = ""
    return found


def rendered(ours, name, messages, arguments, how):
    text = ours[name].render_chat(messages, arguments=arguments, **{"add_generation_prompt": False, **how})
    return text, ours[name].encode(text).tolist()


def theirs(monkeypatch, name, messages, arguments, how):
    template = (published.FOLDER / f"{name}.jinja").read_text()
    return published.by_transformers(monkeypatch, template, as_taken(name, messages), **how, **arguments)


@pytest.mark.parametrize("name", published.NAMES)
@pytest.mark.parametrize("conversation", ASKED)
def test_render_and_encode_are_those_of_transformers(monkeypatch, ours, name, conversation):
    messages, how = ASKED[conversation]
    wanted = theirs(monkeypatch, name, messages, {}, how)
    if wanted is None:
        with pytest.raises(ValueError, match=f"the chat template of .*{name}"):
            rendered(ours, name, messages, {}, how)
    else:
        assert rendered(ours, name, messages, {}, how) == wanted


@pytest.mark.parametrize("name", ARGUMENTS)
def test_template_arguments_are_those_of_transformers(monkeypatch, ours, name):
    how = {"add_generation_prompt": True}
    wanted = theirs(monkeypatch, name, [USER], ARGUMENTS[name], how)
    assert wanted is not None and rendered(ours, name, [USER], ARGUMENTS[name], how) == wanted
    assert wanted != theirs(monkeypatch, name, [USER], {}, how)  # the argument is no idle one


def test_templates_are_of_twenty_five_families_and_more():
    assert len(published.NAMES) >= 25
    features = (
        "namespace(",
        "{%- break",
        "{%- continue",
        "| tojson",
        "raise_exception",
        "strftime_now",
        "generation %}",
    )
    texts = [(published.FOLDER / f"{name}.jinja").read_text() for name in published.NAMES]
    for feature in (*features, "tools", "documents", "add_generation_prompt", "macro", "tool_calls", "'<|' + "):
        assert any(feature in text for text in texts), feature
