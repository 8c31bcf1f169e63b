import datetime
import json
import time

import pytest

from bridge.text.chat_template import TemplateSettings, read_chat_template, today
from tests.actor.environments.chat import ALTERNATES, CHATML, STRIPS_THINKING, assistant, characters, user
from tests.support.lazy import transformers

MESSAGES = [user("Q"), assistant("<think>a</think>\nA"), user("again"), assistant("B")]


@pytest.mark.heavy
@pytest.mark.parametrize("template", [CHATML, STRIPS_THINKING, ALTERNATES])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_render_is_transformers_with_and_without_a_generation_prompt(tmp_path, template, ends, count):
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<eos>", pad_token="<pad>")
    wanted = theirs.apply_chat_template(
        MESSAGES[:count], chat_template=template, add_generation_prompt=ends, tokenize=False
    )
    assert read_chat_template(tmp_path).render(MESSAGES[:count], add_generation_prompt=ends) == wanted


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Etc/GMT-14"])
def test_render_has_the_date_of_the_run_in_every_time_zone_and_at_every_time(tmp_path, monkeypatch, zone):
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y %H:%M') }}|{{ messages[0].content }}")
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        fixed = read_chat_template(tmp_path, TemplateSettings(date="2024-02-29"))
        assert fixed.render([user("q")]) == "29 Feb 2024 00:00|q"
        assert today() == datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        one = read_chat_template(tmp_path)  # of no run: the day on which it was read
        monkeypatch.setattr("bridge.text.chat_template.today", lambda: "1999-01-01")
        assert one.settings.date == today() and "1999" not in one.render([user("q")])
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


CALL = {"function": {"name": "f", "arguments": {"a": "ä"}}}
AS_JSON = {"function": {"name": "f", "arguments": '{"a": "ä"}'}}
SHOWN = {
    "as json": "{{ c.function.arguments | tojson }}",
    "as text": "{{ c.function.arguments + '' }}",
    "either": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "item by item": "{'a': {% for k, v in c.function.arguments.items() %}{{ v }}{% endfor %}}",
}


@pytest.mark.parametrize("how", SHOWN)
@pytest.mark.parametrize("call", [CALL, AS_JSON])
def test_render_arguments_of_a_call_come_out_alike_as_an_object_and_as_json(tmp_path, how, call):
    template = f"{{% for m in messages %}}{{% for c in m.tool_calls %}}{SHOWN[how]}{{% endfor %}}{{% endfor %}}"
    (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert read_chat_template(tmp_path).render(messages) == ("{'a': ä}" if "item" in how else '{"a": "ä"}')


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ messages[0].content + 1 }}", "refuses the messages: TypeError: can only concatenate str"),
        ("{{ messages[0].content.nothing.more }}", "refuses the messages: .*has no attribute"),
        ("{% for m in messages %}", "refuses the messages: Unexpected end of template"),
        ("{{ 1 // 0 }}", "refuses the messages: ZeroDivisionError"),
    ],
)
def test_render_by_a_template_that_fails_is_a_value_error(tmp_path, template, error):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=error):
        read_chat_template(tmp_path).render([user("a")])


def test_render_without_a_template_or_against_its_rules_says_so(tmp_path):
    with pytest.raises(ValueError, match="has no chat template; set prompts.chat_template=off"):
        read_chat_template(tmp_path).render(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text(ALTERNATES)
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        read_chat_template(tmp_path).render([user("a"), user("b")])
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        read_chat_template(tmp_path)
