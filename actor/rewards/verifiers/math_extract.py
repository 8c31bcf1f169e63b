r"""Extraction of the stated answer from a mathematical response; text in, text out.

Only a statement of an answer counts. A number in running text is an intermediate step, and a policy rewarded for those
learns to write many.
"""

import re

from actor.rewards.verifiers import math_normalize

_COMMAND = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])[ \t]*")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(?=\S*\d)(\S+)[ \t]*$", re.MULTILINE)
"""GSM8K's last line. One word with a digit: other fourth-level headings are no answers."""
_SOLUTION = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])|####|<answer>|\banswer\b", re.IGNORECASE)
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.IGNORECASE | re.DOTALL)
_JOINED = re.compile(
    r"[\s$.]*(?:\\[)\]])?\s*(?:,|;)?\s*(?:\\(?:text|quad|qquad)\s*\{?\s*)?\b(?:and|or)\b\s*\}?"
    r"[\s$]*(?:\\(?:quad|qquad|[(\[]))?[\s$]*(?:[A-Za-z](?:_\w)?\s*=\s*)?[\s$]*",
)
"""Text between boxes of one answer: "and" or "or", math delimiters, the name of a variable."""
_LISTED = re.compile(r"[\s$]*,[\s$]*")
"""Text between the first boxes of a list whose last two are joined by a word."""
_SAID = re.compile(
    r"(?:^[ \t#*_]*(?:final[ \t]+)?answer[ \t*_]*\n"  # a heading
    # the answer is
    r"|\banswers?\b(?:(?:(?!\b(?:not|never|no|cannot|if|whether|might|may|could)\b|n't\b)[^.\n:=]){0,60}?"
    r"\b(?:is|are|be|equals)\b(?![ \t]+not\b)|[\s*_]*[:=]))"  # Answer:
    r"[\s*_:=]*(?:(?:therefore|thus|simply|exactly|just|approximately|about|equal to|given by)[\s:,]+)*",
    re.IGNORECASE | re.MULTILINE,
)
_ENVIRONMENT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,\s*)?(?:(?:and|or)\b)?\s*")
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{2,}|I(?![A-Za-z]))")
_SENTENCE_END = re.compile(r"\n|[.;!?](?=\s|$)")
_DANGLING = re.compile(r"(?:(?<![\\=])[(\[]|[/–—-]|[\s,:*_$`'\"])+$")
"""End of a statement whose rest is words: `42 (apples)`, `42/hour`, `42 - as computed`."""
_CLAUSE_END = re.compile(r"(\n|[.;:!?,](?=\s|$|\*)|\*\*| because | since | as )")
_CONDITION = re.compile(
    r"\b(?:if|whether|unless|suppos\w*|assum\w*)\s+(?:that\s+)?(?:(?:the|my|our|your)\s+)?(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\s*(?:\\?%|percent)*\s*(?:(?:of|times|plus|minus|over|to|(?:divided|multiplied|increased|decreased)\s+by|(?:more|less)\s+than)"
    r"\s+[$\\({-]*\d|(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial)\b)",
    re.IGNORECASE,
)
"""Continuations that make the number before them only part of an answer: "5 times 3", "5% of 200", "5 million"."""
_DIGITS = re.compile(r"(?:(?<![\d)])(?<![\d)] )-)?\d+(?:,\d{3})*(?:\.\d+)?")
_MAX_CHARS = 4000
"""Maximum characters read after "the answer is"."""
_MAX_WORDS = 80
"""Maximum characters of an answer in words."""
_MAX_BOXES = 8
"""Maximum boxes of one answer."""
_MAX_BETWEEN = 60
"""Maximum characters between two boxes of one answer."""
_MAX_STATEMENTS = 64
"""Maximum statements read, from the end: a response may repeat one a thousand times."""


def solution_answer(text: str) -> str | None:
    """Returns the answer that a worked solution states; None if the text is an answer alone."""
    return extract_answer(text, in_words=True) if _SOLUTION.search(text) else None


def extract_answer(text: str, *, is_cut: bool = False, in_words: bool = False) -> str | None:
    r"""Returns the expression that a response states as its answer, LaTeX or plain; None if it states none.

    The last `\boxed{...}`, `<answer>...</answer>` or `#### ...` decides, wherever it is; an unclosed one states
    nothing. Boxes joined by "and" or "or" are one list. Without a mark it is the last "the answer is ..." or "Answer:
    ..." that an expression follows. Without that it is the whole text, if that is one line without words.

    In a truncated text (`is_cut`) only whole sentences and lines, and closed boxes and tags count: 3.14 may be half a
    number. With `in_words` the answer may be words, as `yes` or `option C`, which are read up to a comma.
    """
    text = _collapsed(text)
    whole = _whole_sentences(text) if is_cut else text
    marks = [*_COMMAND.finditer(text), *_HASHES.finditer(whole)]
    last = max(marks, key=lambda m: m.start(), default=None)
    tag = next(iter(_last_tags(text)), None)
    if tag and (last is None or last.start() < tag.end()):
        inner = tag[1].strip()
        return (extract_answer(inner, in_words=in_words) or inner) or None
    if last:
        return (last[1] if last.re is _HASHES else _boxes(text, last)) or None
    for said in reversed([*_SAID.finditer(whole)][-_MAX_STATEMENTS:]):
        if _CONDITION.search(whole[max(0, said.start() - 40) : said.start()]):
            continue
        following = whole[said.end() : said.end() + _MAX_CHARS]
        if stated := _leading(following) or (_words(following) if in_words else ""):
            return stated
    bare = whole.strip()
    if not bare or "\n" in bare or len(bare) > _MAX_CHARS:
        return None
    if _WORD.search(bare):
        return bare if in_words and len(bare) <= _MAX_WORDS else None
    return _leading(bare)


