"""JSON as it stands in a script element of the page. Pure."""

import json
from typing import Any


def json_for_script(value: Any) -> str:
    r"""JSON that may stand in a script element: no `<`, `>` or `&`, nor line separators that end a line of script.

    Lone surrogates stay escapes, as JSON has them, so the page is valid UTF-8. All of it is ASCII, so its length is its
    size in the file.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # what isn't ASCII is an escape already
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
