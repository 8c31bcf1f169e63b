"""Thinking marks of a model, and the split of a response into thinking and answer. Pure.

Marks come from the tables below, from the model's tokens and from its chat template. Table entries apply to every
model: no other model writes `[THINK]`, and prompts may ask plain models for `<think>`.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator

from bridge.text.chat_template import ChatTemplate, Message


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """Pair of marks around thinking."""

    opening: str
    closing: str
    opening_pattern: str = ""
    """Regular expression for `opening`; empty: the literal text."""
    closing_pattern: str = ""
    """Regular expression for `closing`; empty: the literal text."""
    interrupts: str = ""
    """Regular expression that ends thinking like the closing mark, but is ignored if no mark opened the thinking."""
    is_words: bool = False
    """True for marks that are ordinary words. The opening mark counts only at the start of the message, and the closing
    mark only after it."""


_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "reflection", "seed:think", "scratchpad")
_CHANNEL = r"(?:<\|end\|>)?(?:<\|start\|>assistant)?<\|channel\|>"
_TO_HEADER_END = r"[^<]{0,200}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>"
KNOWN = (
    *(Marks(f"<{tag}>", f"</{tag}>", closing_pattern=rf"</[ \t]*{tag}[ \t]*>") for tag in _TAGS),
    Marks("[THINK]", "[/THINK]"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<|think|>", "<|/think|>"),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    Marks("<|channel>thought", "<channel|>"),
    # Analysis is over where a message to somebody begins: <|end|> alone may be followed by more analysis, and ends
    # whole responses of other models. The header of a call to a tool belongs to the answer.
    Marks(
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        opening_pattern=f"{_CHANNEL}analysis{_TO_HEADER_END}",
        closing_pattern=f"{_CHANNEL}final{_TO_HEADER_END}",
        interrupts=rf"(?:<\|end\|>)?(?={_CHANNEL}commentary)",
    ),
)
"""Marks of published models and of common prompts."""
IF_IN_TEMPLATE = (Marks("Here is my thought process:", "Here is my response:", is_words=True),)
"""Marks that are ordinary words; used only for a model whose chat template names both."""
SEPARATOR = "..."
"""Separator of the two marks in `model.thinking_marks`."""

_CODE = r"```.*?```|`[^`\n]+`"
_CALL = r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>"
_TAG = re.compile(r"<[\w:]+>|\[\w+\]")
"""Opening mark that is a word in brackets, which texts may also mention."""
_MENTIONED = re.compile(r"(?:[^\W\d_],? +|[\"'(])\Z")
"""Text before a mentioned tag: in the middle of a sentence, or a quotation mark."""
_TOKEN = re.compile(r"[^\w\s]+\w(?:.*\w)?[^\w\s]+", re.DOTALL)
"""Name between symbols. Tokenizers also have words and "..." as tokens."""
_ANY_TAG = re.compile(r"<[^\s<>](?:[^<>]*[^\s<>])?>")
_MAX_MARK_CHARS = 100
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_THOUGHT, _ANSWER = "Sluicethought", "Sluiceanswer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Response split into thinking and answer."""

    thinking: str = ""
    """Text between the marks; several blocks are joined by line breaks."""
    answer: str = ""
    """Text outside the thinking; empty if the response finishes inside its thinking."""
    is_finished: bool = True
    """True unless the response finishes inside its thinking."""
    implied: str = ""
    """Opening mark that an unknown prompt must have contained, because the response only closes it."""


