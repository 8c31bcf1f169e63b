"""The report in a real browser: nothing goes wrong, and what it promises can be done."""

import contextlib
import csv
import json
import threading
import time

import numpy as np
import pytest

from launch.tools.report.build import write_report
from launch.tools.report.server import make_server
from tests.launch.tools.report.browser import DEADLINE_S, MISSING, PROGRAM, browser
from tests.launch.tools.report.folder import HOSTILE, make_folder

pytestmark = [pytest.mark.integration, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]


@pytest.fixture(scope="module")
def page():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("browser")
    return [
        make_folder(root / "killed", name="killed", steps=12, killed=True),
        make_folder(root / "other", name="other", steps=40, seed=1, groups=60),
    ]


def opened(page, folders, target, **how):
    write_report(folders, target)
    page.problems.clear()
    page.requests.clear()
    page.open(target.as_uri(), **how)
    return page


def type_in(page, text):
    page.run(
        f"(() => {{ const s = document.getElementById('sample-search'); s.value = {json.dumps(text)};"
        " s.dispatchEvent(new Event('input')); })()"
    )


def cards(page):
    return page.run("[...document.querySelectorAll('.sample')].map((s) => s.textContent)")


def test_page_has_no_problem_asks_for_nothing_and_draws_every_figure(page, runs, tmp_path):
    for scheme in ("light", "dark"):
        opened(page, runs[:1], tmp_path / "r.html", scheme=scheme)
        assert page.problems == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
        drawn = page.run(
            "[...document.querySelectorAll('figure, #timeline')].map((f) => {"
            " const size = f.querySelector('[data-root-id]')?.firstElementChild.getBoundingClientRect();"
            " return size ? size.height : 0; })"
        )
        assert len(drawn) > 10 and min(drawn) > 60


def test_search_finds_a_sample_by_its_prompt_and_by_its_response(page, runs, tmp_path):
    opened(page, runs[:1], tmp_path / "r.html")
    for text, wanted in (("(17.3)", 1), ("question 17: ", 8), ("QUESTION 17: ", 8), ("nobody wrote this", 0)):
        type_in(page, text)
        page.wait(f"document.getElementById('sample-count').textContent.startsWith('{wanted} of ')")
        found = cards(page)
        assert len(found) == wanted and (not found or text.lower() in found[0].lower())
    type_in(page, "")
    page.wait("document.querySelectorAll('.sample').length === 20")
    page.run("document.getElementById('sample-more').click()")
    assert len(cards(page)) == 40
    assert page.problems == []


def test_samples_are_sorted_and_filtered(page, runs, tmp_path):
    opened(page, runs, tmp_path / "r.html")
    for name, value in (("sort", "length"), ("kind", "eval"), ("run", "1")):
        page.run(
            f"(() => {{ const s = document.getElementById('sample-{name}'); s.value = '{value}';"
            " s.dispatchEvent(new Event('change')); })()"
        )
    facts = page.run("[...document.querySelectorAll('.sample .facts')].map((f) => f.textContent)")
    tokens = [int(fact.split()[0]) for fact in facts if fact.endswith(" tokens")]
    assert tokens == sorted(tokens, reverse=True) and len(tokens) == 20
    assert all("other" in card and "evaluation of heldout" in card for card in cards(page))


def test_timeline_of_each_round_shows_every_process(page, runs, tmp_path):
    opened(page, runs[:1], tmp_path / "r.html")
    number = page.run("document.querySelectorAll('#round-number option').length")
    assert number == 6
    for i in range(number):
        page.run(
            "(() => { const s = document.getElementById('round-number');"
            f" s.value = {i}; s.dispatchEvent(new Event('change')); }})()"
        )
        tracks = ["learner", "actor-0", "actor-1"]
        assert json.loads(page.run("document.getElementById('timeline').dataset.tracks")) == tracks
        figure = "Bokeh.documents[0].get_model_by_name('timeline')"
        assert page.run(f"[...{figure}.left[0].major_label_overrides.values()]") == tracks
        spans = "Bokeh.documents[0].get_model_by_name('timeline-spans').data"
        assert page.run(f"{spans}.left.length") >= 8
    legend = page.run("[...document.querySelectorAll('#timeline-legend span')].map((s) => s.textContent)")
    assert {"rollout", "reward", "train", "publish", "generation paused"} <= set(legend)
    assert page.problems == []


