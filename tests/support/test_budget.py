import subprocess
import sys
from pathlib import Path

from tests.integration.support.processes import REPO

TESTS = """
import time
import pytest

@pytest.mark.unit
def test_costly():
    end_s = time.process_time() + 0.2
    while time.process_time() < end_s:
        pass

@pytest.mark.unit
@pytest.mark.timeout(0.1)
def test_hangs():
    time.sleep(60)

@pytest.mark.parametrize("reason", ["no GPU here", "no room"])
def test_skipped(reason):
    pytest.skip(reason)
"""


def pytest_on(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  unit\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.budget", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(REPO)}, capture_output=True, text=True)


def test_skip_whose_reason_is_not_allowed_fails_the_session(tmp_path):
    allowed = tmp_path / "skips.txt"
    allowed.write_text("# devices\n^no GPU\n^no room\n")
    arguments = ("-k", "skipped", f"--allowed-skips={allowed}")
    assert pytest_on(tmp_path, *arguments).returncode == 0
    allowed.write_text("^no GPU\n")
    done = pytest_on(tmp_path, *arguments)
    assert done.returncode == 1 and "1 x no room" in done.stdout and "x no GPU" not in done.stdout


def test_costly_unit_test_is_listed_and_one_that_hangs_fails(tmp_path):
    done = pytest_on(tmp_path, "-k", "costly or hangs", "--list-costly=0.1")
    assert done.returncode == 1 and "1 passed" in done.stdout and "1 failed" in done.stdout
    listed = done.stdout.split("mark heavy or make cheaper")[1]
    assert "test_costly" in listed.split("short test summary")[0]
