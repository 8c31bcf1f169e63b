"""Site pages from outside docs/: files of other folders, and generated pages."""

import functools
import pathlib
from typing import Any

from docs.site import commands, reference

ROOT = commands.ROOT
DOCS = ROOT / "docs"
_PACKAGES = ("launch", "configs", "bridge", "actor", "learner")
_RESULTS = ROOT / "tests" / "bench" / "results"


def borrowed() -> dict[str, pathlib.Path]:
    """Returns files from outside docs/ by their path on the site."""
    packages = {f"packages/{name}.md": ROOT / name / "README.md" for name in _PACKAGES}
    packages["packages/benches.md"] = _RESULTS.parent / "README.md"
    results = {f"measured/{f.name}": f for f in sorted(_RESULTS.iterdir()) if f.suffix in {".md", ".png"}}
    return {"overview.md": ROOT / "README.md", "contributing.md": ROOT / "CONTRIBUTING.md", **packages, **results}


@functools.cache
def generated() -> dict[str, str]:
    """Returns generated Markdown by its path on the site."""
    return {
        f"reference/{reference.FIELDS}": reference.fields(),
        f"reference/{reference.METRICS_PAGE}": reference.metrics(),
        f"reference/{reference.ENVIRONMENTS}": reference.environments(),
        **{f"commands/{name}.md": text for name, text in commands.pages().items()},
        **{f"api/{name}.md": text for name, (_, text) in reference.api().items()},
    }


@functools.cache
def on_site() -> dict[pathlib.Path, str]:
    """Returns the site path of each project file that the site has."""
    own = {f: f.relative_to(DOCS).as_posix() for f in DOCS.rglob("*") if f.is_file()}
    folders = {source.parent: path for path, source in borrowed().items() if source.name == "README.md"}
    return {**own, **folders, **{source: path for path, source in borrowed().items()}}


def source_of(path: str) -> pathlib.Path:
    """Returns the source file of a site page."""
    return borrowed().get(path, DOCS / path)


def navigation() -> list[dict[str, Any]]:
    """Returns the navigation sections that mkdocs.yml does not list."""
    results = [path for path in borrowed() if path.startswith("measured/") and path.endswith(".md")]
    return [
        {
            "Reference": [
                {"Config fields": f"reference/{reference.FIELDS}"},
                {"Metrics": f"reference/{reference.METRICS_PAGE}"},
                {"Environment catalog": f"reference/{reference.ENVIRONMENTS}"},
                {"Commands": [{name: f"commands/{name}.md"} for name in commands.names()]},
                {"API": [{title: f"api/{name}.md"} for name, (title, _) in reference.api().items()]},
            ]
        },
        {
            "Project": [
                {"Repository README": "overview.md"},
                {"Contributing": "contributing.md"},
                {"Package notes": [{name: f"packages/{name}.md"} for name in (*_PACKAGES, "benches")]},
                {"Benchmark results": [{pathlib.Path(path).stem: path} for path in results]},
            ]
        },
    ]