def test_a_legends_entry_hides_what_it_names_and_shows_it_again(page, runs, tmp_path):
    opened(page, runs, tmp_path / "r.html")
    visible = (
        "(() => { const k = document.querySelector('button.key[data-run=\"1\"]');"
        " const f = Bokeh.documents[0].get_model_by_name(k.dataset.figure);"
        " return f.renderers.filter((r) => r.name).map((r) => [r.name, r.visible]); })()"
    )
    page.run("document.querySelector('button.key[data-run=\"1\"]').click()")
    assert {is_there for name, is_there in page.run(visible) if name.startswith("1/")} == {False}
    assert {is_there for name, is_there in page.run(visible) if name.startswith("0/")} == {True}
    page.run("document.querySelector('button.key[data-run=\"1\"]').click()")
    assert {is_there for _, is_there in page.run(visible)} == {True}


def test_hostile_text_does_nothing_but_to_be_shown(page, tmp_path):
    folder = make_folder(tmp_path / "hostile", texts=HOSTILE)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for row in rows:  # not the texts alone
        row |= dict.fromkeys(("metadata", "source", "environment", "answer", "set"), HOSTILE[1])
        for response in row["responses"]:
            response |= {
                "finish": HOSTILE[1],
                "actor": HOSTILE[1],
                "scores": {HOSTILE[1]: {"value": 1.0, "verdict": HOSTILE[1]}},
            }
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened(page, [folder], tmp_path / "h.html")
    assert page.run("window.hurt === undefined") and page.problems == []
    type_in(page, "<img src=x onerror")
    page.wait("document.querySelectorAll('.sample').length > 0")
    assert any(HOSTILE[1] in card for card in cards(page))
    assert page.run("document.querySelectorAll('img').length") == 0
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hurt = 1\">')")
    page.wait("document.images[0].complete")
    assert page.run("window.hurt === undefined"), "a handler in the markup ran: the policy lets it"


def test_page_is_no_wider_than_a_narrow_screen(page, runs, tmp_path):
    opened(page, runs, tmp_path / "r.html", width=390)
    assert page.run("document.documentElement.scrollWidth") <= 390


def test_round_that_is_not_finished_is_shown_first_with_what_was_begun_in_it(page, tmp_path):
    opened(page, [make_folder(tmp_path / "run", steps=8, hangs=True)], tmp_path / "r.html")
    assert "unfinished, updates 7-7" in page.run("document.getElementById('round-number').selectedOptions[0].text")
    legend = page.run("[...document.querySelectorAll('#timeline-legend span')].map((s) => s.textContent)")
    assert "unfinished" in legend
    assert json.loads(page.run("document.getElementById('timeline').dataset.tracks")) == [
        "learner",
        "actor-0",
        "actor-1",
    ]
    assert page.problems == []


def choose(page, name, value):
    page.run(
        f"(() => {{ const s = document.getElementById('{name}'); s.value = {json.dumps(value)};"
        " s.dispatchEvent(new Event('change')); })()"
    )


AXIS = (
    "(() => { const m = (n) => Bokeh.documents[0].get_model_by_name(n), figure = m('fig-reward');"
    " const x = [...figure.renderers.find((r) => r.tags[1] === 'reward/mean').data_source.data.x], range = m('over');"
    " return [x[0], x[x.length - 1], range.end, figure.below[0].axis_label]; })()"
)


def test_curves_are_drawn_over_what_is_chosen(page, runs, tmp_path):
    opened(page, runs, tmp_path / "r.html")
    assert page.run(AXIS)[:2] == [1, 12]
    choose(page, "over", "time")
    first, last, end, label = page.run(AXIS)
    assert (
        (first, last) == (40, 62) and end == pytest.approx(1.01 * (40 + 39 * 2)) and label.startswith("seconds since")
    )
    choose(page, "over", "tokens")
    first, last, end, label = page.run(AXIS)
    assert (first, last) == pytest.approx((0.6, 7.2)) and end == pytest.approx(1.01 * 24) and "thousands" in label
    choose(page, "over", "step")
    assert page.run(AXIS)[:2] == [1, 12] and page.problems == []


MEAN = """
  (() => {
    const figure = Bokeh.documents[0].get_model_by_name("fig-reward");
    const r = figure.renderers.find((r) => r.tags[1] === "reward/mean"), columns = r.data_source.data;
    const names = ["reward/mean", "reward/mean mean", "reward/mean mean low"];
    return [r.glyph.y.field, ...names.map((n) => [...columns[n]])];
  })()
"""


