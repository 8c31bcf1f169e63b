import subprocess

import pytest

from tests.integration.support.processes import REPO


@pytest.mark.heavy
@pytest.mark.parametrize("arguments", [["--fast", "--bogus"], ["--fast", "-n"], ["--bogus"]])
def test_flag_that_nobody_knows_is_a_line_and_code_2(arguments):
    done = subprocess.run(["bash", "launch/test.sh", *arguments], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_help_is_the_scripts_own():
    done = subprocess.run(["bash", "launch/test.sh", "--help"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0 and "--fast" in done.stdout and done.stderr == ""
