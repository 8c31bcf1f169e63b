"""What a judge is asked: the template filled in, and the response between markers. Pure, but for the random nonce."""

import json
import re
import secrets

from bridge.types import Task
from configs.sections.judge import PLACEHOLDERS

_PLACEHOLDER = re.compile("|".join(rf"\{{({name})\}}" for name in PLACEHOLDERS))
_BAR = "[|\uff5c]"
"""Full-width in some models' marks."""
_CONTROL = re.compile(
    rf"<{_BAR}[^|\uff5c<>\s]{{1,40}}{_BAR}>"
    r"|<</?[A-Z]+>>|</?(?:s|bos|eos|pad|unk|mask|cls|sep|think|\w{0,40}[_:]\w{0,40})>"
    r"|\[/?(?:[gs]?[A-Z][A-Z_]{2,40}|sop|eop)\]"
)
"""What chat templates put between messages, by its shape: a server would read it in a response's text, too."""
_WORD_JOINER = "\u2060"


def messages(template: str, system_prompt: str, task: Task, response_text: str, max_chars: int) -> list[dict[str, str]]:
    """The messages of a request.

    The response stands between markers with a nonce that is drawn for this request, so it can't close them: it can't
    pass for what stands outside. Marks of chat templates in it are broken up, so it can't begin a message of its own.
    The template is filled in one pass: braces and placeholders in a response are text. None of this keeps a model from
    believing what it reads there; the system prompt asks it not to, and a score is only ever a number in its bounds.

    Raises:
      ValueError: the template asks for a question, and the task's metadata holds none.
    """
    nonce = secrets.token_hex(8)
    values = {
        "answer": task.answer,
        "response": f"<<<response {nonce}>>>\n{harmless(shortened(response_text, max_chars))}\n<<<end {nonce}>>>",
    }
    if "{question}" in template:
        values["question"] = _question(task)
    filled = _PLACEHOLDER.sub(lambda m: values[m.group()[1:-1]], template)
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": filled}]


def shortened(text: str, max_chars: int) -> str:
    """A text of so many characters at most, and a word about what its middle leaves out."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"


def harmless(text: str) -> str:
    """A text in which no mark of a chat template is one any more; it reads as before."""
    while (broken := _CONTROL.sub(lambda m: m.group()[0] + _WORD_JOINER + m.group()[1:], text)) != text:
        text = broken  # there may be one within another
    return text


def _question(task: Task) -> str:
    metadata = json.loads(task.metadata)
    question = metadata.get("question") if isinstance(metadata, dict) else None
    if not isinstance(question, str):
        raise ValueError(
            "judge.template asks for {question}, and the row's metadata holds no text of that name; leave it out, or "
            "give the row one"
        )
    return question
