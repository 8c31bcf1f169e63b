import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.text.chat_template import ChatTemplate
from bridge.text.thinking import DEFAULT, KNOWN, Marks, is_marks, read_format

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
WORDS = "Here is my thought process: Here is my response:"
UNFINISHED = None
"""In place of an answer."""


def template(prompt_end: str, *, source: str = "") -> str:
    """ChatML whose generation prompt ends with a text; `source` is put into it without being rendered."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n"
        + prompt_end
        + "' }}{% endif %}{# "
        + source
        + " #}"
    )


WRITES = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.reasoning_content %}"
    "{{ '<<ponder>>' + m.reasoning_content + '<<decide>>' }}{% endif %}{{ m.content + '[end]' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template with marks that nobody else has."""


def chat(source: str) -> ChatTemplate:
    return ChatTemplate(folder=pathlib.Path("model"), source=source, special_tokens={})


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("no thinking at all", "", "no thinking at all"),
        ("", "", ""),
        ("<think>a</think>b", "a", "b"),
        ("<think>\na\n</think>\n\nb\n", "a", "b\n"),
        ("<THINK>a</Think>b", "a", "b"),
        ("<think>a</ think >b", "a", "b"),
        ("<think></think>\n\n  indented", "", "  indented"),
        ("<think>a", "a", UNFINISHED),
        ("Well. <think>a", "a", UNFINISHED),
        ("Well\n<think>a", "a", UNFINISHED),
        # spoken of, or within a call of a tool
        ("So 5, found in <think> mode.", "", "So 5, found in <think> mode."),
        ("The list [think] is good. Answer 4", "", "The list [think] is good. Answer 4"),
        ('{"name": "f", "parameters": {"q": "<thought>"}}', "", '{"name": "f", "parameters": {"q": "<thought>"}}'),
        ('<tool_call>{"q": "a </think> b"}</tool_call>', "", '<tool_call>{"q": "a </think> b"}</tool_call>'),
        ('<tool_call>{"q": "<think>"}</tool_call> x', "", '<tool_call>{"q": "<think>"}</tool_call> x'),
        ("maybe <tool_call>{}</tool_call>, no.</think>b", "maybe <tool_call>{}</tool_call>, no.", "b"),
        ("<think><tool_call>{}</tool_call></think>b", "<tool_call>{}</tool_call>", "b"),
        ("<think>a</think>b<think>c", "a\nc", UNFINISHED),
        # opened by the prompt
        ("a</think>b", "a", "b"),
        ("</think>b", "", "b"),
        ("5</think>6</think>7", "5</think>6", "7"),
        ("a `x` and\n```\ncode</think>b\n```", "a `x` and\n```\ncode", "b\n```"),
        # several blocks, nested ones
        ("<think>a</think>b<think>c</think>d", "a\nc", "b\nd"),
        ("4<think>x</think>2", "x", "4\n2"),
        ("<think>a<think>b</think>c</think>d", "<think>a<think>b</think>c", "d"),
        ("<think>the tag <think> opens</think>b", "the tag <think> opens", "b"),
        ("<think>a</think>b</think>c", "<think>a</think>b", "c"),
        # marks that are quoted
        ("Use `<think>` for it: 6", "", "Use `<think>` for it: 6"),
        ("<think>a</think>```\ns.split('</think>')\n```", "a", "```\ns.split('</think>')\n```"),
        ("<think>```</think>b", "```", "b"),
        # other models
        ("[THINK]a[/THINK]b", "a", "b"),
        ("a[/THINK]b", "a", "b"),
        ("<seed:think>a</seed:think>b", "a", "b"),
        ("<thought>a</thought>b", "a", "b"),
        ("<reasoning>a</reasoning><answer>b</answer>", "a", "<answer>b</answer>"),
        ("◁think▷a◁/think▷b", "a", "b"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", "a", "b"),
        ("<|START_THINKING|>a<|END_THINKING|>b", "a", "b"),
        ("<think>a[/THINK]b</think>c", "a[/THINK]b", "c"),
        # channels
        (f"{ANALYSIS}a{NEXT}{FINAL}b", "a", "b"),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}c{NEXT}{FINAL}b", f"a{NEXT}{ANALYSIS}c", "b"),
        (f"{FINAL}b", "", "b"),
        (f"{ANALYSIS}a<|end|>", "a<|end|>", UNFINISHED),
        (f"{ANALYSIS}a", "a", UNFINISHED),
        (
            f"{ANALYSIS}a{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}",
            "a",
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
        ),
        ("b<|end|>", "", "b<|end|>"),
    ],
)
def test_split_of_a_text_alone(text, thinking, answer):
    parts = DEFAULT.split(text)
    assert (parts.thinking, parts.answer, parts.is_finished) == (thinking, answer or "", answer is not UNFINISHED)


