"""What MkDocs calls while it builds the site (mkdocs.yml)."""

import pathlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import pages
from docs.site.links import relink


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the generated pages to the navigation."""
    config.nav = [*(config.nav or []), *pages.navigation()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds files of the project that lie outside docs/, and pages that are generated."""
    for path, source in pages.borrowed().items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    for path, text in pages.generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the project to where these are on the site."""
    del config, files
    return relink(markdown, page.file.src_uri)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Writes the search's index as a script too, which is what a page that was opened from its file may load."""
    index = pathlib.Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text()}")
