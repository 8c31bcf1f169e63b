"""`python -m launch.tools.report` as it is typed, and what a run's end shows of itself."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from configs.presets import tiny
from launch import finalize
from launch.startup.prepare_run import PreparedRun
from launch.supervision.supervisor import RunOutcome
from launch.tools.evaluate.results import write
from tests.integration.support.processes import REPO
from tests.launch.commands import call_each
from tests.launch.tools.report.folder import make_folder

pytestmark = pytest.mark.heavy

REFUSED = {
    "no-run-dir": ((), "--run_dir: expected the folder of a run"),
    "no-run-folder": (("--run_dir=/nowhere",), "/nowhere: expected a run folder, got no config.json in it"),
    "twice": (("--run_dir=RUN", "--run_dir=RUN"), "is given twice"),
    "out-and-serve": (("--run_dir=RUN", "--serve", "--out=x"), "--out: expected no --out with --serve"),
    "out": (("--run_dir=RUN", "--out=/proc/none/r.html"), "/proc/none"),
    "port": (("--run_dir=RUN", "--serve", "--port=70000"), "--port"),
    "no-results": (("--results=/nowhere/r.json",), "/nowhere/r.json: No such file"),
    "other-results": (("--results=RUN/config.json",), "config.json: expected a results file of launch.tools.evaluate"),
    "results-served": (("--results=RUN/config.json", "--serve"), "--serve: expected --run_dir=FOLDER"),
    "unknown": (("--run_dir=RUN", "--fast"), "Unknown command line flag 'fast'"),
}


def results(model):
    one = {"set": "aime", "k": 1, "problems": 2, "metrics": {"avg@1": {"value": 0.5, "stderr": 0.5}}}
    return {"format": 1, "time_s": 1.0, "model": f"/models/{model}", "sets": [one]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    return [make_folder(root / name, name=name.replace(",", "-"), steps=4) for name in ("one", "two", "a,b")]


@pytest.fixture(scope="module")
def done(runs):
    one, two, comma = map(str, runs)
    lines = [[a.replace("RUN", one) for a in arguments] for arguments, _ in REFUSED.values()]
    lines += [[f"--run_dir={one}"], [f"--run_dir={comma}"]]
    lines += [[f"--run_dir={one}", f"--run_dir={two}", f"--out={one}/twice.html"]]
    lines += [[f"--run_dir={one},{two}", f"--out={one}/comma.html"]]
    for name in ("base", "tuned"):
        write(results(name), runs[0] / f"{name}.json")
    lines += [[f"--results={one}/base.json,{one}/tuned.json", f"--out={one}/results.html"]]
    lines += [[f"--run_dir={one}", f"--results={one}/base.json", f"--out={one}/both.html"]]
    return call_each("launch.tools.report.__main__", lines)


@pytest.mark.heavy
@pytest.mark.parametrize("case", REFUSED)
def test_command_refuses_in_one_line_with_code_2(done, case):
    got = done[list(REFUSED).index(case)]
    assert got.code == 2 and REFUSED[case][1] in got.err and len(got.err.splitlines()) == 1 and not got.out


def test_report_of_a_run_goes_into_its_folder_and_its_place_is_said(done, runs):
    for got, run in zip(done[len(REFUSED) :], (runs[0], runs[2]), strict=False):
        assert got.code == 0 and str(run / "report.html") in got.out and len(got.out.splitlines()) == 1
        assert (run / "report.html").stat().st_size > 1_000_000


def test_several_runs_are_given_one_by_one_or_with_commas(done, runs):
    assert [got.code for got in done[-4:-2]] == [0, 0]
    for name in ("twice", "comma"):
        page = (runs[0] / f"{name}.html").read_text(encoding="utf-8")
        assert "<title>one and two - Sluice</title>" in page


def test_results_are_given_with_a_run_or_without_one(done, runs):
    assert [got.code for got in done[-2:]] == [0, 0]
    alone, both = ((runs[0] / f"{name}.html").read_text(encoding="utf-8") for name in ("results", "both"))
    assert "<td>base</td>" in alone and "<td>tuned</td>" in alone and 'id="summary"' not in alone
    assert "<td>base</td>" in both and "<td>tuned</td>" not in both and 'id="summary"' in both


def test_without_its_library_the_command_says_what_to_install(runs):
    words = "import sys; sys.modules['bokeh'] = None; sys.argv[0] = 'report'\n"
    words += "from launch import cli\nfrom launch.tools.report.__main__ import main\ncli.run(main)"
    call = [sys.executable, "-c", words, f"--run_dir={runs[0]}"]
    done = subprocess.run(call, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and "[report]" in done.stderr and len(done.stderr.splitlines()) == 1


def shown(folder):
    out = io.StringIO()
    finalize.show(folder, Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.heavy
def test_end_of_a_run_shows_three_samples_and_names_the_report(tmp_path):
    folder = make_folder(tmp_path / "run")
    text = shown(folder)
    assert text.count("reward ") == 3 and str(folder / "report.html") in text
    assert (folder / "report.html").is_file()


@pytest.mark.heavy
def test_end_of_a_run_is_no_error_where_there_is_nothing_to_show(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "run", groups=0)
    assert "reward" not in shown(folder) and (folder / "report.html").is_file()
    monkeypatch.setitem(sys.modules, "launch.tools.report.build", None)
    assert "requires the extra `report`" in shown(folder)
    monkeypatch.setattr(finalize, "read_samples", lambda folder: 1 / 0)
    assert "not written: ZeroDivisionError" in shown(folder)


@pytest.mark.heavy
def test_damaged_event_leaves_a_run_without_trace_and_not_without_its_summary_and_ending(tmp_path, capsys):
    folder = make_folder(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    events = folder / "events" / "learner.jsonl"
    events.write_text('{"name": "torn\n{"name": "train", "ph": "i", "ts": 1, "tid": 0, "args": {}}\n')
    prepared = PreparedRun(tiny.tiny(), folder, tmp_path / "model")
    finalize.finalize_run(prepared, RunOutcome.DONE)
    said = capsys.readouterr()
    assert "error: cannot write the trace of the run: " in said.err and "not a JSON event" in said.err
    assert (folder / "summary.json").exists()
    assert str(folder / "report.html") in said.out.replace("\n", "")
