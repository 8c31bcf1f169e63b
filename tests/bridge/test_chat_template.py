import json

import pytest
from transformers import PreTrainedTokenizerFast

from bridge.chat_template import read_chat_template
from tests.actor.environments.chat import ALTERNATES, CHATML, STRIPS_THINKING, assistant, characters, user

MESSAGES = [user("Q"), assistant("<think>a</think>\nA"), user("again"), assistant("B")]


@pytest.mark.parametrize("template", [CHATML, STRIPS_THINKING, ALTERNATES])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_render_is_transformers_with_and_without_a_generation_prompt(tmp_path, template, ends, count):
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = PreTrainedTokenizerFast(tokenizer_object=characters(), eos_token="<eos>", pad_token="<pad>")
    wanted = theirs.apply_chat_template(
        MESSAGES[:count], chat_template=template, add_generation_prompt=ends, tokenize=False
    )
    assert read_chat_template(tmp_path).render(MESSAGES[:count], add_generation_prompt=ends) == wanted


def test_render_without_a_template_or_against_its_rules_says_so(tmp_path):
    with pytest.raises(ValueError, match="has no chat template; set prompts.chat_template=off"):
        read_chat_template(tmp_path).render(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text(ALTERNATES)
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        read_chat_template(tmp_path).render([user("a"), user("b")])
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_chat_template(tmp_path)
