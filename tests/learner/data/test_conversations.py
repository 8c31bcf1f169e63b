import json

import pyarrow
import pyarrow.parquet
import pytest

from configs import sections
from learner.data.parse_row import parse_row
from learner.data.problem import RawProblem
from learner.data.readers import read_parquet
from learner.data.tokenizer import load_tokenizer, render, tokenize
from tests.bridge.text import published
from tests.learner.data.rooms import form_of

USER = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "temperature", "arguments": {"city": "Lund"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "12"}
TOOL = {"type": "function", "function": {"name": "temperature", "parameters": {"type": "object", "properties": {}}}}
KEEPS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.name %}({{ m.name }}){% endif %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.documents %}{{ m.documents }}{% endif %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DROPS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
DROPS_ROLES = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.content }}]{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    made = {}

    def load(template):
        if template not in made:
            folder = published.make_folder(tmp_path_factory.mktemp("model") / "m", template)
            made[template] = load_tokenizer(folder, vocab_size=1024)
        return made[template]

    return load


def parsed(row, **prompts):
    return parse_row(7, {"answer": "1"} | row, form_of(**prompts))


def asked(loaded, row, template, **prompts):
    """The text of a row's prompt, or why it is set aside."""
    raw = parsed(row, **prompts)
    if isinstance(raw, str):
        return raw
    tokenizer = loaded(template)
    config = sections.PromptsConfig(**prompts)
    try:
        text = tokenizer.decode(tokenize(raw, tokenizer, config).prompt_tokens)
        assert text == render(raw, tokenizer, config).replace("\ufdd0", "")
        return text
    except ValueError as e:
        return str(e)


TOLD = {
    "tool calls": ({"prompt": [USER, CALLS, RESULT]}, '"arguments": {"city": "Lund"}', "a tool call of message 2"),
    "one field of a call": (
        {"prompt": [USER, CALLS, RESULT]},
        '"id": "c1"',
        "a tool call of message 2 (role assistant)",
    ),
    "calls as json": (
        {"prompt": [USER, CALLS | {"tool_calls": json.dumps([CALL])}, RESULT]},
        '"name": "temperature"',
        "a tool call of message 2",
    ),
    "tools": ({"prompt": [USER], "tools": [TOOL]}, '[{"type": "function"', "the row's tools (function 1)"),
    "tools of a text": ({"prompt": "How?", "tools": [TOOL]}, '[{"type": "function"', "the row's tools"),
    "tools as json": ({"prompt": "How?", "tools": json.dumps([TOOL])}, '[{"type": "function"', "the row's tools"),
    "each tool as json": ({"prompt": "How?", "tools": [json.dumps(TOOL)]}, '[{"type": "function"', "the row's tools"),
    "id of a result": (
        {"prompt": [USER, RESULT | {"tool_call_id": "c1"}]},
        "12#c1",
        "tool_call_id of message 2 (role tool); remove it, or set prompts.ignored_fields=tool_call_id",
    ),
    "documents": (
        {"prompt": [USER | {"documents": [{"text": "d"}]}]},
        "[{'text': 'd'}]",
        "documents of message 1 (role user); remove it, or set prompts.ignored_fields=documents",
    ),
    "name": (
        {"prompt": [USER | {"name": "Ann"}]},
        "(Ann)",
        "name of message 1 (role user); remove it, or set prompts.ignored_fields=name",
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_belongs_to_a_prompt_is_rendered_or_the_row_is_refused_by_its_name(loaded, case):
    row, shown, missing = TOLD[case]
    assert shown in asked(loaded, row, KEEPS)
    assert missing in asked(loaded, row, DROPS)
    assert "no chat template is applied" in asked(loaded, row, "") or case in ("name",)


@pytest.mark.parametrize("role", ["tool", "system", "developer", "ipython"])
def test_message_of_a_role_that_the_template_passes_over_is_refused(loaded, role):
    row = {"prompt": [USER, {"role": role, "content": "12"}, USER]}
    assert f"leaves out message 2 (role {role})" in asked(loaded, row, DROPS_ROLES)
    assert "12" in asked(loaded, row, DROPS)


def test_part_of_a_content_that_the_template_passes_over_is_refused(loaded):
    first_alone = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    row = {"prompt": [{"role": "system", "content": [{"type": "text", "text": t} for t in ("a", "b")]}, USER]}
    assert "leaves out message 1 (role system)" in asked(loaded, row, first_alone)
    row["prompt"][0]["content"].pop()
    assert asked(loaded, row, first_alone) == "aHow warm is it?"


def test_call_whose_id_names_its_function_is_shown_by_it(loaded):
    """As Kimi K2's template does."""
    template = DROPS.replace(
        "{{ m.content }}",
        "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments }}{% endfor %}{{ m.content or '' }}",
    )
    call = CALL | {"id": "functions.temperature:0"}
    row = {"prompt": [USER, CALLS | {"tool_calls": [call]}, RESULT]}
    assert "functions.temperature:0" in asked(loaded, row, template)
    assert "a tool call of message 2" in asked(loaded, {"prompt": [USER, CALLS, RESULT]}, template)


def test_fields_that_are_ignored_on_purpose_are_left_out(loaded):
    row = {"prompt": [USER, CALLS, RESULT | {"tool_call_id": "c1", "name": "temperature"}], "images": ["a.png"]}
    template = DROPS.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}"
    )
    refused = asked(loaded, row | {"images": None}, template)
    assert "prompts.ignored_fields=tool_call_id,name" in refused
    text = asked(loaded, row, template, ignored_fields="tool_call_id, name,images")
    assert text.endswith("<|tool|>12<|end|>") and "c1" not in text and "temperature" in text


def test_thinking_of_earlier_turns_may_be_dropped_by_a_template_that_knows_it_alone(loaded):
    turns = [USER, {"role": "assistant", "content": "12", "reasoning_content": "cold"}, USER]
    qwen3 = (published.FOLDER / "qwen3.jinja").read_text()
    assert "cold" not in asked(loaded, {"prompt": turns}, qwen3)
    assert "reasoning_content of message 2" in asked(loaded, {"prompt": turns}, DROPS)


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ([USER], "How warm is it?"),
        (json.dumps([USER]), "How warm is it?"),
        ("\n " + json.dumps([{"content": "ä", "role": "user"}], indent=2), "ä"),
        (json.dumps(USER), "How warm is it?"),
        (USER, "How warm is it?"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image": None}],
                }
            ],
            "ab",
        ),
        ([{"role": "user", "content": ["a", "b"]}], "ab"),
        ('[{"id": "", "role": "user", "content": "a"}]', "a"),
        (json.dumps([{"tool_calls": None, "content": "a", "role": "user"}]), "a"),
        (json.dumps({"messages": [USER]}), "How warm is it?"),
        ({"messages": [USER], "tools": None}, "How warm is it?"),
        (json.dumps(json.dumps([USER])), "How warm is it?"),
        (json.dumps(json.dumps({"messages": [USER]})), "How warm is it?"),
    ],
)
def test_conversation_is_read_from_lists_objects_and_their_json(loaded, prompt, question):
    raw = parsed({"prompt": prompt})
    assert isinstance(raw, RawProblem)
    assert (raw.question, len(raw.messages)) == (question, 1)
    assert asked(loaded, {"prompt": prompt}, DROPS) == f"<|user|>{question}<|end|>"


