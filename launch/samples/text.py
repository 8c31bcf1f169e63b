"""Text that nobody checked, made fit to be shown: nothing in it moves a cursor, rings or reorders a line."""

import re

_CONTROL = {i: 0x2400 + i for i in range(0x20) if chr(i) not in "\n\t"} | {0x7F: 0x2421}
_HIDDEN = re.compile(r"[\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]")


def visible(text: str) -> str:
    r"""The text with control characters as pictures (ESC as ␛), and what has none, as `\u202e`, as its number.

    Newlines and tabs stay. What reorders text (bidirectional overrides) and lone surrogates are among them.
    """
    text = text.replace("\r\n", "\n").translate(_CONTROL)
    return _HIDDEN.sub(lambda found: f"‹U+{ord(found[0]):04X}›", text)