@pytest.mark.parametrize(
    ("begun", "text", "answer"),
    [
        ("<think>\n", "a</think>b", "b"),
        ("<think>\n", "a, it is b", UNFINISHED),
        ("<think>\nOkay, ", "so</think>b", "b"),
        ("<think>\n\n</think>\n\n", "b", "b"),
        ("</think>", "b", "b"),
        ("</think>", "b<think>c</think>d", "b\nd"),
        ("", "b", "b"),
        ("", "a</think>b", "b"),
        ("", "```\ns.split('</think>')\n```", "```\ns.split('</think>')\n```"),
        ("<think>\n", "```\nwrong()\n</think>\n```\nright()\n```", "```\nright()\n```"),
        (ANALYSIS, f"a{NEXT}{FINAL}b", "b"),
        ("[THINK]", "a</think>b", UNFINISHED),
    ],
)
def test_split_goes_on_from_what_the_prompt_began(begun, text, answer):
    parts = DEFAULT.split(text, begun=begun)
    assert (parts.answer, parts.is_finished) == (answer or "", answer is not UNFINISHED)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([*(m.opening for m in KNOWN), *(m.closing for m in KNOWN), "`", "```", NEXT]),
            st.text(max_size=4),
        ),
        max_size=12,
    )
)
def test_split_of_anything_makes_up_nothing_and_ends(pieces):
    text = "".join(pieces)
    parts = DEFAULT.split(text)
    assert all(line in text for line in (*parts.thinking.split("\n"), *parts.answer.split("\n")))
    assert parts.is_finished or not parts.answer


@pytest.mark.parametrize(
    ("text", "implied"),
    [("a</think>b", "<think>"), ("a[/THINK]b", "[THINK]"), (f"{FINAL}b", ""), ("<think>a</think>b", ""), ("b", "")],
)
def test_a_lone_closing_mark_implies_what_an_unknown_prompt_opened(text, implied):
    assert DEFAULT.split(text).implied == implied
    assert DEFAULT.split(text, begun="").implied == ""


@pytest.mark.parametrize(
    ("prompt_end", "begun"),
    [
        ("", ""),
        ("<think>\\n", "<think>\n"),
        ("<think>\\n\\n</think>\\n\\n", "<think>\n\n</think>\n\n"),
        ("</think>", "</think>"),
        ("<ponder>", "<ponder>"),
    ],
)
def test_begun_by_a_rendered_prompt_is_what_stands_behind_the_assistants_header(prompt_end, begun):
    model = chat(template(prompt_end, source="</ponder>"))
    mentions = [{"role": "user", "content": "Write <think> first."}]
    read = read_format(model, ())
    assert read.begun_by(model.render(mentions)) == begun
    assert read.begun_by(model.render(mentions) + "I say") == begun + "I say"
    off = read_format(model, (), "off")
    assert (
        off.begun_by(model.render(mentions)) == begun and off.split("<think>a</think>b").answer == "<think>a</think>b"
    )


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [("Q: 1+1\n<think>", "<think>"), ("Q: <think> is a tag. A:", ""), ("Assistant: Let me see.\n[THINK] ", "[THINK] ")],
)
def test_begun_by_a_plain_prompt_is_the_mark_at_its_very_end(prompt, begun):
    assert DEFAULT.begun_by(prompt) == begun
    assert read_format(chat(""), ()).begun_by(prompt) == begun