def test_running_mean_is_that_of_the_neighbors_in_the_chosen_window(page, runs, tmp_path):
    opened(page, runs[1:], tmp_path / "r.html")
    for width in (2, 10, 1):
        choose(page, "window", str(width))
        field, values, mean, low = page.run(MEAN)
        near = [values[max(0, i - width // 2) : i + (width + 1) // 2] for i in range(40)]
        assert field == "reward/mean mean"
        np.testing.assert_allclose(mean, [np.mean(n) for n in near], rtol=1e-5)
        for i in range(40):
            error = np.std(near[i], ddof=1) / np.sqrt(len(near[i])) if len(near[i]) > 2 else None
            assert low[i] is None if error is None else low[i] == pytest.approx(mean[i] - error, rel=1e-4)
    assert page.problems == []


def test_y_axis_becomes_logarithmic_and_linear_again(page, runs, tmp_path):
    opened(page, runs[:1], tmp_path / "r.html")
    scale = (
        "['fig-reward', 'fig-gradient-norm'].map((n) => {"
        " const f = Bokeh.documents[0].get_model_by_name(n); return [f.y_scale.type, f.left[0].ticker.type]; })"
    )
    linear, log = ["LinearScale", "BasicTicker"], ["LogScale", "LogTicker"]
    assert page.run(scale) == [linear, log]
    for name in ("reward", "gradient-norm"):
        page.run(f"document.querySelector('.log[data-figure=fig-{name}]').click()")
    assert page.run(scale) == [log, linear]
    page.wait("location.hash === '#&log=reward%2Cgradient-norm'")
    assert page.problems == []


def test_data_of_a_figure_are_downloaded_as_csv_and_the_figure_as_png(page, runs, tmp_path):
    opened(page, runs[:1], tmp_path / "r.html")
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for button in ("csv", "png"):
        page.run(f"document.querySelector('.{button}[data-figure=fig-reward]').click()")
    wait_for(tmp_path / "reward.csv", tmp_path / "reward.png")
    rows = list(csv.reader((tmp_path / "reward.csv").read_text().splitlines()))
    assert rows[0] == [
        "curve",
        "optimizer step",
        "seconds since the start of training",
        "trained tokens",
        "value",
    ]
    assert {row[0] for row in rows[1:]} == {"held-out problems", "training"} and len(rows) == 1 + 12 + 7
    assert [float(v) for v in rows[-1][1:4]] == pytest.approx([12, 62, 7200], rel=1e-5)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert page.problems == []


def wait_for(*files):
    end_s = time.monotonic() + DEADLINE_S
    while not all(file.is_file() and file.stat().st_size for file in files):
        assert time.monotonic() < end_s, files


def test_formulas_in_labels_are_text_in_the_csv(page, tmp_path):
    folder = make_folder(tmp_path / "run", steps=4)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"kind": "step", "step": 5, 'rewards/=1+1,"x': 0.5}) + "\n")
    opened(page, [folder], tmp_path / "r.html")
    page.run(
        "window.Blob = class { constructor(parts) { window.parts = parts; } }; URL.createObjectURL = () => 'data:,'"
    )
    page.run("document.querySelector('.csv[data-figure=fig-scores-by-verifier]').click()")
    labels = {row[0] for row in csv.reader(page.run("window.parts[0]").splitlines())}
    assert labels == {"curve", "math", "'=1+1,\"x"}


def test_a_link_restores_place_axis_running_mean_logarithm_round_and_samples(page, runs, tmp_path):
    opened(page, runs, tmp_path / "r.html")
    for name, value in (("over", "tokens"), ("window", "4"), ("round-run", "1"), ("round-number", 3)):
        choose(page, name, value)
    for name, value in (("sample-kind", "eval"), ("sample-sort", "length"), ("sample-run", "1"), ("sample-to", "30")):
        choose(page, name, value)
    page.run("document.querySelector('.log[data-figure=fig-reward]').click()")
    page.run("document.querySelector('#fig-gradient-norm h3 a').click()")
    page.wait("location.hash.startsWith('#fig-gradient-norm&')")
    link = page.run("location.href")
    page.open("about:blank", ready="true")
    page.open(link)
    found = page.run(PLACE)
    assert (found["over"], found["run"], found["to"], found["of"], found["round"]) == ("tokens", "1", "30", "1", "3")
    assert page.run("['window', 'sample-kind', 'sample-sort'].map((n) => document.getElementById(n).value)") == [
        "4", "eval", "length",
    ]  # fmt: skip
    assert page.run("Bokeh.documents[0].get_model_by_name('fig-reward').y_scale.type") == "LogScale"
    assert 0 <= page.run("document.getElementById('fig-gradient-norm').getBoundingClientRect().top") < 200
    assert page.run("location.href") == link and page.problems == []


