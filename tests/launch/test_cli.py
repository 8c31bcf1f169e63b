import dataclasses
import errno
import json
import pathlib
import shutil
import sqlite3
from collections.abc import Mapping

import pytest
from absl import flags
from absl.testing import flagsaver

from bridge.liveness import read_phase
from bridge.store.sqlite_database import StoreBusyError
from configs import overrides
from configs.run_folder import run_id, snapshot_folder
from configs.schema import Config
from launch import cli
from launch.startup import preflight, prepare_run
from tests.integration.support.processes import python
from tests.learner.model_folder import make_model_folder

PROJECT = pathlib.Path(overrides.__file__).parent.parent
TINY = "tiny"


@pytest.fixture
def model(tmp_path):
    return make_model_folder(tmp_path / "model")


@pytest.fixture
def prepare(tmp_path, model, monkeypatch):
    """`prepare()` under some flags and overrides, with a model that needs not be made."""

    def call(
        config: str | None = TINY, run_dir: str | None = None, forced: Mapping[str, str] | None = None, **given: str
    ):
        paths = {k.replace("__", "."): v for k, v in given.items()}
        if config:
            paths = {"model.path": str(model), "evaluation.num_problems": "5"} | paths
        monkeypatch.setattr(cli, "_overrides", paths)
        with flagsaver.flagsaver(config=config, run_dir=run_dir):
            return prepare_run.prepare_run(("learner", "actor"), forced=forced or {})

    flags.FLAGS.mark_as_parsed()
    yield call
    flags.FLAGS.unparse_flags()


def test_prepare_sets_the_run_folder_up(prepare, tmp_path, model):
    got = prepare(run__dir=str(tmp_path / "run"), run__seed="7")
    assert (got.folder, got.model_folder) == (tmp_path / "run", model)
    assert (got.config.preset, got.config.run.seed) == ("tiny", 7)
    assert overrides.from_dict(json.loads((tmp_path / "run" / "config.json").read_text())) == got.config
    assert prepare_run.open_prepared(str(tmp_path / "run")) == got


def test_prepare_run_dir_is_short_for_the_override(prepare, tmp_path):
    assert prepare(run_dir=str(tmp_path / "run")).config.run.dir == str(tmp_path / "run")


def test_prepare_with_forced_fields_leaves_what_the_command_line_names(prepare, tmp_path):
    forced = {"run.dir": str(tmp_path / "forced"), "store.url": ""}
    got = prepare(forced=forced, run__dir=str(tmp_path / "run"), store__url="postgresql://learner@db.example/sluice")
    assert (got.folder, got.config.store.url) == (tmp_path / "forced", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
def test_prepare_run_dir_alone_reads_the_folder(prepare, tmp_path):
    first = prepare(run_dir=str(tmp_path / "run"), run__seed="3")
    assert prepare(None, run_dir=str(tmp_path / "run")) == first


@pytest.mark.heavy
def test_prepare_looks_for_room_also_with_the_run_dir_alone(prepare, tmp_path, model, monkeypatch):
    (model / "model.safetensors").write_bytes(bytes(1000))
    run_dir = str(tmp_path / "run")
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    prepare(run_dir=run_dir, publish__snapshot_dir=str(snapshots))
    num_free = {tmp_path / "run": 10**9, snapshots: 10**9}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, num_free[path]))
    prepare(None, run_dir=run_dir)
    num_free[snapshots] = 1000
    with pytest.raises(ValueError, match="set publish.snapshot_dir to a larger filesystem"):
        prepare(None, run_dir=run_dir)
    num_free |= {snapshots: 10**9, tmp_path / "run": 1000, tmp_path: 1000}
    with pytest.raises(ValueError, match="more checkpoints"):
        prepare(None, run_dir=run_dir)
    with pytest.raises(ValueError, match="more checkpoints"):
        prepare(run_dir=str(tmp_path / "new"), publish__snapshot_dir=str(snapshots))
    assert not (tmp_path / "new").exists()


