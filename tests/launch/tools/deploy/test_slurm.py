"""Rendered jobs: read by bash and shellcheck, and run with Slurm's commands and Python stood in for."""

import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest

from launch.tools.deploy import slurm
from tests.launch.tools.deploy.cases import gpus_alone, one_node
from tests.launch.tools.deploy.command_lines import parse
from tests.launch.tools.deploy.fake_slurm import FakeSlurm

SHELLCHECK = pathlib.Path(sys.executable).with_name("shellcheck")
CASES = {"gpus-alone": lambda: gpus_alone("slurm"), "one-node": lambda: one_node("slurm")}


def write(folder, case):
    for name, text in slurm.render(CASES[case]()).items():
        (folder / name).write_text(text)
    return sorted(f.name for f in folder.iterdir() if f.name != "config.json")


@pytest.mark.parametrize("case", CASES)
def test_rendered_scripts_pass_bash_and_shellcheck(case, tmp_path):
    scripts = write(tmp_path, case)
    for script in scripts:
        subprocess.run(["bash", "-n", script], cwd=tmp_path, check=True)
    done = subprocess.run([SHELLCHECK, "-x", "-P", ".", *scripts], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck_sees_a_script_that_is_wrong(tmp_path):
    scripts = write(tmp_path, "gpus-alone")
    with open(tmp_path / "actors.sbatch", "a") as file:
        file.write('rm -rf $work_dir/"$nobody"\n')
    done = subprocess.run([SHELLCHECK, "-x", "-P", ".", *scripts], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0


def headers(text):
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)


def test_headers_ask_for_whole_hosts_for_the_learner_and_an_array_of_actors():
    files = slurm.render(gpus_alone("slurm"))
    learner, actors = headers(files["learner.sbatch"]), headers(files["actors.sbatch"])
    assert (learner["nodes"], learner["ntasks-per-node"], learner["gpus-per-node"]) == ("2", "1", "8")
    assert (actors["array"], actors["nodes"], actors["gpus-per-node"]) == ("0-7", "1", "2")
    assert "requeue" in learner and "requeue" in actors
    assert learner["dependency"] == "singleton" and "dependency" not in actors
    told_s = {role: int(h["signal"].removeprefix("B:USR1@")) for role, h in (("learner", learner), ("actor", actors))}
    assert told_s["learner"] > gpus_alone("slurm").learner_grace_s
    assert told_s["actor"] > gpus_alone("slurm").actor_grace_s


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ((), {"cpus-per-task": "190", "mem": "2336G", "gpus-per-node": "8"}),
        (("cpus-per-task=96", "mem=0"), {"cpus-per-task": "96", "mem": "0", "gpus-per-node": "8"}),
        (("mem-per-gpu=100G", "cpus-per-gpu=8"), {"mem-per-gpu": "100G", "cpus-per-gpu": "8", "gpus-per-node": "8"}),
        (("gres=gpu:h200:8",), {"cpus-per-task": "190", "mem": "2336G", "gres": "gpu:h200:8"}),
    ],
)
def test_options_of_the_user_stand_in_place_of_what_a_clouds_host_has(options, wanted):
    text = slurm.render(gpus_alone("slurm", learner_options=options))["learner.sbatch"]
    asked = {n: v for n, v in headers(text).items() if n.startswith(("cpus-", "mem", "gpus", "gres"))}
    assert asked == wanted and text.count("#SBATCH") == len(headers(text))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-12", 216000), ("2-12:30", 217800), ("1-0:0:1", 86401)),
        *(("0", math.inf), ("UNLIMITED", math.inf)),
    ],
)
def test_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    assert slurm.time_limit_s(text) == seconds