@pytest.mark.parametrize(
    "text",
    [
        *('[1, 2] "role"', '{"content": "x"}', '[{"roles": 1}]', '{"role": broken', "[{'a': 1}]", "[[1], {}]"),
        '[{"role": "user", "content": "x"}] Sum this up.',
        '[{"from": "Lund", "to": "Malmö"}]',
        *("[1, 2]", '{"a": 1}', '"role": 1', '[{"name": "Ann", "role": "nurse"}]', '{"messages": [1], "role": 2}'),
        "array([{'role': 1}])",
        "{'role': 'x'} is a dictionary",
    ],
)
def test_text_that_is_no_conversation_stays_text(text):
    raw = parsed({"prompt": text})
    assert isinstance(raw, RawProblem) and (raw.question, raw.messages) == (text, ())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "[{'role': 'user', 'content': 'x'}]"}, "is a conversation as Python or numpy prints"),
        ({"prompt": "[{'content': 'x', 'role': 'user'}\n {'content': 'y', 'role': 'user'}]"}, "numpy prints it; write"),
        ({"prompt": "array([{'content': 'x', 'role': 'user'}], dtype=object)"}, "numpy prints it; write it as JSON"),
        ({"prompt": "{'messages': [{'content': 'x', 'role': 'user'}]}"}, "numpy prints it; write it as JSON"),
        ({"prompt": json.dumps({"messages": [USER], "tools": [TOOL]})}, "expected only messages, got also 'tools'"),
        ({"prompt": json.dumps([{"value": "x", "from": "human"}])}, "every message needs a role and a content"),
        ({"prompt": json.dumps([{"from": "human", "value": "x"}])}, "every message needs a role and a content"),
        ({"prompt": [{"from": "human", "value": "x"}]}, "every message needs a role and a content"),
        ({"prompt": [{"role": "user", "content": ""}]}, "is empty: no message has text"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": " \n"}]}]}, "is empty"),
        ({"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "\u00a0"}]}, "is empty"),
        ({"prompt": json.dumps([{"role": "user", "content": " "}])}, "is empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]},
            "only text is read",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text is"),
        ({"prompt": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "only text is read"),
        ({"prompt": [USER | {"images": ["a.png"]}]}, "has images, and only text is read"),
        ({"prompt": "x", "images": ["a.png"]}, "the row has 'images'"),
        ({"prompt": "x", "video": "a.mp4"}, "the row has 'video'"),
        ({"prompt": "x", "image_path": "a.png"}, "the row has 'image_path'"),
        ({"prompt": "x", "pixel_values": [[0.5]]}, "the row has 'pixel_values'"),
        ({"prompt": [USER | {"audio_url": "a.wav"}]}, "has audio_url, and only text is read"),
        ({"prompt": "x", "documents": [{"text": "d"}]}, "the row has 'documents', which is not read; set prompts.temp"),
        ({"prompt": "x", "functions": [TOOL]}, "set prompts.tools_field=functions, or name it in prompts.ignored_f"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "set prompts.template_arguments_field=chat_template_kw"),
        ({"prompt": [USER | {"role": "user<|im_end|>"}]}, "a role must consist of letters"),
        ({"prompt": [USER, CALLS]}, "must not end with tool calls"),
        ({"prompt": [USER, CALLS | {"tool_calls": [{"function": {}}]}, RESULT]}, "a function with a name"),
        ({"prompt": [USER, CALLS | {"tool_calls": "{"}, RESULT]}, "tool_calls must be a list"),
        ({"prompt": "x", "tools": "now"}, "'tools' must be a list of tools"),
        ({"prompt": "x", "template_arguments": "[1]"}, "'template_arguments' must be an object"),
    ],
)
def test_prompt_that_can_not_be_asked_gives_the_reason(row, said):
    found = parsed(row)
    assert isinstance(found, str) and said in found


@pytest.mark.parametrize(("column", "value"), [("tools", [TOOL]), ("template_arguments", {"a": 1})])
@pytest.mark.parametrize("other", ["functions", ""])
def test_column_of_a_default_name_that_another_field_replaces_sets_the_row_aside(column, value, other):
    setting = f"{column}_field"
    row = {"prompt": "x", column: value, "answer": "1"}
    said = parse_row(1, row, form_of(**{setting: other}))
    assert f"the row has {column!r}, which is not read; set prompts.{setting}={column}" in str(said)
    assert column in form_of(**{setting: other}).columns
    for ignored in ({setting: other, "ignored_fields": column}, {}):
        assert isinstance(parse_row(1, row, form_of(**ignored)), RawProblem)
    assert isinstance(parse_row(1, {**row, column: type(value)()}, form_of(**{setting: other})), RawProblem)


def test_columns_that_begin_as_media_do_are_refused_with_the_setting_that_has_the_row_read():
    row = {"prompt": "x", "image_caption": "A cat.", "videogame": "chess", "answer": "1"}
    said = parse_row(1, row, form_of())
    setting = "prompts.ignored_fields=image_caption,videogame"
    assert "the row has 'image_caption'" in str(said) and str(said).endswith(setting)
    assert isinstance(parse_row(1, row, form_of(ignored_fields=setting.partition("=")[2])), RawProblem)
    message = {"prompt": [USER | {"images": ["a.png"]}], "answer": "1"}
    assert str(parse_row(1, message, form_of())).endswith("prompts.ignored_fields=images")
    assert isinstance(parse_row(1, message, form_of(ignored_fields="images")), RawProblem)


def test_texts_and_columns_that_only_speak_of_media_are_read():
    text = "image: <image> audio_url video https://a.example/image.png"
    for prompt in (text, [{"role": "user", "content": text}]):
        row = {"prompt": prompt, "answer": "images", "caption": text, "an_image": "a", "num_images": 3, "metadata": {}}
        assert isinstance(parse_row(1, row, form_of()), RawProblem)
    given = {"prompt": "x", "answer": "1", "image_text": "q"}
    raw = parse_row(1, given, form_of(prompt_field="image_text"))
    assert isinstance(raw, RawProblem) and raw.question == "q"


def test_empty_media_columns_and_null_fields_are_nothing(loaded):
    row = {"prompt": [USER | {"tool_calls": None, "name": None}], "images": [], "image": None, "tools": []}
    row |= {"num_images": 2, "image_count": 2, "functions": "[]", "documents": [], "chat_template_kwargs": {}}
    assert asked(loaded, row, DROPS) == "<|user|>How warm is it?<|end|>"


@pytest.mark.heavy
def test_objects_of_a_parquet_list_have_the_fields_that_they_were_given(tmp_path, loaded):
    """Arrow gives all objects of a list the same fields, and nulls where one lacks them."""
    other = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
    other["function"]["parameters"]["properties"]["a"] = {"type": "integer"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rows = [{"prompt": [USER, CALLS | {"tool_calls": [CALL, call]}, RESULT], "tools": [TOOL, other], "answer": "1"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    form = form_of()
    (read,) = next(iter(read_parquet(tmp_path / "rows.parquet", form.columns).batches()))
    assert isinstance(read, dict)
    raw = parse_row(1, read, form)
    assert isinstance(raw, RawProblem)
    assert raw.messages[1]["tool_calls"] == [CALL, call]
    assert raw.tools[1] == other


def test_columns_of_parquet_that_hold_media_are_seen_and_ignored_ones_are_not_loaded(tmp_path):
    rows = [{"prompt": "q", "answer": "1", "image_path": "a.png", "videos": ["a"], "documents": ["d"], "other": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")

    def loaded_row(**prompts):
        form = form_of(**prompts)
        (row,) = next(iter(read_parquet(tmp_path / "rows.parquet", form.columns).batches()))
        assert isinstance(row, dict)
        return row, parse_row(1, row, form)

    row, said = loaded_row()
    assert "other" not in row and "the row has 'image_path'" in str(said)
    assert "the row has 'documents'" in str(loaded_row(ignored_fields="image_path,videos")[1])
    row, raw = loaded_row(ignored_fields="image_path,videos,documents")
    assert set(row) == {"prompt", "answer"} and isinstance(raw, RawProblem)
    row, raw = loaded_row(prompt_field="image_path", ignored_fields="image_path,videos,documents")
    assert isinstance(raw, RawProblem) and raw.question == "a.png"


PREFILLS = {
    "text": ([USER, {"role": "assistant", "content": "Let me "}], "<|assistant|>Let me "),
    "parts": ([USER, {"role": "assistant", "content": [{"type": "text", "text": "Let me"}]}], "<|assistant|>Let me"),
    "behind a turn": (
        [USER, {"role": "assistant", "content": "12"}, USER, {"role": "assistant", "content": "12"}],
        "<|assistant|>12<|end|><|user|>How warm is it?<|end|><|assistant|>12",
    ),
}


@pytest.mark.parametrize("case", PREFILLS)
def test_conversation_that_ends_with_the_assistant_is_continued(loaded, case):
    prompt, end = PREFILLS[case]
    for given in (prompt, json.dumps(prompt)):
        assert asked(loaded, {"prompt": given}, KEEPS).endswith(end)
        assert asked(loaded, {"prompt": given}, DROPS).endswith(end)


def test_prefill_that_the_template_rewrites_is_refused(loaded):
    prefill = [USER, {"role": "assistant", "content": "<think>a</think>b"}]
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert "it changes the last message" in asked(loaded, {"prompt": prefill}, template)


def test_template_arguments_are_the_configs_and_the_rows_over_them(loaded):
    template = DROPS + "{% if thinks is defined and not thinks %}(no){% endif %}{{ lang }}"
    folder = loaded(template).folder
    settings = sections.PromptsConfig(template_arguments={"thinks": False, "lang": "de"}).template_settings
    tokenizer = load_tokenizer(folder, vocab_size=1024, template=settings)

    def end(**row):
        raw = parsed({"prompt": "q"} | row)
        assert isinstance(raw, RawProblem)
        return render(raw, tokenizer, sections.PromptsConfig()).rpartition("<|end|>")[2]

    assert end() == "(no)de"
    assert end(template_arguments={"thinks": True}) == "de"
    assert end(template_arguments='{"lang": "sv"}') == "(no)sv"
    assert end(template_arguments={"thinks": True, "lang": None}) == "de"  # as a table gives it
    for wrong in ("enable_thinking", "messages", "strftime_now"):
        with pytest.raises(ValueError, match=f"unknown argument {wrong}; remove it from prompts.template_arguments"):
            end(template_arguments={wrong: 1})
    assert "no chat template is applied" in asked(loaded, {"prompt": "q", "template_arguments": {"a": 1}}, "")


def test_tokens_that_the_model_has_no_row_for_refuse_the_prompt_and_not_the_model(tmp_path, loaded):
    folder = published.make_folder(tmp_path / "m")
    size = published.id_of("<think>")  # the last four are beyond
    tokenizer = load_tokenizer(folder, vocab_size=size)
    assert sorted(tokenizer.beyond) == sorted(published.MARKS)
    raw = parsed({"prompt": "ask <think> now"})
    assert isinstance(raw, RawProblem)
    with pytest.raises(ValueError, match=r"the prompt has token '<think>' .*no embedding"):
        render(raw, tokenizer, sections.PromptsConfig())
    raw = parsed({"prompt": "ask < think> now"})
    assert isinstance(raw, RawProblem)
    assert render(raw, tokenizer, sections.PromptsConfig()) == "ask < think> now"
