"""Tokenization with a model folder's tokenizer.json, and escaping of control tokens in text.

A user's or tool's text may spell a control token, such as `<|im_end|>`. Under a chat template, such text must stay
text: as a token it would end its turn and forge another. `ControlTokens.as_text` inserts `BREAK` into it, and `encode`
tokenizes the text on each side of a `BREAK` separately.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import tokenizers

from bridge.text.chat_template import ChatTemplate

BREAK = "\ufdd0"
"""Unicode noncharacter that no interchanged text contains. No token spans it, and it is not part of the text."""
_ANSWER, _FOLLOW_UP = "Sluiceanswer", "Sluicefollowup"
_TURNS = (
    {"role": "user", "content": "Sluicequestion"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _FOLLOW_UP},
)
"""Messages that probe a template: any text around them is text that the template writes around messages."""
_THINKING = re.compile(r"</?think(ing)?>|\[/?THINK\]")
"""Thinking marks that some templates write next to each turn. The assistant also writes them itself."""

T = TypeVar("T")


def read_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json without its truncation and padding; raises ValueError if it is missing or unreadable."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; save the tokenizer in its fast format "
            "(tokenizer.save_pretrained of a fast tokenizer writes it)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the Rust library raises plain Exception
        raise ValueError(f"{file} is not a tokenizer: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text without added special tokens; no token spans a `BREAK`.

    A tokenizer that puts a space before a text (SentencePiece) puts none after a `BREAK`.
    """
    return encode_batch(tokenizer, [text])[0]


def encode_batch(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Returns `encode` of each text, computed on all cores."""
    pieces = [list(_pieces(tokenizer, text)) for text in texts]
    flat = [piece for of_text in pieces for piece in of_text]
    whole = tokenizer.encode_batch_fast([p for p, goes_on in flat if not goes_on], add_special_tokens=False)
    rests = [p for p, goes_on in flat if goes_on]
    unspaced = _without_prefix(tokenizer) if rests else None
    further = unspaced.encode_batch_fast(rests, add_special_tokens=False) if unspaced else []
    ids = {False: iter(whole), True: iter(further)}
    return [[i for _, goes_on in of_text for i in next(ids[goes_on]).ids] for of_text in pieces]


@dataclasses.dataclass(frozen=True, slots=True)
class ControlTokens:
    """Texts that a tokenizer turns into control tokens."""

    of_turns: frozenset[str]
    """Ends of sequences, and tokens that the chat template writes around messages; escaped in every message."""
    special: frozenset[str]
    """All special tokens of the tokenizer. Assistant messages keep them as tokens, for example thinking marks."""
    ends: frozenset[str] = frozenset()
    """Ends of sequences alone."""

    def as_text(self, messages: Iterable[Mapping[str, T]]) -> list[dict[str, T]]:
        """Returns the messages with a `BREAK` in each control token that their texts spell."""
        return [
            {k: v if k == "role" else self._broken(v, is_assistant=m.get("role") == "assistant") for k, v in m.items()}
            for m in messages
        ]

    def response_as_text(self, response: str) -> str:
        """Returns a response in the model's own format with a `BREAK` in each end of a sequence."""
        pattern = _pattern(self.ends, frozenset[str]())
        return response if pattern is None else _break(response, pattern)

    def values_as_text(self, value: T) -> T:
        """Returns a text, or all texts in lists and objects, with a `BREAK` in each control token."""
        return self._broken(value, is_assistant=False)

    def _broken(self, value: Any, *, is_assistant: bool) -> Any:
        pattern = _pattern(self.of_turns, frozenset[str]() if is_assistant else self.special)
        return value if pattern is None else _map_texts(value, lambda text: _break(text, pattern))


def control_tokens(
    tokenizer: tokenizers.Tokenizer, chat: ChatTemplate | None, *, ends: Iterable[int] = ()
) -> ControlTokens:
    """Returns the control tokens of a tokenizer and of its chat template, if one is applied; `ends` end a sequence."""
    added = tokenizer.get_added_tokens_decoder()
    ending = frozenset(added[i].content for i in ends if i in added)
    of_turns = set(ending)
    if chat is not None:
        names = {t.content for t in added.values()}
        of_turns |= names & set(chat.special_tokens.values())
        written = {added[i].content for i in encode(tokenizer, _turns(chat)) if i in added}
        of_turns |= {text for text in written if not _THINKING.fullmatch(text)}
    return ControlTokens(frozenset(of_turns), frozenset(t.content for t in added.values() if t.special), ending)


def is_thinking(text: str) -> bool:
    """Returns True if a text is marks of thinking with nothing between them."""
    return bool(text.strip()) and not _THINKING.sub("", text).strip()


def turn_end(tokenizer: tokenizers.Tokenizer, chat: ChatTemplate, stop_token_ids: Iterable[int]) -> int | None:
    """Returns the added token that ends the assistant's turn in the template, if no stop token ends it.

    Two positions are checked. One is the end of a conversation (gpt-oss writes its final token only there). The other
    is before the user's next message (Phi-3 writes EOS after the last turn, which the model never does). Returns None
    if a stop token ends the turn, or text follows it.
    """
    added, stops = tokenizer.get_added_tokens_decoder(), set(stop_token_ids)
    at_end, between = (_behind_answer(tokenizer, chat, count) for count in (2, 3))
    if stops & set(at_end) and (at_end[0] in stops or not between or stops & set(between)):
        return None
    if not at_end and stops & set(between):
        return None
    leading = next(iter(at_end or between), None)
    return leading if leading in added else None


def answer_end(tokenizer: tokenizers.Tokenizer, chat: ChatTemplate, stop_token_ids: Iterable[int]) -> int | None:
    """Returns the first stop token behind an assistant message that ends a conversation; None if there is none."""
    stops = set(stop_token_ids)
    return next((i for i in _behind_answer(tokenizer, chat, 2) if i in stops), None)


def _behind_answer(tokenizer: tokenizers.Tokenizer, chat: ChatTemplate, count: int) -> list[int]:
    """Returns the tokens after the assistant's words in a `count`-message conversation; [] if the template fails."""
    try:
        text = chat.render(_TURNS[:count], add_generation_prompt=False)
    except ValueError:
        return []
    ids = encode(tokenizer, text.rpartition(_ANSWER)[2].partition(_FOLLOW_UP)[0].strip())
    blank = itertools.takewhile(lambda i: not tokenizer.decode([i], skip_special_tokens=False).strip(), ids)
    return ids[len(list(blank)) :]


def beginning(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], bos_token: str) -> str:
    """Returns the text of the tokens that the tokenizer puts before a text; "" if there are none.

    They come from its post-processor, or are the BOS token if tokenizer_config.json sets `add_bos_token`.
    """
    whole = tokenizer.encode("a", add_special_tokens=True)
    is_special = whole.special_tokens_mask
    leading = whole.ids[: is_special.index(0)] if 0 in is_special else []
    if leading:
        return tokenizer.decode(leading, skip_special_tokens=False)
    return bos_token if settings.get("add_bos_token") is True else ""