def test_time_limit_that_is_over_at_once_is_refused():
    with pytest.raises(ValueError, match=r"--time=10:00: .*-learner needs more than 660 s"):
        slurm.render(gpus_alone("slurm", time="10:00", grace_s=600))
    with pytest.raises(ValueError, match=r"--time=11:30: .*-node needs more than 720 s"):
        slurm.render(one_node("slurm", time="11:30", grace_s=600))
    slurm.render(one_node("slurm", time="12:30", grace_s=600))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("case", "function"),
    [("gpus-alone", "learner_command"), ("gpus-alone", "actor_command"), ("one-node", "node_command")],
)
def test_rendered_commands_are_ones_that_the_programs_take(case, function, tmp_path):
    write(tmp_path, case)
    variables = "here=/h coordinator=a:1 index=0 name=actor-3 work_dir='/t m p'"
    shown = subprocess.run(
        ["bash", "-uc", f"{variables}; . ./settings.sh; {function}; printf '%s\\0' \"${{command[@]}}\""],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")[:-1]
    assert shown[0] == "/shared/sluice/.venv/bin/python"
    given = parse(shown[1:])
    assert given == ({"publish.advertise": "https://{host}:8443"} if function == "learner_command" else {})
    if function == "actor_command":
        assert "--work_dir=/t m p" in shown


@pytest.mark.parametrize(
    "text", ["plain", "a b", "$(name)/x", "it's $(name)", "a;rm -rf $HOME", "", "`id`", "$(name)$(name)"]
)
def test_word_is_one_word_with_its_variables_and_nothing_else_taken_in(text):
    said = subprocess.run(
        ["bash", "-uc", f"name='v 1'; printf '%s|' {slurm.word(text)}"], capture_output=True, text=True, check=True
    ).stdout
    assert said == text.replace("$(name)", "v 1") + "|"


def end_of(tmp_path, job, script, *events, is_finished=False):
    """The fake Slurm of a job, its exit code and its output; the events come once all its processes wait."""
    deployment = one_node("slurm") if job == "node" else gpus_alone("slurm")
    slurm = FakeSlurm(tmp_path / "slurm", deployment, script=script.split())
    if is_finished:
        slurm.finished.touch()
    process = slurm.start(f"{job}.sbatch")
    if events:
        slurm.wait_for(2 if job == "learner" else 1)
    for event in events:
        match event:
            case "steps told":
                slurm.tell_steps()
            case "finished":
                slurm.finished.touch()
            case "COMPLETING":
                slurm.set_state(event)
            case _:
                process.send_signal(signal.Signals[event])
    return slurm, *slurm.end(process)


def requeued(slurm):
    return [c for c in slurm.called("scontrol") if "requeue" in c]


def names(slurm):
    return [a for c in slurm.called("python") for a in shlex.split(c) if a.startswith("--name=")]


def test_submit_starts_the_learner_and_the_actors_after_it(tmp_path):
    slurm = FakeSlurm(tmp_path / "slurm", gpus_alone("slurm"), script=[])
    assert slurm.end(slurm.start("submit.sh"))[0] == 0
    assert slurm.calls == ["sbatch --parsable learner.sbatch", "sbatch --dependency=after:77 actors.sbatch"]


def test_learner_runs_a_process_a_host_and_is_done(tmp_path):
    slurm, code, out = end_of(tmp_path, "learner", "0 0")
    assert code == 0 and "is finished" in out
    started = [shlex.split(c) for c in slurm.called("python")]
    assert sorted(a for s in started for a in s if a.startswith("--process_id")) == ["--process_id=0", "--process_id=1"]
    assert all("--coordinator=node-a:24242" in s and "--num_processes=2" in s for s in started)
    assert "--kill-on-bad-exit=1" in slurm.called("srun")[0]
    actors = "--user=me --name=tpu-v5p-64-actors"
    assert slurm.finished.exists()
    assert slurm.called("scancel") == [
        f"scancel --state=PENDING {actors}",
        f"scancel --batch --signal=USR1 --state=RUNNING {actors}",
    ]


@pytest.mark.heavy
def test_learner_whose_hosts_alone_are_told_to_stop_is_queued_again_and_not_done(tmp_path):
    # Finished says an earlier job of this run, which goes on.
    slurm, code, out = end_of(tmp_path, "learner", "wait wait", "steps told", is_finished=True)
    assert code == 0 and "is finished" not in out and "stop requested for the hosts: requeued" in out
    assert slurm.calls[-1] == "scontrol requeue 4242"
    assert not slurm.finished.exists() and not list(slurm.out.glob("stopped-*"))


@pytest.mark.heavy
def test_learner_that_stops_while_slurm_ends_its_job_is_not_queued_again(tmp_path):
    slurm, code, out = end_of(tmp_path, "learner", "wait wait", "COMPLETING", "steps told")
    assert code == 1 and "is finished" not in out and not slurm.finished.exists()
    assert not requeued(slurm) and not slurm.called("scancel")


@pytest.mark.heavy
def test_learner_that_is_done_as_its_time_is_up_is_done(tmp_path):
    slurm, code, out = end_of(tmp_path, "learner", "serve serve", "SIGUSR1")
    assert code == 0 and "is finished" in out and slurm.finished.exists() and not requeued(slurm)


def test_learner_that_dies_starts_again_with_all_its_hosts(tmp_path):
    slurm, code, out = end_of(tmp_path, "learner", "1 137 0")
    assert code == 0, out
    assert len(slurm.called("srun")) == 2 and "exited with code 137; restarting" in out


@pytest.mark.parametrize("hopeless", ["2", "5"])
def test_learner_that_must_not_start_again_ends_its_actors(hopeless, tmp_path):
    slurm, code, _ = end_of(tmp_path, "learner", f"{hopeless} 143 0")
    assert code == 1 and len(slurm.called("srun")) == 1
    assert slurm.called("scancel") == ["scancel --user=me --name=tpu-v5p-64-actors"]


@pytest.mark.heavy
def test_learner_whose_time_is_up_is_told_once_and_queued_again(tmp_path):
    slurm, code, out = end_of(tmp_path, "learner", "wait wait wait", "SIGUSR1")
    assert code == 0, out
    assert slurm.calls.count("told") == 2, "each of two processes once"
    assert slurm.calls[-1] == "scontrol requeue 4242"


@pytest.mark.heavy
def test_learner_that_somebody_ends_is_not_queued_again(tmp_path):
    slurm, *_ = end_of(tmp_path, "learner", "wait wait wait", "SIGTERM")
    assert "told" in slurm.calls and not requeued(slurm)
    assert not [c for c in slurm.called("scancel") if "--name" in c]


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_learner_that_hears_the_end_between_two_tries_starts_no_other_one(name, tmp_path):
    slurm = FakeSlurm(tmp_path / "slurm", gpus_alone("slurm"), script=["1", "137", "0", "0"])
    slurm.signal_before('sleep "$pause_s"', name)
    code, out = slurm.end(slurm.start("learner.sbatch"))
    assert "; restarting" in out and len(slurm.called("srun")) == 1
    assert (code, len(requeued(slurm))) == ((0, 1) if name == "USR1" else (137, 0))
    assert not slurm.finished.exists() and not slurm.called("scancel")


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["USR1", "TERM"])
@pytest.mark.parametrize(("job", "num_processes"), [("learner", 2), ("actors", 1), ("node", 1)])
def test_step_whose_end_comes_as_it_is_started_is_told_once(job, num_processes, name, tmp_path):
    deployment = one_node("slurm") if job == "node" else gpus_alone("slurm")
    slurm = FakeSlurm(tmp_path / "slurm", deployment, script=["wait"] * num_processes)
    slurm.signal_before("srun=$!", name, num_waiting=num_processes)
    slurm.end(slurm.start(f"{job}.sbatch"))
    assert slurm.calls.count("told") == num_processes
    assert len(slurm.called("srun")) == 1 and len(requeued(slurm)) == (name == "USR1")


