"""What `launch/setup.sh` refuses before it changes anything; a stand-in for Python does what `venv --clear` would."""

import os
import pathlib
import shutil
import subprocess

REPO = pathlib.Path(__file__).resolve().parents[2]
CLEARING_PYTHON = """#!/usr/bin/env bash
[ "$2" != venv ] || { rm -rf "${@: -1}"/*; exit 1; }
"""


def test_set_up_of_a_folder_whose_environment_is_a_link_leaves_what_it_leads_to(tmp_path):
    (tmp_path / "clone" / "launch").mkdir(parents=True)
    shutil.copy(REPO / "launch" / "setup.sh", tmp_path / "clone" / "launch")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").write_text("theirs")
    (tmp_path / "clone" / ".venv").symlink_to(tmp_path / "others")
    python = tmp_path / "python"
    python.write_text(CLEARING_PYTHON)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "clone" / "launch" / "setup.sh")],
        env=os.environ | {"SLUICE_PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "others" / "file").read_text() == "theirs"
    assert done.returncode == 1 and f"is a link to {tmp_path / 'others'}" in done.stderr