def test_prepare_model_folder_that_is_refused_leaves_no_run_folder(prepare, tmp_path, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing weights"):
        prepare(run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(config=None), "--config: not set"),
        (dict(config="configs/none.py"), "no preset, recipe or file 'configs/none.py'"),
        (dict(config=None, run_dir="somewhere", run__seed="1"), "overrides need --config"),
        (dict(run__sead="1"), "did you mean 'run.seed'"),
    ],
)
def test_prepare_unusable_arguments_are_refused(prepare, arguments, said):
    with pytest.raises(ValueError, match=said):
        prepare(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lr=1e-4"], "did you mean --config.optimizer.learning_rate=1e-4?"),
        (["--num_generations", "8"], "did you mean --config.rounds.samples_per_group=VALUE?"),
        (["optimizer.learning_rate=1e-4"], "did you mean --config.optimizer.learning_rate=1e-4?"),
        (["actor_rollout_ref.rollout.n=8"], "did you mean --config.rounds.samples_per_group=8?"),
        (["--zzz=1"], "Unknown command line flag 'zzz'\n"),
        (["stray"], "unexpected argument 'stray'\n"),
    ],
)
def test_parse_flag_of_another_project_names_our_field(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.parse(["launch.local", *arguments])
    assert ended.value.code == cli.USAGE_ERROR and said in capsys.readouterr().err


def test_parse_repeated_field_takes_the_last_value_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_overrides", {})
    cli.parse(["launch.local", "--config.run.seed=1", "--config.run.seed=2"])
    assert cli.given_overrides() == {"run.seed": "2"}
    assert capsys.readouterr().err == "--config.run.seed is set several times; using '2'\n"


def test_parse_takes_flags_and_overrides_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_overrides", {})
    file = tmp_path / "cluster.flags"
    file.write_text("--config.actor.num_engines=32\n# a comment\n--config.run.name=a b\n")
    try:
        cli.parse(["launch.local", f"--flagfile={file}", "--config.run.seed=1"])
        assert cli.given_overrides() == {"actor.num_engines": "32", "run.name": "a b", "run.seed": "1"}
    finally:
        flags.FLAGS.unparse_flags()


def test_overrides_of_a_run_folder_are_refused_also_where_nothing_starts(prepare, tmp_path, monkeypatch):
    prepare(run__dir=str(tmp_path / "run"))
    monkeypatch.setattr(cli, "_overrides", {"run.num_updates": "3"})
    with flagsaver.flagsaver(config=None, run_dir=str(tmp_path / "run")), pytest.raises(ValueError, match="is fixed"):
        prepare_run.config()


def test_printed_config_of_a_file_with_a_label_of_its_own_is_read_back(tmp_path, monkeypatch, capsys):
    own = tmp_path / "mine.toml"
    own.write_text("[run]\nseed = 5\n")
    monkeypatch.setattr(cli, "_overrides", {})
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(config=str(own), print_config=True), pytest.raises(SystemExit):
        prepare_run.config()
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    printed, given = (overrides.load_preset(str(tmp_path / name)) for name in ("printed.toml", "mine.toml"))
    assert printed == dataclasses.replace(given, preset="printed") and printed.run.seed == 5


def test_print_config_prints_the_given_config_and_starts_nothing(prepare, tmp_path, capsys):
    with flagsaver.flagsaver(print_config=True), pytest.raises(SystemExit) as ended:
        prepare(run_dir=str(tmp_path / "run"), run__seed="7")
    assert ended.value.code == 0 and not (tmp_path / "run").exists()
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert overrides.load_preset(str(tmp_path / "printed.toml")).run.seed == 7


def test_prepare_another_config_in_the_folder_is_refused(prepare, tmp_path):
    prepare(run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="run.seed was 0, now 5"):
        prepare(run_dir=str(tmp_path / "run"), run__seed="5")


def test_open_prepared_moved_folder_is_the_run_where_it_is_now(prepare, tmp_path):
    first = prepare(run_dir=str(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    got = prepare_run.open_prepared(str(tmp_path / "there"))
    assert got.config.run_dir == str(tmp_path / "there")
    assert dataclasses.replace(got.config, run=first.config.run) == first.config
    assert snapshot_folder(got.config).name.endswith(run_id(tmp_path / "there"))


@pytest.mark.parametrize("gone", ["config.json", "model_path.txt"])
def test_open_prepared_folder_that_was_not_set_up_is_refused(prepare, tmp_path, gone):
    prepare(run_dir=str(tmp_path / "run"))
    (tmp_path / "run" / gone).unlink()
    with pytest.raises(ValueError, match=f"expected a run folder, but {gone} is missing"):
        prepare_run.open_prepared(str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("text", "said"), [("{torn", "config.json: "), ('{"preset": "x", "rnu": 1}', "no field 'rnu'")]
)
def test_open_prepared_unreadable_config_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model_path.txt").write_text("m\n")
    with pytest.raises(ValueError, match=said):
        prepare_run.open_prepared(str(tmp_path))


def test_usage_errors_are_one_line_and_exit_code_two(capsys):
    with pytest.raises(SystemExit) as e, cli.usage_errors():
        overrides.apply(Config(preset="test"), {"run.seed": "x"})
    assert e.value.code == cli.USAGE_ERROR == 2
    assert capsys.readouterr().err == "error: --config.run.seed: expected int, got 'x'\n"


def test_usage_errors_what_another_process_holds_is_one_line_and_a_code_of_its_own(capsys):
    with pytest.raises(SystemExit) as e, cli.usage_errors():
        raise StoreBusyError("store.sqlite stayed locked for 120 s")
    assert e.value.code == cli.BUSY == 4
    assert capsys.readouterr().err == "error: store.sqlite stayed locked for 120 s\n"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (OSError(errno.EIO, "Input/output error", "run/checkpoints/7"), 4, "run/checkpoints/7: Input/output error; "),
        (OSError(errno.ESTALE, "Stale file handle", "run/run_id"), 4, "run/run_id: Stale file handle; fix the cause"),
        (OSError(errno.ENOSPC, "No space left on device", "loss.json"), 4, "loss.json: No space left on device; fix"),
        (OSError(errno.ECONNREFUSED, "Connection refused"), 4, "Connection refused; fix the cause"),
        (sqlite3.OperationalError("disk I/O error"), 4, "disk I/O error; fix the cause"),
        (OSError(errno.ETIMEDOUT, "Connection timed out", "nfs/model"), 4, "nfs/model: Connection timed out"),
        (OSError(errno.ENOENT, "No such file or directory", "model"), 2, "model: No such file or directory"),
        (ValueError("no such prompts"), 2, "no such prompts"),
    ],
)
def test_start_errors_only_what_was_given_wrong_is_not_started_again(capsys, raised, code, said):
    with pytest.raises(SystemExit) as e, cli.start_errors():
        raise raised
    assert e.value.code == code == cli.start_code(raised)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_start_errors_bugs_keep_their_traceback():
    with pytest.raises(TypeError) as e, cli.start_errors():
        raise TypeError("a bug")
    assert cli.start_code(e.value) == 1


def test_usage_errors_bugs_keep_their_traceback():
    with pytest.raises(TypeError), cli.usage_errors():
        raise TypeError("a bug")


PROGRAM = """
from launch import cli
from launch.startup import prepare_run
def main():
    with cli.usage_errors():
        prepared = prepare_run.prepare_run(("learner", "actor"))
    print(prepared.config.run.seed, prepared.config.prompts.task_args["max_terms"])
    return cli.STOPPED
cli.run(main)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--config.run.seed=4", "--config.prompts.task_args.max_terms=3"], 3, "4 3\n", ""),
        (["--config.run.seed"], 2, "", "error: --config.run.seed: expected a value. Use"),
        (["stray"], 2, "", "error: unexpected argument 'stray'\n"),
    ],
)
def test_run_takes_overrides_and_returns_mains_code(tmp_path, model, arguments, code, out, err):
    given = [f"--config={TINY}", f"--run_dir={tmp_path / 'run'}", f"--config.model.path={model}"]
    done = python("-c", PROGRAM, *given, "--config.evaluation.num_problems=5", *arguments)
    lines = [line for line in done.stdout.splitlines(keepends=True) if not line.startswith("warning: admission.width")]
    said = "".join(line for line in lines if read_phase(line) is None)
    assert (done.returncode, said) == (code, out), done.stderr
    assert err in done.stderr and "Traceback" not in done.stderr
