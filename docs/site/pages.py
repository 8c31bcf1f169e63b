"""Pages of the site that are not in docs/: those of the project's other folders, and those that are generated."""

import functools
import pathlib
from typing import Any

from docs.site import commands, reference

ROOT = commands.ROOT
DOCS = ROOT / "docs"
_PACKAGES = ("launch", "configs", "bridge", "actor", "learner")
_RESULTS = ROOT / "tests" / "bench" / "results"


def borrowed() -> dict[str, pathlib.Path]:
    """Files of the project by their path on the site."""
    packages = {f"packages/{name}.md": ROOT / name / "README.md" for name in _PACKAGES}
    results = {f"measured/{f.name}": f for f in sorted(_RESULTS.iterdir()) if f.suffix in {".md", ".png"}}
    return {"overview.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md", **packages, **results}


@functools.cache
def generated() -> dict[str, str]:
    """Markdown by its path on the site."""
    return {
        f"reference/{reference.FIELDS}": reference.fields(),
        f"reference/{reference.METRICS_PAGE}": reference.metrics(),
        **{f"commands/{name}.md": text for name, text in commands.pages().items()},
        **{f"api/{name}.md": text for name, (_, text) in reference.api().items()},
    }


@functools.cache
def on_site() -> dict[pathlib.Path, str]:
    """The path on the site of every file of the project that is there."""
    own = {f: f.relative_to(DOCS).as_posix() for f in DOCS.rglob("*") if f.is_file()}
    folders = {source.parent: path for path, source in borrowed().items() if source.name == "README.md"}
    return {**own, **folders, **{source: path for path, source in borrowed().items()}}


def source_of(path: str) -> pathlib.Path:
    """The file that a page of the site is from."""
    return borrowed().get(path, DOCS / path)


def navigation() -> list[dict[str, Any]]:
    """What follows the pages that mkdocs.yml names."""
    results = [path for path in borrowed() if path.startswith("measured/") and path.endswith(".md")]
    return [
        {
            "Reference": [
                {"Fields": f"reference/{reference.FIELDS}"},
                {"Metrics": f"reference/{reference.METRICS_PAGE}"},
                {"Commands": [{name: f"commands/{name}.md"} for name in commands.names()]},
                {"API": [{title: f"api/{name}.md"} for name, (title, _) in reference.api().items()]},
            ]
        },
        {
            "Project": [
                {"On one page": "overview.md"},
                {"Contributing": "contributing.md"},
                {"Packages": [{name: f"packages/{name}.md"} for name in _PACKAGES]},
                {"Measured": [{pathlib.Path(path).stem: path} for path in results]},
            ]
        },
    ]
