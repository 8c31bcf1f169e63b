import contextlib
import dataclasses
import errno
import json
import pathlib
import re
import shutil
from typing import Any

import pytest

from bridge.files import RunLock
from configs import overrides, run_folder
from configs.run_folder import (
    RunFolder,
    check_run_folder,
    run_id,
    set_up_run,
    settle_run_id,
    snapshot_folder,
    with_template_date,
)
from configs.schema import Config
from configs.sections import (
    ActorConfig,
    CheckpointConfig,
    PromptsConfig,
    PublishConfig,
    RunConfig,
    StoreConfig,
    SupervisionConfig,
)

REPO = pathlib.Path(overrides.__file__).parents[1]
PATHS = {
    "config_file": "config.json",
    "run_id_file": "run_id",
    "home_file": "run_home",
    "model_path_file": "model_path.txt",
    "store": "store.sqlite",
    "learner_lock": "learner.lock",
    "supervisor_lock": "supervisor.lock",
    "samples": "samples.jsonl",
    "report": "report.html",
    "checkpoints": "checkpoints",
    "compiled": "compiled",
    "metrics": "metrics.jsonl",
    "evaluated": "evaluated",
    "abandoned_metrics": "metrics.abandoned.jsonl",
    "tensorboard": "tensorboard",
    "events": "events",
    "trace": "trace.json",
    "quarantine": "quarantine.jsonl",
    "gold_failures": "gold_failures.json",
    "loss_constants": "loss.json",
    "provenance": "provenance.jsonl",
    "summary": "summary.json",
}
"""What run folders made so far have in them."""


def test_run_folder_names_stay_as_folders_made_so_far_have_them():
    run = RunFolder(pathlib.Path("r"))
    assert {name: str(file.relative_to("r")) for name, file in vars(run).items() if name != "path"} == PATHS
    methods = (run.log("learner"), run.limits("actor-0"), run.model(8))
    assert [str(p) for p in methods] == ["r/logs/learner.log", "r/limits/actor-0.json", "r/model-8"]


def test_run_folder_names_are_written_nowhere_else():
    names = "|".join({*PATHS.values(), "logs", "limits"} - {"config.json"})  # a model folder has a config.json too
    joined = re.compile(f'/ "({names})"|/ f"(model-|limits/|logs/)')
    files = [f for p in ("actor", "bridge", "configs", "launch", "learner") for f in (REPO / p).rglob("*.py")]
    assert [f.name for f in files if joined.search(f.read_text())] == ["run_folder.py"]


def in_folder(folder: pathlib.Path, **fields: Any) -> Config:
    return Config(preset="test", run=RunConfig(dir=str(folder), **fields))


def test_open_run_writes_the_config_and_opens_again(tmp_path):
    config = in_folder(tmp_path / "a" / "run")
    folder = set_up_run(config)
    assert overrides.from_dict(json.loads((folder / "config.json").read_text())) == with_template_date(config)
    first_id = run_id(folder)
    assert set_up_run(config) == folder
    assert run_id(folder) == first_id
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_open_run_keeps_the_date_of_its_prompts_and_refuses_another(tmp_path, monkeypatch):
    def set_up(day, date=""):
        monkeypatch.setattr("configs.run_folder.today", lambda: day)
        config = in_folder(tmp_path / "run")
        set_up_run(dataclasses.replace(config, prompts=PromptsConfig(template_date=date)))
        return json.loads((tmp_path / "run" / "config.json").read_text())["prompts"]["template_date"]

    assert set_up("2026-01-31") == "2026-01-31"
    assert set_up("2026-02-01") == "2026-01-31"  # begun again after midnight
    with pytest.raises(ValueError, match=r"prompts.template_date was '2026-01-31', now '2025-12-24'"):
        set_up("2026-02-01", "2025-12-24")
    file = tmp_path / "run" / "config.json"
    old = json.loads(file.read_text())
    del old["prompts"]["template_date"]  # of an older build
    file.write_text(json.dumps(old))
    assert set_up("2026-02-02") == "2026-02-02"


def test_open_run_longer_is_accepted_and_recorded(tmp_path):
    set_up_run(in_folder(tmp_path / "run"))
    set_up_run(in_folder(tmp_path / "run", num_updates=200))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run"]["num_updates"] == 200


def test_run_that_a_supervisor_holds_keeps_its_config(tmp_path):
    folder = RunFolder(set_up_run(in_folder(tmp_path / "run")))
    held = RunLock(folder.supervisor_lock, "launch.local")
    before = folder.config_file.read_text()
    with pytest.raises(ValueError, match="locked by a running launch.local"):
        set_up_run(in_folder(tmp_path / "run", num_updates=200))
    assert folder.config_file.read_text() == before
    held.release()
    set_up_run(in_folder(tmp_path / "run", num_updates=200))