def _pieces(tokenizer: tokenizers.Tokenizer, text: str) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of a text between its `BREAK`s, with True if no space may be put before the piece.

    That holds only up to the next added token: the tokenizer handles the text after it by its own rules.
    """
    first, *others = text.split(BREAK)
    unspaced = _without_prefix(tokenizer) if others else None
    if first:
        yield first, False
    for piece in filter(None, others):
        end = 0 if unspaced is None else _first_added(unspaced, piece)
        yield from ((part, goes_on) for part, goes_on in ((piece[:end], True), (piece[end:], False)) if part)


def _first_added(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    """Returns the start of a text's first added token with its white space, or the text's length if there is none."""
    added = _added_texts(tokenizer)
    found = tokenizer.encode(text, add_special_tokens=False)
    # Compare the text as well: the unknown token is an added token.
    begins = (a for i, (a, b) in zip(found.ids, found.offsets, strict=True) if added.get(i) == text[a:b].strip())
    return next(begins, len(text))


@functools.lru_cache(maxsize=4)
def _added_texts(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    return {i: token.content.strip() for i, token in tokenizer.get_added_tokens_decoder().items()}


@functools.lru_cache(maxsize=4)
def _without_prefix(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
    """Returns a copy of a tokenizer that puts no space before a text; None if the tokenizer puts none."""
    stated = json.loads(tokenizer.to_str())
    changed = {part: _prefixless(stated[part]) for part in ("normalizer", "pre_tokenizer")}
    if all(stated[part] == new for part, new in changed.items()):
        return None
    return tokenizers.Tokenizer.from_str(json.dumps(stated | changed))


def _prefixless(stated: Any) -> Any:
    """Returns a normalizer or pre-tokenizer, as JSON, that puts no space before a text."""
    match stated:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return stated | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return stated | {"add_prefix_space": False}
        case {"type": "Sequence", "normalizers": parts}:
            return stated | {"normalizers": [new for part in parts if (new := _prefixless(part)) is not None]}
        case {"type": "Sequence", "pretokenizers": [first, *others]}:
            # Only the first sees the text itself. Any other puts its spaces before words.
            return stated | {"pretokenizers": [_prefixless(first), *others]}
        case _:
            return stated


def _turns(chat: ChatTemplate) -> str:
    """Renders `_TURNS`, or only the first message if the template accepts no more."""
    for count in (3, 1):
        try:
            return chat.render(_TURNS[:count], add_generation_prompt=False)
        except ValueError:
            continue
    return ""


@functools.cache
def _pattern(of_turns: frozenset[str], special: frozenset[str]) -> re.Pattern[str] | None:
    longest_first = sorted((t for t in of_turns | special if len(t) > 1), key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _break(text: str, pattern: re.Pattern[str]) -> str:
    text = text.replace(BREAK, "\ufffd")
    while (broken := pattern.sub(lambda m: m[0][0] + BREAK + m[0][1:], text)) != text:
        text = broken  # one token may be within another
    return text


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: _map_texts(v, change) for k, v in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_map_texts(v, change) for v in cast(Sequence[Any], value)]
    return value
