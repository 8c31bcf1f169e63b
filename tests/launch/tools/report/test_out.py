"""Where `launch.tools.report` may write, which is looked at before a report is made."""

import os

import pytest

from tests.integration.support.processes import REPO
from tests.launch.commands import call_each
from tests.launch.tools.report.folder import make_folder

ENV = os.environ | {"PYTHONPATH": str(REPO)}
REFUSED = {
    "no folder": ("/nope/x.html", "--out=/nope/x.html: folder /nope does not exist"),
    "a folder": ("HERE", "--out=HERE is a folder; name a file in it"),
    "below a file": ("HERE/run/config.json/x.html", "folder HERE/run/config.json does not exist"),
    "nobody may write": ("/proc/x.html", "--out=/proc/x.html: "),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    here = tmp_path_factory.mktemp("out")
    make_folder(here / "run")
    lines = [[f"--run_dir={here}/run", f"--out={out}".replace("HERE", str(here))] for out, _ in REFUSED.values()]
    return here, call_each("launch.tools.report.__main__", lines)


@pytest.mark.heavy
@pytest.mark.parametrize("case", REFUSED)
def test_file_that_can_not_be_written_is_named_as_it_was_given(done, case):
    here, all_of_them = done
    got = all_of_them[list(REFUSED).index(case)]
    (line,) = got.err.splitlines()
    assert got.code == 2 and not got.out and line.startswith("error: ") and "part" not in line
    assert REFUSED[case][1].replace("HERE", str(here)) in line