def test_open_run_with_other_bounds_on_hangs_is_accepted_also_where_an_older_build_knew_none(tmp_path):
    config = in_folder(tmp_path / "run")
    set_up_run(config)
    set_up_run(dataclasses.replace(config, supervision=SupervisionConfig(heartbeat_timeout_s=90)))
    file = tmp_path / "run" / "config.json"
    old = json.loads(file.read_text())
    del old["supervision"]
    file.write_text(json.dumps(old))
    set_up_run(config)


def test_open_run_with_other_ways_to_other_machines_is_accepted_also_where_an_older_build_knew_none(tmp_path):
    config = in_folder(tmp_path / "run")
    set_up_run(config)
    network = dataclasses.replace(
        config,
        publish=PublishConfig(serve="https", advertise="https://learner:8443", bucket="s3://weights", full_every=8),
        actor=ActorConfig(shutdown_grace_s=3),
    )
    set_up_run(network)
    file = tmp_path / "run" / "config.json"
    old = json.loads(file.read_text())
    del old["store"], old["actor"]["shutdown_grace_s"], old["publish"]["serve"]
    file.write_text(json.dumps(old))
    set_up_run(config)


FIRST = "postgresql://learner@db.example/sluice?sslmode=verify-full"


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (FIRST, "postgresql://other@10.0.0.5:5433/sluice", True),
        (FIRST, "postgres://learner@db.example/sluice", True),
        (FIRST, "postgresql://learner@db.example/another", False),
        (FIRST, "", False),
        ("", FIRST, False),
        ("", "sqlite:///other.sqlite", False),
        ("sqlite:////a/store.sqlite", "sqlite:////a/store.sqlite", True),
    ],
)
def test_open_run_on_another_host_of_its_store_is_accepted_and_on_another_store_refused(tmp_path, before, now, is_same):
    config = in_folder(tmp_path / "run")
    set_up_run(dataclasses.replace(config, store=StoreConfig(url=before)))
    refused = contextlib.nullcontext() if is_same else pytest.raises(ValueError, match=r"store.url was ")
    with refused:
        set_up_run(dataclasses.replace(config, store=StoreConfig(url=now)))


def test_open_run_empty_run_id_is_made_anew(tmp_path):
    config = in_folder(tmp_path / "run")
    set_up_run(config)
    (tmp_path / "run" / "run_id").write_text("")  # the machine lost its power before it was on disk
    set_up_run(config)
    assert run_id(tmp_path / "run")


@pytest.mark.parametrize("below", ["file/run", "file/a/b/run"])
def test_set_up_run_below_a_file_is_refused_with_the_path(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run folder .*: cannot create or write it: Not a directory .*/file"):
        set_up_run(in_folder(tmp_path / below))


@pytest.mark.parametrize(("is_set_up", "error"), [(False, ValueError), (True, OSError)])
def test_set_up_run_a_folder_that_was_set_up_before_may_be_written_again(tmp_path, monkeypatch, is_set_up, error):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "config.json")

    set_up_run(in_folder(tmp_path / "run"))
    if is_set_up:
        (tmp_path / "run" / "model_path.txt").write_text("model\n")
    monkeypatch.setattr(run_folder, "replace_file", full)
    with pytest.raises(error, match=r"cannot create or write it: No space left on device \(config.json\)"):
        set_up_run(in_folder(tmp_path / "run"))


