"""`python -m launch.tools.samples` as it is typed."""

import json
import os
import subprocess
import sys

import pytest

from tests.integration.support.processes import REPO
from tests.launch.commands import call_each
from tests.launch.tools.report.folder import make_folder

pytestmark = pytest.mark.heavy

REFUSED = {
    "no-run-dir": ((), "--run_dir: expected the folder of a run"),
    "no-run-folder": (("--run_dir=/nowhere",), "/nowhere is not a run folder (it has no config.json)"),
    "two": (("--run_dir=a,b",), "--run_dir: expected one folder, got 2: a, b"),
    "grep": (("--run_dir=RUN", "--grep=("), "--grep='(' is not a regular expression"),
    "step": (("--run_dir=RUN", "--step=9-3"), "--step must be a step or a range"),
    "sort": (("--run_dir=RUN", "--sort=size"), "should be one of <step|reward|lag|length>"),
    "limit": (("--run_dir=RUN", "--limit=0"), "0 is not a positive integer"),
    "compare": (("--run_dir=RUN", "--compare", "--grep=x"), "--grep has no effect with --compare"),
}
SHOWN = (
    ("--run_dir=RUN", "--limit=2", "--sort=reward"),
    ("--run_dir=RUN", "--grep=needle", "--noeval", "--step=2-3", "--full"),
    ("--run_dir=RUN", "--compare"),
    ("--run_dir=RUN", "--json", "--limit=3", "--sort=length"),
    ("--run_dir=RUN", "--json", "--compare"),
    ("--run_dir=RUN", "--grep=zzzzzz"),
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    run = make_folder(tmp_path_factory.mktemp("command") / "run")
    (run.parent / "empty").mkdir()
    (run.parent / "empty" / "config.json").write_text("{}")
    lines = [arguments for arguments, _ in REFUSED.values()] + [*SHOWN, ("--run_dir=EMPTY",)]
    put = [[a.replace("RUN", str(run)).replace("EMPTY", str(run.parent / "empty")) for a in line] for line in lines]
    return call_each("launch.tools.samples.__main__", put)


@pytest.mark.parametrize("case", REFUSED)
def test_command_refuses_in_one_line_with_code_2(done, case):
    got = done[list(REFUSED).index(case)]
    assert got.code == 2 and REFUSED[case][1] in got.err and len(got.err.splitlines()) == 1 and not got.out


def test_command_prints_what_is_asked_for_and_how_much_there_is(done):
    by_reward, found, compared = done[len(REFUSED) : len(REFUSED) + 3]
    assert by_reward.code == found.code == compared.code == 0
    assert by_reward.out.splitlines()[-1] == "2 of 128 matching samples, of 128 stored"
    assert "needle" in found.out and "eval" not in found.out
    assert compared.out.strip() == "no problem with two evaluations"


def test_json_is_a_sample_a_line_and_nothing_else(done):
    got = done[len(REFUSED) + 3]
    samples = [json.loads(line) for line in got.out.splitlines()]
    assert got.code == 0 and len(samples) == 3 and got.err == "3 of 128 matching samples, of 128 stored\n"
    lengths = [s["response"]["tokens"] for s in samples]
    assert lengths == sorted(lengths, reverse=True)
    assert {"step", "kind", "prompt", "prompt_id", "answer", "index"} <= samples[0].keys()
    assert {"text", "reward", "scores", "finish", "lag"} <= samples[0]["response"].keys()
    assert "responses" not in samples[0] and got.out.isascii()
    compared = done[len(REFUSED) + 4]
    assert compared.out == "" and compared.err == "no problem with two evaluations\n"


def test_search_that_finds_nothing_says_so(done):
    assert done[len(REFUSED) + 5].out == "no matching samples (of 128 stored)\n"


def test_command_says_how_a_run_comes_to_have_samples(done):
    assert done[-1].code == 2 and "samples.groups_per_round" in done[-1].err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_reader_that_has_enough_is_no_error(tmp_path, flags):
    """As `| head`; texts that are longer than what a pipe holds."""
    run = make_folder(tmp_path / "run", texts=("x" * 50_000,))
    command = [sys.executable, "-P", "-m", "launch.tools.samples", f"--run_dir={run}", "--full", "--limit=100", *flags]
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stderr is not None
        writer.stdout.readline()
        writer.stdout.close()
        said = writer.stderr.read()
    assert writer.returncode == 0 and b"Error" not in said