@pytest.mark.parametrize(
    "fragment", ["#%E0%A4%A", "#nowhere", "#&over=&mean=x&log=,a&round=99&timeline=7&run=9&sort=z", "#a&b"]
)
def test_a_link_that_names_nothing_shows_the_whole_report(page, runs, tmp_path, fragment):
    write_report(runs[:1], tmp_path / "r.html")
    page.problems.clear()
    page.open("about:blank", ready="true")
    page.open((tmp_path / "r.html").as_uri() + fragment)
    assert page.problems == [] and len(cards(page)) == 20
    assert page.run(AXIS)[:2] == [1, 12]


def test_a_problem_shows_its_samples(page, runs, tmp_path):
    opened(page, runs[:1], tmp_path / "r.html")
    problem = page.run(
        "(() => { const b = document.querySelector('button.problem'); b.click(); return b.dataset.problem; })()"
    )
    page.wait("location.hash.startsWith('#samples')")
    found = cards(page)
    assert found and all(f"problem {problem}" in card or "evaluation of heldout" in card for card in found)


@contextlib.contextmanager
def served(page, folders):
    """A server of a report; the page leaves it before it ends, as a page that polls no one logs errors."""
    with make_server(folders, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        page.open("about:blank", ready="true")
        server.shutdown()


def go_on(folder, step):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f'{{"kind": "step", "step": {step}, "reward/mean": 0.5, "tokens": 600, "time/step_s": 2}}\n')


def test_served_page_that_nobody_touched_follows_the_run(page, tmp_path):
    folder = make_folder(tmp_path / "run", steps=4)
    with served(page, [folder]) as url:
        page.problems.clear()
        page.open(url)
        go_on(folder, 5)
        page.wait("document.querySelector('.numbers')?.textContent.includes('5 of 4')")
        assert page.problems == []


PLACE = (
    "(() => { const at = (id) => document.getElementById(id), m = (n) => Bokeh.documents[0].get_model_by_name(n);"
    " return { search: at('sample-search').value, run: at('sample-run').value, from: at('sample-from').value,"
    " to: at('sample-to').value, cards: document.querySelectorAll('.sample').length, over: at('over').value,"
    " zoom: [m('over').start, m('over').end], round: at('round-number').value, of: at('round-run').value,"
    " opened: [...document.querySelectorAll('details[open]')].map((d) => d.dataset.of),"
    " hidden: [...document.querySelectorAll('.key[aria-pressed=false]')].map((k) => k.textContent),"
    " top: Math.round(at('samples').getBoundingClientRect().top) }; })()"
)


def test_served_page_that_somebody_reads_waits_for_them_and_keeps_their_place(page, tmp_path):
    folders = [
        make_folder(tmp_path / "one", name="one", steps=8, groups=40),
        make_folder(tmp_path / "two", name="two", steps=12, groups=40, seed=1),
    ]
    with served(page, folders) as url:
        page.problems.clear()
        page.open(url)
        page.run("dispatchEvent(new Event('pointerdown')); window.isOld = true")
        for name, value in (("sample-run", "1"), ("sample-from", "2"), ("sample-to", "11"), ("over", "tokens")):
            choose(page, name, value)
        choose(page, "round-run", "1")
        choose(page, "round-number", 2)
        page.run("document.getElementById('sample-more').click()")
        page.run("document.querySelector('.key[data-run=\"1\"]').click()")
        page.run("document.querySelectorAll('#config details')[2].open = true")
        page.run("document.querySelectorAll('.sample details')[1].open = true")
        page.run("Bokeh.documents[0].get_model_by_name('over').setv({ start: 1, end: 3 })")
        page.run("scrollTo(0, document.querySelectorAll('.sample')[3].offsetTop)")
        before = page.run(PLACE)
        assert before["cards"] == 40 and before["zoom"] == [1, 3] and len(before["opened"]) == 2
        go_on(folders[0], 9)
        page.wait("!document.getElementById('more-of-run').hidden")
        assert page.run("window.isOld") and page.run(PLACE) == before
        page.run("document.getElementById('show-more-of-run').click()")
        page.wait("!window.isOld && document.documentElement?.dataset.drawn === 'yes'")
        assert "9 of 8" in page.run("document.querySelector('.numbers').textContent")
        after = page.run(PLACE)
        assert abs(after.pop("top") - before.pop("top")) <= 2 and after == before
        assert page.problems == []
