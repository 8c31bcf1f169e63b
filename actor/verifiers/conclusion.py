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
    r"|\banswers?\b(?:[^.\n:=]{0,60}?\b(?:is|are|be|equals)\b(?![ \t]+not\b)|[\s*_]*[:=]))"  # the answer is; Answer:
    r"[\s*_:=]*(?:(?:therefore|thus|simply|exactly|just|approximately|about|equal to|given by)[\s:,]+)*",
    re.IGNORECASE | re.MULTILINE,
)
_ENVIRONMENT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"\s*(?:,\s*)?(?:(?:and|or)\b)?\s*")
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{2,}|I(?![A-Za-z]))")
_SENTENCE_END = re.compile(r"\n|[.;!?](?=\s|$)")


def conclusion(text: str) -> str | None:
    r"""The expression that a response states as its answer, LaTeX or plain; None if it states none.

    The last `\boxed{...}` or `#### ...` decides, whatever stands before or after it; one that is not closed states
    nothing. Without any it is the last "the answer is ..." or "Answer: ..." that an expression follows, and without
    that the whole text, if it is one line without words.
    """
    marks = [*_COMMAND.finditer(text), *_HASHES.finditer(text)]
    if marks:
        last = max(marks, key=lambda m: m.start())
        return (last.group(1) if last.re is _HASHES else _argument(text[last.end() :])) or None
    for said in reversed([*_SAID.finditer(text)]):
        if stated := _leading(text[said.end() :]):
            return stated
    bare = text.strip()
    return _leading(bare) if bare and "\n" not in bare and not _WORD.search(bare) else None


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
        return ", ".join(found)
    sentence = _SENTENCE_END.split(text, maxsplit=1)[0]
    joined = re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ", ", sentence)
    return _WORD.split(joined, maxsplit=1)[0].strip(" \t,:*_$")