def test_open_run_moved_folder_is_accepted(tmp_path):
    set_up_run(in_folder(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    set_up_run(in_folder(tmp_path / "there"))


def test_open_run_another_config_is_refused_naming_the_fields(tmp_path):
    old = in_folder(tmp_path / "run")
    set_up_run(old)
    before = (tmp_path / "run" / "config.json").read_bytes()
    other = dataclasses.replace(old, prompts=PromptsConfig(task="spell_backward"), preset="other")
    with pytest.raises(ValueError) as e:
        set_up_run(other)
    assert "prompts.task was 'chain_sum', now 'spell_backward'" in str(e.value)
    assert "preset was 'test', now 'other'" in str(e.value)
    assert "run." not in str(e.value).replace("config.run.dir", "")
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_open_run_with_other_engine_memory_and_checkpoints_is_accepted(tmp_path):
    config = in_folder(tmp_path / "run")
    set_up_run(config)
    actor = dataclasses.replace(config.actor, gpu_memory_utilization=0.5, kv_cache_gib=2, max_restarts=9)
    publish = dataclasses.replace(config.publish, snapshot_dir=str(tmp_path / "shm"))
    checkpoint = CheckpointConfig(every_n_steps=7, keep=3)
    check_run_folder(dataclasses.replace(config, actor=actor, checkpoint=checkpoint, publish=publish))


def test_open_run_begun_before_a_field_existed_has_its_default(tmp_path):
    config = in_folder(tmp_path / "run")
    set_up_run(config)
    file = RunFolder(tmp_path / "run").config_file
    old = json.loads(file.read_text())
    del old["loss"]["teacher_top_k"]
    file.write_text(json.dumps(old))
    check_run_folder(config)
    other = dataclasses.replace(config, prompts=PromptsConfig(task="spell_backward"))
    with pytest.raises(ValueError, match="another config: prompts.task was 'chain_sum', now 'spell_backward'. Choose"):
        check_run_folder(other)


def test_check_run_folder_with_other_files_is_refused_untouched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="got files without config.json"):
        check_run_folder(in_folder(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["{torn", "[]"])
def test_check_run_folder_with_an_unreadable_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="Choose another --config.run.dir"):
        check_run_folder(in_folder(tmp_path))


def test_check_run_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="got a file"):
        check_run_folder(in_folder(tmp_path / "run"))


def test_check_run_folder_new_or_empty_is_accepted_and_not_made(tmp_path):
    check_run_folder(in_folder(tmp_path))
    check_run_folder(in_folder(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_snapshot_folder_two_runs_of_one_name_do_not_share_it(tmp_path):
    folders = set()
    for name in ("a", "b"):
        config = in_folder(tmp_path / name)
        set_up_run(config)
        folders.add(snapshot_folder(config))
    assert len(folders) == 2


def folders(tmp_path, **store) -> Config:
    """A run in tmp_path/a, and tmp_path/b as its copy."""
    config = Config(preset="t", run=RunConfig(dir=str(tmp_path / "a")), store=StoreConfig(**store))
    set_up_run(config)
    assert settle_run_id(config) == []
    (tmp_path / "a" / "trackers").mkdir()
    (tmp_path / "a" / "trackers" / "wandb.json").write_text("{}")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return config


def moved_to(config: Config, folder) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))


def test_copy_of_a_run_is_a_run_of_its_own(tmp_path):
    original = folders(tmp_path)
    copy, id_ = moved_to(original, tmp_path / "b"), run_id(tmp_path / "a")
    (note,) = settle_run_id(copy)
    assert f"is a copy of the run folder {tmp_path / 'a'}" in note
    assert settle_run_id(copy) == settle_run_id(original) == []  # said once
    assert run_id(tmp_path / "a") == id_ != run_id(tmp_path / "b")
    assert snapshot_folder(copy) != snapshot_folder(original)
    assert (tmp_path / "a/trackers/wandb.json").exists() and not (tmp_path / "b/trackers/wandb.json").exists()


def test_copy_of_a_copy_is_a_run_of_its_own(tmp_path):
    config = folders(tmp_path)
    settle_run_id(moved_to(config, tmp_path / "b"))
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    assert len(settle_run_id(moved_to(config, tmp_path / "c"))) == 1
    assert len({run_id(tmp_path / name) for name in "abc"}) == 3


@pytest.mark.parametrize("how", ["moved", "original removed", "linked"])
def test_run_that_is_no_copy_keeps_its_id(tmp_path, how):
    config = folders(tmp_path)
    id_ = run_id(tmp_path / "a")
    if how == "moved":
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "a").rename(tmp_path / "b")
    elif how == "original removed":
        shutil.rmtree(tmp_path / "a")
    else:
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
    assert settle_run_id(moved_to(config, tmp_path / "b")) == [] and run_id(tmp_path / "b") == id_


def test_run_of_an_older_version_keeps_its_id(tmp_path):
    config = folders(tmp_path)
    (tmp_path / "a" / "run_home").unlink()
    id_ = run_id(tmp_path / "a")
    assert settle_run_id(config) == [] and run_id(tmp_path / "a") == id_
    assert (tmp_path / "a" / "run_home").read_text() == f"{tmp_path / 'a'}\n"


def test_copy_whose_groups_are_in_a_shared_store_is_refused(tmp_path):
    original = folders(tmp_path, url="postgresql://learner@db/sluice?sslmode=verify-full")
    with pytest.raises(ValueError, match="is a copy of the run folder"):
        settle_run_id(moved_to(original, tmp_path / "b"))
    assert run_id(tmp_path / "a") == run_id(tmp_path / "b")
