"""Whatever `launch.local` can't start with is one line on stderr and exit code 2, and nothing is left behind."""

import ctypes
import os
import pathlib
import resource
import subprocess
import sys

import pytest

from configs import overrides
from configs.run_folder import set_up_run
from configs.schema import Config
from tests.integration.support.processes import REPO
from tests.launch.commands import Done, call_each
from tests.learner.model_folder import make_model_folder

TINY = "--config=tiny"
PRESETS = {
    "name.py": ("x = 1\nconfig = Confg()\n", "name.py:2: NameError: name 'Confg' is not defined"),
    "many.py": ("raise ValueError('one\\ntwo')\n", "many.py:1: ValueError: one; two"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with a usable model, a file, and some presets and run folders that can't be used."""
    place = tmp_path_factory.mktemp("bad")
    make_model_folder(place / "model")
    (place / "file").write_text("")
    for name, (text, _) in PRESETS.items():
        (place / name).write_text(text)
    (place / "list").mkdir()
    (place / "list" / "config.json").write_text("[]")
    (place / "list" / "model_path.txt").write_text("m\n")
    (place / "binary").mkdir()
    (place / "binary" / "config.json").write_bytes(b"\xff\xfe")
    return place


CASES = {
    **{name: ([f"--config={{place}}/{name}"], said) for name, (_, said) in PRESETS.items()},
    "preset is a folder": ([f"--config={REPO}/configs"], "no preset, recipe or file "),
    "preset is no Python": (["--config={place}/file"], "expected a Python file"),
    "preset is empty": (["--config="], "no preset, recipe or file ''"),
    "run folder below a file": (
        [TINY, "--config.run.dir={place}/file/a/b"],
        "{place}/file is not a folder; set another",
    ),
    "run folder is a file": (
        [TINY, "--config.run.dir={place}/file"],
        "{place}/file: expected a folder, got a file. Choose another",
    ),
    "run folder nobody can make": ([TINY, "--config.run.dir=/proc/sluice/run"], "/proc is not writable: "),
    "run folder with too long a name": ([TINY, f"--config.run.dir={{place}}/{'x' * 300}"], ": File name too long"),
    "run folder with no text": ([TINY, "--config.run.dir={place}/binary"], "config.json: expected JSON"),
    "run folder of others": (
        [TINY, "--config.run.dir={place}/model"],
        "expected JSON|holds a run of another|expected a run folder",
    ),
    "two run folders": ([TINY, "--run_dir={place}/new/run", "--config.run.dir={place}/other"], "give one of them"),
    "run folder is a file, continued": (["--run_dir={place}/file"], "expected a run folder"),
    "run folder with a list": (["--run_dir={place}/list"], "config.json: expected a JSON object, got list"),
    "run folder whose model is gone": (["--run_dir={place}/orphaned"], "model.path: no model folder '{place}/gone'"),
    "snapshots below a file": ([TINY, "--config.publish.snapshot_dir={place}/file/s"], "{place}/file is not a folder"),
    "snapshots nobody can make": ([TINY, "--config.publish.snapshot_dir=/proc/s"], "/proc is not writable"),
    "prompts are a folder": (
        [TINY, "--config.prompts.path={place}", "--config.prompts.verifier=exact"],
        "no prompts file",
    ),
    "model is a file": ([TINY, "--config.model.path={place}/file"], "model.path: no model folder '{place}/file'"),
    "reference is nowhere": (
        [TINY, "--config.loss.kl_coef=0.1", "--config.loss.reference_path={place}/gone"],
        "loss.reference_path: no model folder '{place}/gone'",
    ),
}


@pytest.fixture(scope="module")
def done(place) -> dict[str, Done]:
    """How each of `CASES` ended; all in one process."""
    (place / "orphaned").mkdir()
    (place / "orphaned" / "config.json").write_text(overrides.to_json(Config(preset="test")))
    (place / "orphaned" / "model_path.txt").write_text(f"{place}/gone\n")
    lines = [[a.format(place=place) for a in arguments] for arguments, _ in CASES.values()]
    usable = [f"--config.model.path={place}/model", "--config.evaluation.num_problems=5"]
    given = {"--config.model.path", "--run_dir"}
    lines = [
        line
        + [u for u in usable if not given & {a.partition("=")[0] for a in line}]
        + ([] if any("run" in a.partition("=")[0] for a in line) else [f"--config.run.dir={place}/new/run"])
        for line in lines
    ]
    return dict(zip(CASES, call_each("launch.local", lines), strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("case", list(CASES))
def test_unusable_input_is_one_line_and_exit_code_two(done, place, case):
    got, said = done[case], CASES[case][1].format(place=place)
    (line,) = got.err.splitlines()
    assert line.startswith("error: ") and any(one in line for one in said.split("|")), line
    assert got.code == 2
    assert not (place / "new").exists()


def local(*arguments: object, preexec_fn=None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launch.local", TINY, *map(str, arguments)],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)} | env,
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
    )


def usable(place: pathlib.Path, run: pathlib.Path, *more: str) -> list[str]:
    return [
        f"--config.model.path={place}/model",
        "--config.evaluation.num_problems=5",
        f"--config.run.dir={run}",
        *more,
    ]


def check_refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line, line
    assert done.returncode == 2


@pytest.mark.heavy
def test_cache_that_can_not_be_made_is_refused(place):
    done = local(f"--config.run.dir={place}/new/run", SLUICE_CACHE=str(place / "file" / "cache"))
    check_refused(done, f"{place}/file/cache: Not a directory")


@pytest.mark.heavy
def test_disk_that_takes_no_byte_is_refused_before_anything_is_made(place):
    done = local(
        *usable(place, place / "new" / "run"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
    )
    check_refused(done, f"{place} is not writable: File too large; set another --config.run.dir")
    assert not (place / "new").exists()


@pytest.mark.heavy
def test_lock_that_can_not_be_opened_is_refused(place, tmp_path):
    run = tmp_path / "run"
    config = overrides.apply(
        overrides.load_preset("tiny"),
        {"model.path": f"{place}/model", "evaluation.num_problems": "5", "run.dir": str(run)},
    )
    (set_up_run(config) / "supervisor.lock").mkdir()
    check_refused(local(*usable(place, run)), "supervisor.lock: Is a directory")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(folder).encode(), b"tmpfs", 0, b"size=256k"):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(str(folder).encode(), 2)


@pytest.mark.heavy
@pytest.mark.parametrize("field", ["run.dir", "publish.snapshot_dir"])
def test_full_disk_and_full_shared_memory_are_refused(place, tmp_path, small_disk, field):
    with open(small_disk / "full", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    fields = {"run.dir": tmp_path / "run", "publish.snapshot_dir": tmp_path} | {field: small_disk / "new"}
    done = local(*usable(place, fields["run.dir"], f"--config.publish.snapshot_dir={fields['publish.snapshot_dir']}"))
    check_refused(done, f"{small_disk} is not writable: No space left on device; set another")