@pytest.mark.parametrize(
    ("source", "tokens", "text", "answer"),
    [
        (WRITES, (), "<<ponder>>a<<decide>>b", "b"),
        (WRITES, (), "a<<decide>>b", "b"),
        (template("<ponder>", source="</ponder>"), (), "<ponder>a</ponder>b", "b"),
        (template("[PONDER]"), ("[PONDER]", "[/PONDER]"), "a[/PONDER]b", "b"),
        ("", ("<|start_of_reasoning|>", "<|end_of_reasoning|>", "<eos>"), "a<|end_of_reasoning|>b", "b"),
        ("", ("<my_think>", "</my_think>"), "<my_think>5", UNFINISHED),
        ("", ("[BEGIN_THOUGHT]", "[END_THOUGHT]"), "a[END_THOUGHT]b", "b"),
        (template("", source=WORDS), (), "Here is my thought process: a Here is my response: b", " b"),
        ("", (), "Here is my response: b", "Here is my response: b"),
        ("", ("<|reasoning_effort|>",), "<|reasoning_effort|>b", "<|reasoning_effort|>b"),
        ("{{ raise_exception('no') }}", (), "<think>a</think>b", "b"),
    ],
)  # fmt: skip
def test_read_format_finds_the_marks_of_templates_and_tokens(source, tokens, text, answer):
    parts = read_format(chat(source), tokens).split(text)
    assert (parts.answer, parts.is_finished) == (answer or "", answer is not UNFINISHED)


PROSE = "So my reasoning: 1 + 1 = 2.\n\nThe answer: 2, in bold [answer] ... (end)"


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("Reasoning:", "Answer:"),
        ("Here is my reasoning:", "The answer:"),
        ("**Reasoning**", "**Answer**"),
        ("So", "..."),
        ("my", "[answer]"),
        ("<ponder>", "The answer:"),  # closes alone
        ("So", "</ponder>"),
        ("1 < 2 and", "4 > 3 so"),
    ],
)
def test_read_format_takes_no_words_that_a_template_writes_around_reasoning_for_marks(opening, closing):
    source = WRITES.replace("<<ponder>>", f"{opening} ").replace("<<decide>>", f" {closing}")
    read = read_format(chat(source), ("...", "So", "[end]", "[assistant]"))
    assert read.marks == read_format(chat(template("")), ()).marks
    assert read.split(PROSE).answer == PROSE == read.split(PROSE, begun="").answer


@pytest.mark.parametrize(
    ("opening", "closing", "tokens"),
    [
        ("]~t[", "]~e[ Answer:", ("]~t[", "]~e[")),
        ("[PONDER]", "[/PONDER]", ()),
        ("<ponder>Okay:", "</ponder> So:", ()),
        ("<|reason|>", "<|end_of|>", ()),
    ],
)
def test_read_format_takes_tags_and_tokens_that_a_template_writes_around_reasoning(opening, closing, tokens):
    source = WRITES.replace("<<ponder>>", opening).replace("<<decide>>", closing)
    assert read_format(chat(source), tokens).split(f"{opening}a{closing} b", begun="").answer == " b"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\n here is my thought process: a Here is my response: b", " b"),
        ("Here is my thought process: a", UNFINISHED),
        ("5, for here is my thought process: a Here is my response: b", ...),
        ("Here is my response: b", ...),
        ("a `Here is my response: b`", ...),
    ],
)
@pytest.mark.parametrize("begun", [None, ""])
def test_marks_that_are_words_count_at_the_start_of_a_message_alone(text, answer, begun):
    parts = read_format(chat(template("", source=WORDS)), ()).split(text, begun=begun)
    wanted = text if answer is ... else answer or ""
    assert (parts.answer, parts.is_finished) == (wanted, answer is not UNFINISHED)


def test_read_format_by_hand_has_these_marks_alone():
    read = read_format(chat(template("<think>")), ("<think>", "</think>"), "<reason>...</reason>")
    assert read.marks == (Marks("<reason>", "</reason>"),)
    assert read.split("<reason>a</reason>b<think>c").answer == "b<think>c"


@pytest.mark.parametrize(
    ("marks", "is_fit"),
    [("auto", True), ("off", True), ("<a>...</a>", True), ("on", False), ("...", False), ("<a>...<a>", False)],
)  # fmt: skip
def test_is_marks(marks, is_fit):
    assert is_marks(marks) == is_fit
