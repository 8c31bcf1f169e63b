r"""What a mathematical response says is its answer; text in, text out.

Only a statement of an answer counts. A number in running text is a step on the way, and a policy that is paid for it
learns to write many.
"""

import re

_COMMAND = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])[ \t]*")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(?=\S*\d)(\S+)[ \t]*$", re.MULTILINE)
"""GSM8K's last line. One word with a digit in it: other fourth-level headings are no answers."""
_SAID = re.compile(
    r"(?:^[ \t#*_]*(?:final[ \t]+)?answer[ \t*_]*\n"  # a heading
    r"|\banswers?\b(?:(?:(?!\b(?:not|never|no|cannot|if|whether)\b|n't\b)[^.\n:=]){0,60}?"  # the answer is
    r"\b(?:is|are|be|equals)\b(?![ \t]+not\b)|[\s*_]*[:=]))"  # Answer:
    r"[\s*_:=]*(?:(?:therefore|thus|simply|exactly|just|approximately|about|equal to|given by)[\s:,]+)*",
    re.IGNORECASE | re.MULTILINE,
)
_ENVIRONMENT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,\s*)?(?:(?:and|or)\b)?\s*")
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{2,}|I(?![A-Za-z]))")
_SENTENCE_END = re.compile(r"\n|[.;!?](?=\s|$)")
_CONDITION = re.compile(
    r"\b(?:if|whether|unless|suppos\w*|assum\w*)\s+(?:that\s+)?(?:(?:the|my|our|your)\s+)?(?:final\s+|correct\s+)?$",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\s*(?:\\?%|percent)?\s*(?:(?:of|times|plus|minus|over|to|(?:divided|multiplied|increased|decreased)\s+by|(?:more|less)\s+than)"
    r"\s+[$\\({-]*\d|(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial)\b)",
    re.IGNORECASE,
)
"""What stands before it is a part of the answer only: "5 times 3", "5% of 200", "5 million"."""
_DIGITS = re.compile(r"(?:(?<![\d)])(?<![\d)] )-)?\d+(?:,\d{3})*(?:\.\d+)?")
_MAX_CHARS = 4000
"""Of what follows "the answer is"; of a statement no more is read."""
_MAX_STATEMENTS = 64
"""The last ones: a response may say a thing a thousand times."""


def conclusion(text: str, *, is_cut: bool = False) -> str | None:
    r"""The expression that a response states as its answer, LaTeX or plain; None if it states none.

    Of a text that was cut off, whole sentences and lines count, and boxes that are closed: 3.14 may be half a number.

    The last `\boxed{...}` or `#### ...` decides, whatever stands before or after it; one that is not closed states
    nothing. Without any it is the last "the answer is ..." or "Answer: ..." that an expression follows, and without
    that the whole text, if it is one line without words.
    """
    whole = _whole_sentences(text) if is_cut else text
    marks = [*_COMMAND.finditer(text), *_HASHES.finditer(whole)]
    if marks:
        last = max(marks, key=lambda m: m.start())
        return (last.group(1) if last.re is _HASHES else _argument(text[last.end() :])) or None
    for said in reversed([*_SAID.finditer(whole)][-_MAX_STATEMENTS:]):
        if _CONDITION.search(whole[max(0, said.start() - 40) : said.start()]):
            continue
        if stated := _leading(whole[said.end() : said.end() + _MAX_CHARS]):
            return stated
    bare = whole.strip()
    return _leading(bare) if bare and "\n" not in bare and not _WORD.search(bare) else None


def last_number(text: str, *, is_cut: bool = False) -> str | None:
    """The last number in digits of a text, or of its whole sentences if it was cut off; None if there is none.

    For a question that asks for a number: benchmarks of arithmetic and of word problems read answers so, and of many
    numbers only one counts. A minus sign after a number or a bracket is a difference's.
    """
    found = _DIGITS.findall(_whole_sentences(text) if is_cut else text)
    return found[-1] if found else None


def _whole_sentences(text: str) -> str:
    """A text up to its last sentence or line that surely ended."""
    ends = [m.end() for m in re.finditer(r"\n|[.;!?](?=\s)", text)]
    return text[: ends[-1]] if ends else ""


def _argument(text: str) -> str:
    """What follows a LaTeX command: a group in braces, without them, or one word; empty if the group isn't closed."""
    if not text.startswith("{"):
        return re.match(r"[^\s$.,;]*", text).group()  # pyright: ignore[reportOptionalMemberAccess]  # matches nothing too
    depth = 0
    for brace in re.finditer(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace.group(1) == "{" else -1
        if depth == 0:
            return text[1 : brace.end() - 1].strip()
    return ""


def _leading(text: str) -> str:
    """The expressions that a text begins with, commas between them: what is marked as LaTeX, or what has no words."""
    found: list[str] = []
    at = 0
    while part := _ENVIRONMENT.match(text, at):
        found += [p.strip() for p in part.groups() if p]
        between = _BETWEEN.match(text, part.end())
        at = between.end() if between else part.end()
    if found:
        return "" if _GOES_ON.match(text, at) else ", ".join(found)
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    joined = re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ", ", sentence)
    stated = _WORD.split(joined, maxsplit=1)[0]
    if _GOES_ON.match(joined, len(stated.rstrip(" \t%\\"))):
        return ""
    return stated.strip(" \t,:*_$")