class ThinkingFormat:
    """Thinking marks of one model."""

    def __init__(self, marks: tuple[Marks, ...], *, header: str = "") -> None:
        """Compiles the marks.

        Args:
          marks: all marks that may occur; empty: no text is thinking.
          header: text that begins the assistant's message in a rendered prompt; empty: unknown.
        """
        self.marks, self.header = marks, header
        openings = [_named(f"o{i}", _opening_pattern(m), m.opening) for i, m in enumerate(marks)]
        closings = [_named(f"c{i}", m.closing_pattern, m.closing) for i, m in enumerate(marks)]
        alone = [closing for closing, m in zip(closings, marks, strict=True) if not m.is_words]
        firsts = "".join({re.escape(text[0]) for m in marks for text in (m.opening, m.closing)} | {"`", "<"})
        firsts += r"\s" if any(m.is_words for m in marks) else ""
        # The first characters before all the alternatives: most places of a text begin none of them.
        self._any = _compiled(
            f"(?=[{firsts}])(?:{'|'.join([*openings, *alone, f'(?P<code>{_CODE})', f'(?P<call>{_CALL})'])})"
        )
        self._closings = [
            _compiled(f"{closing}|{m.interrupts}" if m.interrupts else closing)
            for closing, m in zip(closings, marks, strict=True)
        ]
        self._any_closing = _compiled("|".join(alone)) if alone else None
        self._trailing = _compiled(rf"(?:{'|'.join(openings)})\s*\Z") if marks else None

    def split(self, text: str, *, begun: str | None = None) -> Parts:
        """Splits a response into thinking and answer.

        - A closing mark without an opening mark ends thinking that the prompt opened. All text before it is thinking.
        - Marks within code count as text outside the thinking. After an unknown prompt, the first closing mark counts
        anywhere.
        - Tool calls are not searched for marks.
        - An unclosed tag such as `<think>` is text if quoted or inside a sentence, as in "the <think> mode".

        Args:
          text: the response, with special tokens as text.
          begun: the beginning of the assistant's message that the prompt contains; None: unknown.
        """
        start = len(begun or "")
        whole = (begun or "") + text
        blocks: list[tuple[int, int, int, int]] = []
        """Begin, end of the opening mark, begin of the closing mark, end."""
        at, implied = 0, ""
        while at < len(whole) and (found := self._any.search(whole, at)) is not None:
            kind, number = _kind(found)
            if kind == "call":
                at = found.end()
            elif kind == "code":
                closing = None
                if not blocks and begun is None and self._any_closing is not None:
                    closing = self._any_closing.search(found.group())
                if closing is None:
                    at = found.end()
                    continue
                at = found.start() + closing.end()
                blocks = [(0, 0, found.start() + closing.start(), at)]
                implied = self._implied(_kind(closing)[1])
            elif kind == "c":
                implied = implied if blocks else self._implied(number)
                at = found.end()
                blocks = [(0, 0, found.start(), at)]
            else:
                closing = self._closings[number].search(whole, found.end())
                before = whole[max(start, found.start() - _MAX_MARK_CHARS) : found.start()]
                if closing is None and _TAG.fullmatch(found.group()) and _MENTIONED.search(before):
                    at = found.end()
                    continue
                if closing is None:
                    blocks.append((found.start(), found.end(), len(whole), len(whole)))
                    return Parts(thinking=_thinking(whole, blocks, start), is_finished=False)
                at = closing.end()
                blocks.append((found.start(), found.end(), closing.start(), at))
        return Parts(
            thinking=_thinking(whole, blocks, start),
            answer=_outside(whole, blocks, start),
            implied=implied if begun is None else "",
        )

    def _implied(self, number: int) -> str:
        """Returns the opening mark that a lone closing mark implies; a channel header implies none."""
        return "" if self.marks[number].opening_pattern else self.marks[number].opening

    def before_marks(self, text: str) -> str:
        """Returns a text up to its first mark."""
        found = self._any.search(text)
        return text[: found.start()] if found else text

    def begun_by(self, prompt: str) -> str:
        """Returns the beginning of the assistant's message in a rendered prompt: an opening mark or a prefill.

        Without a known header it is an opening mark at the end of the prompt.
        """
        if self.header:
            _, found, behind = prompt.rpartition(self.header)
            if found:
                return behind
        trailing = self._trailing.search(prompt) if self._trailing is not None else None
        return trailing.group() if trailing else ""


def is_marks(text: str) -> bool:
    """Returns True if a text is `auto`, `off` or two different marks with `SEPARATOR` between them."""
    opening, _, closing = text.partition(SEPARATOR)
    return text in ("auto", "off") or (bool(opening.strip() and closing.strip()) and opening != closing)


def read_format(chat: ChatTemplate, added_tokens: Collection[str], marks: str = "auto") -> ThinkingFormat:
    """Returns the thinking format of a model, of which `chat` may be empty; `marks` is `model.thinking_marks`."""
    source = "\n".join({chat.source, *chat.named.values()})
    known = list(KNOWN) + [m for m in IF_IN_TEMPLATE if m.opening in source and m.closing in source]
    known += [m for m in _token_pairs(added_tokens) if m not in known]
    prompt = _generation_prompt(chat)
    if (opened := _opened_tag(prompt, source, added_tokens)) and opened not in known:
        known.append(opened)
    header = ThinkingFormat(tuple(known)).before_marks(prompt)
    header = header if header.strip() else ""
    derived = _written_marks(chat, header, added_tokens)
    if derived and not any(_matches(m.opening_pattern, m.opening, derived.opening) for m in known):
        known.append(derived)
    if marks == "off":
        known = []
    elif marks != "auto":
        opening, _, closing = marks.partition(SEPARATOR)
        known = [Marks(opening.strip(), closing.strip())]
    return ThinkingFormat(tuple(known), header=header)


