"""The site, built strictly as CI and its readers get it: it asks nobody for anything, and its search finds."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from docs.site import commands, reference
from tests.docs.markdown import DOCS
from tests.integration.support.processes import REPO
from tests.launch.tools.report.browser import MISSING, PROGRAM, browser

pytestmark = pytest.mark.integration


SEARCH = """(() => {
  document.querySelector('[data-md-toggle=search]').click();
  const input = document.querySelector('.md-search__input');
  input.focus();
  input.value = 'bubblewrap is not installed';
  for (const name of ['keyup', 'input']) input.dispatchEvent(new Event(name, {bubbles: true}));
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; what Python opens a connection to while it is built fails."""
    folder = tmp_path_factory.mktemp("site")
    offline = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"],
        cwd=REPO,
        env=os.environ | offline | {"NO_MKDOCS_2_WARNING": "1", "no_proxy": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr  # --strict; with --quiet it would count no warning
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site):
    names = {str(f.relative_to(site)) for f in site.rglob("*.html")}
    assert {"index.html", "quickstart.html", "troubleshooting.html", "reference/fields.html"} < names
    assert {f"commands/{name}.html" for name in commands.names()} | {f"api/{n}.html" for n in reference.API} < names
    loaded = re.compile(r'<(?:script|img|link|iframe|source)[^>]*?(?:src|href)="?(?:https?:)?//')
    assert [name for name in names if loaded.search((site / name).read_text())] == []
    assert [f for f in site.rglob("*.css") if re.search(r"url\(\"?https?:", f.read_text())] == []


def test_api_has_what_the_sources_say(site):
    losses = (site / "api" / "losses.html").read_text()
    assert "truncated_is_loss" in losses and "REINFORCE" in losses and "max_weight" in losses
    environments = (site / "api" / "environments.html").read_text()
    assert "The same row must start the same episode" in environments


@pytest.mark.parametrize("word", ["dataset", "jsonl", "license", "gpu", "install"])
def test_search_index_has_a_page_of_docs_for_a_word_of_users(site, word):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    own = {f.relative_to(DOCS).with_suffix(".html").as_posix() for f in DOCS.rglob("*.md")} | {""}
    found = [e["location"].partition("#")[0] for e in entries if word in f"{e['title']} {e['text']}".lower()]
    assert own & set(found)


def test_search_index_has_no_results_and_no_package_notes(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert [e["location"] for e in entries if e["location"].startswith(("measured/", "packages/"))] == []


def open_page(page, url, **how):
    page.open(url, ready=f"document.readyState === 'complete' && location.href === '{url}'", **how)


@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
def test_pages_open_in_a_browser_without_problems_and_the_search_finds(address, site):
    with browser() as page:
        for name in ("index", "troubleshooting", "api/losses", "reference/fields"):
            for scheme, width in (("light", 1280), ("dark", 390)):
                open_page(page, f"{address}/{name}.html", scheme=scheme, width=width)
                assert page.run("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width}"
        for start in (f"{address}/index.html", (site / "api" / "losses.html").as_uri()):
            open_page(page, start)
            page.run(SEARCH)
            page.wait("document.querySelectorAll('.md-search-result__link').length > 0")
            found = page.run("[...document.querySelectorAll('.md-search-result__link')].map((a) => a.href)")
            assert any("troubleshooting" in link for link in found)
        assert page.problems == []
        assert [
            url for url in page.requests if not url.startswith((address, "file:", "data:", "blob:", "about:"))
        ] == []
