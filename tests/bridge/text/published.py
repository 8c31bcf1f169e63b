"""Chat templates with the features of published families, a tokenizer that has their tokens, and transformers' answer.

Each template of `chat_templates/` is written for these tests, in the manner of the family that it is named after.
"""

import datetime
import functools
import json
import pathlib
from typing import Any

import tokenizers

from tests.support.lazy import transformers

FOLDER = pathlib.Path(__file__).parent / "chat_templates"
NAMES = sorted(p.stem for p in FOLDER.glob("*.jinja"))
DATE = "2026-03-09"
_TURNS = (
    "im_start im_end im_sep im_user im_assistant im_system im_middle user assistant system tool end endoftext eot_id"
)
_TURNS += (
    " eot_id start_header_id end_header_id start message channel call return START_OF_TURN_TOKEN END_OF_TURN_TOKEN"
)
_TURNS += " USER_TOKEN CHATBOT_TOKEN SYSTEM_TOKEN START_RESPONSE END_RESPONSE start_of_role end_of_role end_of_text"
_TURNS += " tool_calls_section_begin tool_calls_section_end tool_call_begin tool_call_end tool_call_argument_begin"
SPECIAL = [
    *("<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>"),
    *("<end_of_turn>", "<reserved_106>", "<reserved_107>", "[gMASK]", "<sop>", "]~b]", "[e~[", "<SPECIAL_10>"),
    *("<SPECIAL_11>", "<SPECIAL_12>", "[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *(f"<|{name}|>" for name in _TURNS.split()),
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Added tokens that are not special."""


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and those of all templates."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens(MARKS)
    return made


def id_of(token: str) -> int:
    """The id of one of the tokens."""
    found = tokenizer().token_to_id(token)
    assert found is not None, token
    return found


def make_folder(folder: pathlib.Path, template: str = "", **settings: Any) -> pathlib.Path:
    """A model folder's tokenizer and config, without weights."""
    folder.mkdir(exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": tokenizer().token_to_id("</s>")}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


class _Clock(datetime.datetime):
    """A clock at noon of `DATE`."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "datetime.datetime":
        return datetime.datetime.fromisoformat(f"{DATE}T12:00:00")


def by_transformers(monkeypatch: Any, template: Any, messages: Any, **asked: Any) -> tuple[str, list[int]] | None:
    """(text, token ids) of `apply_chat_template` on `DATE`; None where it fails."""
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    try:
        text = theirs.apply_chat_template(messages, tokenize=False, **asked)
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **asked)
    except Exception:  # a template fails by whatever Python raises
        return None
    assert isinstance(text, str)
    return text, [int(i) for i in ids]  # pyright: ignore[reportArgumentType]
