"""The command: files and output, refusals, and the commands of docs/kubernetes.md and docs/slurm_ray.md as written."""

import os
import re
import shlex

import pytest
import yaml

from tests.integration.support.processes import REPO
from tests.launch.commands import call_each
from tests.launch.tools.deploy.cases import STORE

FIELDS = [
    "--config=tpu_v5p_64",
    "--config.model.path=/sluice/m",
    "--config.prompts.path=/sluice/p.jsonl",
    f"--config.store.url={STORE}",
    "--config.publish.serve=https",
]
FLAGS = [
    *("--target=kubernetes", "--learner=v5p", "--actors=h100", "--num_params=7e9"),
    *("--learner_image=a:1", "--actor_image=b:1", "--storage_claim=shared"),
]


def written() -> list[list[str]]:
    """Returns the arguments of the pages' deploy commands."""
    pages = [(REPO / "docs" / name).read_text() for name in ("kubernetes.md", "slurm_ray.md")]
    text = re.sub(r"\\\n\s*", "", "\n".join(pages))
    lines = [
        shlex.split(line)
        for line in text.splitlines()
        if line.startswith("    .venv/bin/python -m launch.tools.deploy ")
    ]
    return [line[3:] for line in lines]


@pytest.mark.heavy
def test_command_writes_files_and_says_what_is_next(tmp_path):
    (done,) = call_each("launch.tools.deploy.__main__", [[*FIELDS, *FLAGS, f"--out={tmp_path}/out"]])
    assert done.code == 0, done.err
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["actors.yaml", "learner.yaml", "run.yaml"]
    assert "learner: v5p-64 by its chips, Google's name v5p-128: 4x4x4, 16 hosts of 4 chips" in done.out
    assert f"kubectl apply -f {tmp_path}/out/run.yaml -f " in done.out


@pytest.mark.heavy
def test_command_names_the_files_that_actors_must_find_in_their_image(tmp_path):
    judge = ["--config.judge.url=https://judge.example/v1", "--config.judge.model=m", "--config.prompts.verifier=judge"]
    key = "--config.judge.api_key_file=/run/secrets/judge"
    (done,) = call_each("launch.tools.deploy.__main__", [[*FIELDS, *FLAGS, *judge, key, f"--out={tmp_path}/out"]])
    assert done.code == 0, done.err
    assert "judge.api_key_file=/run/secrets/judge must be in --actor_image" in done.out


@pytest.mark.heavy
def test_command_that_lacks_something_is_one_line_code_2_and_nothing_written(tmp_path):
    out = f"--out={tmp_path}/out"
    lines = [
        ["--target=kubernetes", *FIELDS],
        [out, *FIELDS],
        [out, *FLAGS],
        [out, *FIELDS, *FLAGS[:-1]],
        [out, *FIELDS[:-1], *FLAGS],
        [out, *FIELDS, *FLAGS, "--config.no.field=1"],
        [out, *FIELDS, *FLAGS, "--target=helm"],
    ]
    for done in call_each("launch.tools.deploy.__main__", lines):
        assert done.code == 2
        assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.heavy
def test_commands_of_the_page_render_what_it_says_and_leave_other_files(tmp_path):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "mine").write_text("kept")
    lines = [[re.sub("^--out=.*", f"--out={tmp_path}/{i}", a) for a in line] for i, line in enumerate(written())]
    assert [done.err for done in call_each("launch.tools.deploy.__main__", lines) if done.code] == []
    kinds = [
        {o["kind"] for f in d.glob("*.yaml") for o in yaml.safe_load_all(f.read_text())}
        for d in map(tmp_path.joinpath, "01")
    ]
    assert "JobSet" in kinds[0] and "Deployment" in kinds[0]
    assert "Job" in kinds[1] and "JobSet" not in kinds[1]
    assert len(lines) == 3
    assert os.access(tmp_path / "2" / "submit.sh", os.X_OK)
    assert (tmp_path / "0" / "run.yaml").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "2" / "mine").read_text() == "kept"


@pytest.mark.heavy
@pytest.mark.parametrize("secret", ["postgresql://learner:hunter2hunter2@db.example/sluice?sslmode=verify-full"])
def test_password_in_the_url_is_refused_and_not_said(secret, tmp_path):
    line = [f"--out={tmp_path}/out", *[f for f in FIELDS if "store" not in f], f"--config.store.url={secret}", *FLAGS]
    (done,) = call_each("launch.tools.deploy.__main__", [line])
    assert done.code == 2 and "hunter2" not in done.err + done.out