def _token_pairs(tokens: Collection[str]) -> Iterator[Marks]:
    """Yields pairs of added tokens that are named after thinking and differ only in a begin or end marker."""
    stems: dict[tuple[str, str, str], dict[str, str]] = {}
    for token in sorted(tokens):
        parsed = re.fullmatch(r"([^\w/]+)(/?)([\w:.\- ]+?)([^\w]+)", token)
        if not parsed or not re.search("think|thought|reason", token, re.IGNORECASE):
            continue
        left, slash, name, right = parsed.groups()
        words = re.split(r"[_\- ]", name.lower())
        ends = bool(slash) or bool({"end", "stop", "eot"} & set(words))
        stem = "_".join(w for w in words if w not in ("begin", "start", "end", "stop", "bot", "eot"))
        stems.setdefault((left, stem, right), {})["closing" if ends else "opening"] = token
    for pair in stems.values():
        if len(pair) == 2:
            yield Marks(pair["opening"], pair["closing"])


def _generation_prompt(chat: ChatTemplate) -> str:
    """Returns the text that the template appends for the assistant's turn; "" if unknown."""
    asked: list[Message] = [{"role": "user", "content": "x"}]
    try:
        without, rendered = chat.render(asked, add_generation_prompt=False), chat.render(asked)
    except ValueError:  # no template, or one that refuses such a conversation
        return ""
    return rendered.removeprefix(without) if rendered.startswith(without) else ""


def _opened_tag(prompt: str, source: str, tokens: Collection[str]) -> Marks | None:
    """Returns the marks of a tag that ends the generation prompt, if the template or a token has its closing form."""
    found = re.search(r"([<\[])([^<>\[\]/\s|]{1,40})([>\]])\s*\Z", prompt)
    if found is None:
        return None
    closing = f"{found[1]}/{found[2]}{found[3]}"
    return Marks(f"{found[1]}{found[2]}{found[3]}", closing) if closing in source or closing in tokens else None


def _written_marks(chat: ChatTemplate, header: str, tokens: Collection[str]) -> Marks | None:
    """Returns the marks that the template writes around an assistant's reasoning; ordinary words do not count."""
    for key in _REASONING_KEYS:
        said: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _ANSWER, key: _THOUGHT},
        ]
        try:
            text = chat.render(said, add_generation_prompt=False)
        except ValueError:
            continue
        before, _, behind = text.partition(_THOUGHT)
        between, is_before_answer, _ = behind.partition(_ANSWER)
        opening = before.rpartition(header)[2].strip() if header and header in before else ""
        closing = between.strip()
        is_fit = opening and closing and opening != closing and max(len(opening), len(closing)) <= _MAX_MARK_CHARS
        if is_before_answer and is_fit and _is_no_prose(opening, closing, tokens):
            return Marks(opening, closing)
    return None


def _is_no_prose(opening: str, closing: str, tokens: Collection[str]) -> bool:
    """Returns True if both texts contain a tag or token, or are one bracketed name without and with a slash."""
    if not opening[0].isalnum() and closing == f"{opening[0]}/{opening[1:]}":
        return True
    named = [t for t in tokens if _TOKEN.fullmatch(t)]
    return all(_ANY_TAG.search(text) or any(t in text for t in named) for text in (opening, closing))


def _kind(found: re.Match[str]) -> tuple[str, int]:
    name = found.lastgroup or ""
    return (name, 0) if name in ("code", "call") else (name[0], int(name[1:]))


def _thinking(text: str, blocks: list[tuple[int, int, int, int]], start: int) -> str:
    return "\n".join(filter(None, (text[max(begin, start) : end].strip() for _, begin, end, _ in blocks)))


def _outside(text: str, blocks: list[tuple[int, int, int, int]], start: int) -> str:
    if not blocks:
        return text[start:]
    ends = [0, *(end for _, _, _, end in blocks)]
    begins = [*(begin for begin, _, _, _ in blocks), len(text)]
    pieces = [text[max(end, start) : max(begin, start)] for end, begin in zip(ends, begins, strict=True)]
    # Joined by a line break: two numbers must not become one.
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", "\n".join(piece for piece in pieces if piece.strip()))


def _opening_pattern(marks: Marks) -> str:
    return rf"\A\s*{re.escape(marks.opening)}" if marks.is_words else marks.opening_pattern


def _named(name: str, pattern: str, literal: str) -> str:
    return f"(?P<{name}>{pattern or re.escape(literal)})"


def _matches(pattern: str, literal: str, text: str) -> bool:
    return _compiled(pattern or re.escape(literal)).fullmatch(text) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.DOTALL)


DEFAULT = ThinkingFormat(KNOWN)
"""Format for texts of an unknown model."""
