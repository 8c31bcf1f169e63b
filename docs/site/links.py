"""Links of pages as they lie in the project, led to where those pages are on the site."""

import os
import pathlib
import posixpath
import re

from docs.site import pages

_CODE = re.compile(r"(^```.*?^```[ ]*$|``[^`]+``|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def relink(text: str, path: str) -> str:
    """A page's text with its relative links as the site wants them.

    Args:
      text: Markdown, with links as they lead in the project.
      path: of the page on the site.
    """
    if path in pages.generated():
        return text
    return "".join(
        part if i % 2 else _LINK.sub(lambda m: m[1] + _led(m[2], path) + m[3], part)
        for i, part in enumerate(_CODE.split(text))
    )


def _led(link: str, path: str) -> str:
    """A link that leads nowhere on the site stays as it is: a strict build refuses it."""
    if "://" in link or link.startswith("mailto:"):
        return link
    target = pathlib.Path(os.path.normpath(pages.source_of(path).parent / link))
    on_site = pages.on_site().get(target)
    return link if on_site is None else posixpath.relpath(on_site, posixpath.dirname(path) or ".")
