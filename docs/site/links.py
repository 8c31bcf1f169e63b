"""Rewrites links between project files to their pages on the site."""

import os
import pathlib
import posixpath
import re

from docs.site import pages

_CODE = re.compile(r"(^```.*?^```[ ]*$|``[^`]+``|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def relink(text: str, path: str) -> str:
    """Returns a page's text with its relative links rewritten for the site.

    Args:
      text: Markdown with links between project files.
      path: path of the page on the site.
    """
    if path in pages.generated():
        return text
    return "".join(
        part if i % 2 else _LINK.sub(lambda m: m[1] + _led(m[2], path) + m[3], part)
        for i, part in enumerate(_CODE.split(text))
    )


def _led(link: str, path: str) -> str:
    """Returns the target on the site. A link without one stays unchanged, and a strict build rejects it."""
    if "://" in link or link.startswith("mailto:"):
        return link
    target = pathlib.Path(os.path.normpath(pages.source_of(path).parent / link))
    on_site = pages.on_site().get(target)
    return link if on_site is None else posixpath.relpath(on_site, posixpath.dirname(path) or ".")
