"""Pages of the site that are not in docs/, and links as they are led to them."""

import re

import pytest

from configs.field_docs import field_docs
from docs.site import commands, hooks, links, pages, reference
from learner.metrics.metric_names import FAMILIES, METRICS
from tests.launch.test_cli_help import commands as all_commands


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("README.md", "[a](../launch/README.md#runs)", "[a](packages/launch.md#runs)"),
        ("README.md", "[a](../launch)", "[a](packages/launch.md)"),
        ("README.md", "![a](../tests/bench/results/tail.png)", "![a](measured/tail.png)"),
        ("overview.md", "[a](docs/kubernetes.md) [b](CONTRIBUTING.md)", "[a](kubernetes.md) [b](contributing.md)"),
        ("packages/launch.md", "[a](../docs/kubernetes.md#ray)", "[a](../kubernetes.md#ray)"),
        ("packages/launch.md", "[a](../README.md) [b](../actor/README.md)", "[a](../overview.md) [b](actor.md)"),
        ("measured/tail.md", "![a](tail.png)", "![a](tail.png)"),
        (
            "kubernetes.md",
            "[a](llm_judge.md) [b](#ray) [c](https://x.org/a.md)",
            "[a](llm_judge.md) [b](#ray) [c](https://x.org/a.md)",
        ),
        ("kubernetes.md", "[a](nosuch.md)", "[a](nosuch.md)"),  # which a strict build refuses
        ("README.md", "`[a](../launch/README.md)`", "`[a](../launch/README.md)`"),
        ("README.md", "```\n[a](../launch/README.md)\n```\n", "```\n[a](../launch/README.md)\n```\n"),
    ],
)
def test_links_lead_to_where_a_file_is_on_the_site(path, text, wanted, monkeypatch):
    monkeypatch.setattr(pages, "generated", dict)
    assert links.relink(text, path) == wanted


def test_every_field_is_on_the_page_of_fields_with_its_meaning():
    text = reference.fields()
    for path, doc in field_docs().items():
        (row,) = re.findall(rf'^\| <span id="{re.escape(path)}"></span>.*$', text, re.MULTILINE)
        assert f"`{doc.path.rpartition('.')[2]}`" in row
        assert doc.meaning.split(" ")[0].replace("|", "\\|").replace("<", "&lt;") in row and row.endswith(" |")


def test_every_metric_is_on_the_page_of_metrics():
    assert set(re.findall(r"^\| `([^`]+)` \|", reference.metrics(), re.MULTILINE)) == {*METRICS, *FAMILIES}


def test_every_command_that_people_start_has_a_page():
    assert set(all_commands()) - set(commands.names()) <= commands._NOT_FOR_HANDS
    assert set(commands.names()) <= set(all_commands())


@pytest.mark.heavy
def test_page_of_a_command_is_its_help():
    page = commands._page("tools.runs")
    assert page.startswith("# tools.runs\n\n`python -m launch.tools.runs`\n\n```txt\n") and "--unfence" in page


def test_help_that_fails_ends_the_build():
    with pytest.raises(RuntimeError, match="launch.no_such_command --help ended with 1"):
        commands._help("no_such_command")


def test_modules_of_the_api_are_there_and_each_is_on_one_page():
    named = [module for _, modules in reference.API.values() for module in modules]
    assert len(named) == len(set(named))
    files = {m: commands.ROOT / m.replace(".", "/") for m in named}
    missing = [m for m, f in files.items() if not (f.with_suffix(".py").is_file() or (f / "__init__.py").is_file())]
    assert missing == []


def test_pages_of_all_packages_and_all_results_are_borrowed():
    borrowed = pages.borrowed()
    assert all(source.is_file() for source in borrowed.values())
    assert {f"packages/{name}.md" for name in ("actor", "bridge", "configs", "launch", "learner")} < set(borrowed)
    assert {f"measured/{f.name}" for f in pages._RESULTS.glob("*.md")} < set(borrowed)


def test_page_of_a_command_links_to_what_all_commands_share(monkeypatch):
    shared = "Presets: --config=NAME, or NAME:tiny where it has sizes:\n  cgp  x"
    monkeypatch.setattr(commands, "_help", lambda name: f"Trains.\n\nFlags:\n  --own  y\n\n{shared}\n")
    page = commands._page("local")
    assert "--own" in page and "cgp" not in page and "(../reference/fields.md)" in page


def test_sections_of_one_name_are_merged_in_the_navigation():
    nav = [{"Home": "README.md"}, {"Reference": ["losses.md"]}]
    more = [{"Reference": [{"Fields": "f.md"}]}, {"Project": ["x.md"]}]
    assert hooks.merged(nav, more) == [
        {"Home": "README.md"},
        {"Reference": ["losses.md", {"Fields": "f.md"}]},
        {"Project": ["x.md"]},
    ]


@pytest.mark.parametrize(
    ("path", "weight"),
    [
        ("measured/tail.md", {"exclude": True}),
        ("packages/actor.md", {"exclude": True}),
        ("api/losses.md", {"boost": 0.5}),
        ("install.md", {"boost": 2}),
        ("lora.md", {"boost": 2}),
        ("papers.md", None),
    ],
)
def test_search_weight_of_a_page(path, weight):
    nav = [{"Get started": ["install.md"]}, {"How-to guides": [{"Training": ["lora.md"]}]}, {"Papers": ["papers.md"]}]
    assert hooks.search_weight(path, nav) == weight
