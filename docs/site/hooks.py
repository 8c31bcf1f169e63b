"""Hooks that MkDocs calls while it builds the site (mkdocs.yml)."""

import pathlib
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import pages
from docs.site.links import relink

_NOT_SEARCHED = ("measured/", "packages/")
_BOOSTED = ("Get started", "How-to guides")
"""Sections of the navigation that the search ranks higher."""
_BOOST, _API_BOOST = 2, 0.5


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the generated pages to the navigation."""
    config.nav = merged(config.nav or [], pages.navigation())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds files from outside docs/ and generated pages."""
    for path, source in pages.borrowed().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    for path, text in pages.generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Sets the page's weight in the search, and rewrites links to project files to their pages on the site."""
    del files
    if (weight := search_weight(page.file.src_uri, config.nav or [])) is not None:
        page.meta["search"] = weight
    return relink(markdown, page.file.src_uri)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Writes the search index as a script too, which a page opened from its file can load."""
    index = pathlib.Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")


def merged(nav: list[Any], more: list[dict[str, Any]]) -> list[Any]:
    """Returns a navigation with further sections; entries of a section of the same name are appended to it."""
    result = [dict(entry) if isinstance(entry, dict) else entry for entry in nav]
    for section in more:
        for title, entries in section.items():
            same = [e for e in result if isinstance(e, dict) and title in e]
            if same:
                same[0][title] = [*same[0][title], *entries]
            else:
                result.append({title: entries})
    return result


def search_weight(path: str, nav: list[Any]) -> dict[str, Any] | None:
    """Returns the search settings of a page of the site; None for the defaults."""
    if path.startswith(_NOT_SEARCHED):
        return {"exclude": True}
    if path.startswith("api/"):
        return {"boost": _API_BOOST}
    boosted = (entries for entry in nav if isinstance(entry, dict) for t, entries in entry.items() if t in _BOOSTED)
    return {"boost": _BOOST} if any(path in _paths(entries) for entries in boosted) else None


def _paths(entries: Any) -> Iterator[str]:
    """Yields the paths below an entry of the navigation."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for inner in entries.values():
            yield from _paths(inner)
    else:
        for inner in entries:
            yield from _paths(inner)