def last_number(text: str, *, is_cut: bool = False) -> str | None:
    """Returns the last number in digits of a text, or of its whole sentences if truncated; None if there is none.

    It is for questions that ask for a number, as benchmarks of arithmetic and word problems do; only one number counts.
    A minus sign after a number or a bracket denotes a difference.
    """
    found = _DIGITS.findall(_whole_sentences(text) if is_cut else text)
    return found[-1] if found else None


def _whole_sentences(text: str) -> str:
    """Returns a text up to its last complete sentence or line."""
    ends = [m.end() for m in re.finditer(r"\n|[.;!?](?=\s)", text)]
    return text[: ends[-1]] if ends else ""


def _collapsed(text: str) -> str:
    """Returns a text with white space collapsed, so that no expression below meets a run of it."""
    return re.sub(r"\n[ \n]*\n", "\n\n", re.sub(r"[^\S\n]+", " ", text))


def _last_tags(text: str) -> list[re.Match[str]]:
    """Returns the last closed `<answer>` of a text as a list of one, or an empty list."""
    end = text.lower().rfind("</answer>")
    start = text.lower().rfind("<answer>", 0, end) if end >= 0 else -1
    found = _TAG.match(text, start) if start >= 0 else None
    return [found] if found else []


def _boxes(text: str, last: re.Match[str]) -> str:
    """Returns the content of the last box of a text, with preceding boxes that are joined to it."""
    stated = [_argument(text[last.end() :])]
    start = last.start()
    for command in reversed([m for m in _COMMAND.finditer(text, 0, start)][-_MAX_BOXES:]):
        inner = _argument(text[command.end() : start])
        # A group has two braces more than its content, whose outer white space was stripped.
        closed = text.find(inner, command.end()) + len(inner) if inner else start
        between = re.sub(r"^\s*\}", "", text[closed:start])
        is_joined = _JOINED.fullmatch(between) or (len(stated) > 1 and _LISTED.fullmatch(between))
        if not inner or not stated[0] or len(between) > _MAX_BETWEEN or not is_joined:
            break
        stated.insert(0, inner)
        start = command.start()
    return ", ".join(dict.fromkeys(stated))


def _words(text: str) -> str:
    """Returns the leading words of a text, up to the end of its first clause."""
    sentence = _CLAUSE_END.split(text[: 2 * _MAX_WORDS].strip(" \t*_\n"), maxsplit=1)
    if len(sentence) > 1 and sentence[1].startswith("?"):
        return ""
    stated = sentence[0].strip(" \t,:*_$")
    return stated if len(stated) <= _MAX_WORDS else ""


def _argument(text: str) -> str:
    """Returns a LaTeX command's argument: a braced group's content, or one word; empty if the group is unclosed."""
    if not text.startswith("{"):
        return re.match(r"[^\s$.,;]*", text).group()  # pyright: ignore[reportOptionalMemberAccess]  # matches nothing too
    depth = 0
    for brace in re.finditer(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace.group(1) == "{" else -1
        if depth == 0:
            return text[1 : brace.end() - 1].strip()
    return ""


def _leading(text: str) -> str:
    """Returns the leading expressions of a text, comma-separated: LaTeX-delimited ones, or text without words."""
    found: list[str] = []
    at = 0
    while part := _ENVIRONMENT.match(text, at):
        found += [p.strip() for p in part.groups() if p]
        between = _BETWEEN.match(text, part.end())
        at = between.end() if between else part.end()
    if found:
        return "" if _GOES_ON.match(text, at) else ", ".join(found)
    end = _SENTENCE_END.search(text)
    if end and end.group() == "?":
        return ""
    sentence = text[: end.start()] if end else text
    if (spoken_number := math_normalize.in_digits(sentence.strip(" *_"))) != sentence.strip(" *_"):
        return spoken_number
    joined = re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ", ", sentence)
    stated = _WORD.split(joined, maxsplit=1)[0]
    if _GOES_ON.match(joined, len(stated.rstrip(" \t%\\"))):
        return ""
    return _DANGLING.sub("", stated).strip(" \t,:*_$`'\"")
