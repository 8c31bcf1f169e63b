"""Every line that the two pages of symptoms quote is one that Sluice prints."""

import re
import sys

import pytest

from tests.docs import provoked
from tests.docs.markdown import DOCS, fenced
from tests.docs.templates import said, unsaid

PAGES = [DOCS / "troubleshooting.md", DOCS / "troubleshooting_operation.md"]
LINES = [line for page in PAGES for block in fenced(page, "output") for line in block.splitlines()]
LEAST = 16
"""Characters of one text of the sources that a line has at least: less could be any line."""
OF_OTHERS = (
    "ValueError: No available memory for the cache blocks",
    "jaxlib._jax.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
    "ModuleNotFoundError: No module named 'my_losses'",
    'connection to server at "127.0.0.1", port 9 failed: Connection refused',
    "Address already in use (while attempting to bind on address ('127.0.0.1', 8443))",
    "Cannot connect to host 127.0.0.1:8100 ssl:default [Connect call failed ('127.0.0.1', 8100)]",
    "Address already in use",
    'connection to server at "127.0.0.1", port 5432 failed: FATAL:  password authentication failed for user "learner"',
)
"""What Python, vLLM, XLA, libpq or the kernel say, which Sluice passes on."""
PROVOKED = [
    "config has no field 'loss.nam'",
    "num_engines: expected int",
    "publish.when: expected one of",
    "must be a multiple of the round's",
    "is below R/U - 1",
    "packing.rows (3) must be a multiple",
    "no model folder",
    "max_position_embeddings",
    "no prompts file",
    "has no usable row",
    "no prompt fits",
    "cannot import module my_losses",
    "holds a run of another config",
    "is locked by a running launch.local",
    "cannot listen at 127.0.0.1:",
    "snapshots cannot be served at",
    "bubblewrap is not installed",
    "run.trackers has wandb",
    "still starting: ",
    "step 40/240 reward 0.000",
    "held-out reward",
    "policy or the critic that was not finite",
    "the 200 requests of a round race",
    "free for snapshots",
    "for 3 more checkpoints",
    "is of another model: hidden_size",
    "was unreachable for 10 s",
    "--store must not contain a password",
    "publish.serve=https requires a token",
    "listens on every address",
    "requires Sluice",
    "judge unreachable",
]
"""Lines of the page that are made to be printed, each by a piece that it alone has."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return {
        plain(line, str(place))
        for provoke in (provoked.commands, provoked.refusals, provoked.notes)
        for place in [tmp_path_factory.mktemp(provoke.__name__)]
        for line in provoke(place)
    }


def plain(line: str, place: str = "/srv") -> str:
    """A line without what differs from one machine, or one run, to the next."""
    line = line.replace(sys.executable, "/srv/sluice/.venv/bin/python").replace(str(DOCS.parent), "/srv/sluice")
    line = re.sub(r"runs/\w+", "runs/NAME", line.replace(place, "/srv"))
    return re.sub(r"\d[\d.,:]*|(?<=eta )-|\s+", lambda m: "#" if m[0].strip() else " ", line)


def test_pages_have_many_symptoms_and_each_says_what_to_do():
    sections = [s for page in PAGES for s in re.split(r"^### ", page.read_text(), flags=re.MULTILINE)[1:]]
    assert len(sections) >= 30
    for section in sections:
        assert "```output\n" in section, section
        assert len(section.rpartition("```")[2].split("\n## ")[0].split()) > 10, section


@pytest.mark.heavy
@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_line_is_made_of_texts_of_the_sources_and_values(line):
    for other in OF_OTHERS:
        line = line.replace(other, "")
    texts = said(line)
    assert not line or max(sum(map(len, text.parts)) for text in texts) >= min(LEAST, len(line)), "no such text"
    values = re.findall(r"[A-Za-z]{4,}(?: [A-Za-z]{2,})+", unsaid(line))
    assert values == [], "more than values in what no text of the sources has"


@pytest.mark.heavy
@pytest.mark.parametrize("piece", PROVOKED)
def test_line_is_printed_as_quoted(printed, piece):
    (line,) = [line for line in LINES if piece in line][:1]
    assert plain(line) in printed, "\n".join(sorted(one for one in printed if piece.split()[0] in one))


def test_line_that_nobody_prints_is_found():
    made_up = "error: the flux capacitor of actor-0 has run out of gigawatts; give it more"
    assert re.findall(r"[A-Za-z]{4,}(?: [A-Za-z]{2,})+", unsaid(made_up)) or not said(made_up)