def test_actor_that_dies_starts_again_alone_under_a_new_name(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "1 137 finish")
    assert code == 0 and names(slurm) == ["--name=actor-3", "--name=actor-3-r1", "--name=actor-3-r2"]


def test_actor_that_wants_other_limits_keeps_its_name(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "75 finish")
    assert code == 0 and names(slurm) == ["--name=actor-3", "--name=actor-3"]


def test_actor_that_can_never_start_is_given_up(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "2 0")
    assert code == 2 and len(names(slurm)) == 1


@pytest.mark.heavy
def test_actor_whose_time_is_up_leaves_and_is_queued_again(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "serve", "SIGUSR1")
    assert code == 0 and slurm.calls.count("told") == 1 and slurm.calls[-1] == "scontrol requeue 4242"


@pytest.mark.heavy
def test_actor_whose_time_is_up_after_the_run_is_finished_is_not_queued_again(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "serve", "finished", "SIGUSR1")
    assert code == 0 and slurm.calls.count("told") == 1 and not slurm.called("scontrol")


def test_actor_of_a_finished_run_is_not_started(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "serve", is_finished=True)
    assert code == 0 and not slurm.called("srun") and not slurm.called("scontrol")


@pytest.mark.heavy
def test_actor_that_alone_is_told_to_leave_is_queued_again(tmp_path):
    slurm, code, _ = end_of(tmp_path, "actors", "serve", "steps told")
    assert code == 0 and slurm.calls[-1] == "scontrol requeue 4242"


@pytest.mark.parametrize(("script", "queued"), [("130", True), ("0", False), ("1", False)])
def test_node_is_queued_again_where_launch_local_alone_was_told_to_stop(script, queued, tmp_path):
    slurm, *_ = end_of(tmp_path, "node", script)
    assert bool(requeued(slurm)) == queued


@pytest.mark.heavy
def test_node_whose_time_is_up_is_queued_again(tmp_path):
    slurm, *_ = end_of(tmp_path, "node", "wait", "SIGUSR1")
    assert slurm.calls[-1] == "scontrol requeue 4242"


def test_actors_work_folder_is_new_and_this_users_alone_whatever_another_user_made_there(tmp_path):
    slurm = FakeSlurm(tmp_path / "slurm", gpus_alone("slurm"), script=["0"])
    theirs = slurm.folder / "sluice-4242"
    theirs.mkdir(mode=0o777)
    (slurm.out / "finished").touch()  # nothing is started
    with open(slurm.out / "settings.sh", "a") as settings:
        settings.write('trap \'[ -z "${work_dir:-}" ] || stat -c "%a %u %n" "$work_dir" >> "$FAKE/seen"\' DEBUG\n')
    code, said = slurm.end(slurm.start("actors.sbatch"))
    assert code == 0, said
    (seen,) = set((slurm.folder / "seen").read_text().splitlines())
    mode, uid, path = seen.split()
    assert (mode, uid) == ("700", str(os.getuid()))
    assert pathlib.Path(path).parent == slurm.folder and path != str(theirs)
    assert list(theirs.iterdir()) == [] and not pathlib.Path(path).exists()
