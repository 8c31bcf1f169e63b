"""The console of all commands, and output whose reader goes away."""

import io
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from launch.terminal import WAIT_MESSAGE_S, WaitMessages, make_console
from tests.integration.support.processes import REPO


def test_heartbeat_prints_a_running_step_with_its_elapsed_time_every_five_seconds():
    now_s, lines = 100.0, []
    heartbeat = WaitMessages(lines.append, "engine 0: starting", lambda: now_s)
    for _ in range(34):
        heartbeat.look()
        now_s += 0.5
    assert WAIT_MESSAGE_S == 5.0
    assert lines == [f"engine 0: starting, {seconds} s" for seconds in (5, 10, 15)]


WRITER = """
import sys
from absl import app, logging
from launch import cli
from launch.terminal import WAIT_MESSAGE_S, WaitMessages, make_console
def main():
    cli.log_to_stderr()
    print("first", flush=True)
    sys.stdin.readline()
    for i in range(3):
        print("x" * 100_000, flush=True)
        make_console().print("y\\n" * 50_000, highlight=False)
        print("z", file=sys.stderr)
        logging.warning("a warning")
    open(sys.argv[1].removeprefix("--config="), "w").write("done")
    return 5
cli.run(main)
"""


def start(tmp_path, **streams: Any) -> "subprocess.Popen[Any]":
    command = [sys.executable, "-c", WRITER, f"--config={tmp_path / 'done'}"]
    return subprocess.Popen(command, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, **streams)


@pytest.mark.parametrize(
    "sizes",
    [{"COLUMNS": "0", "LINES": "0"}, {"COLUMNS": "1"}, {"COLUMNS": "²"}, {"COLUMNS": ""}, {"COLUMNS": "-5"}, {}],
)
def test_console_without_a_width_has_80_columns(monkeypatch, sizes):
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in sizes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    said = io.StringIO()
    console = make_console(file=said)
    console.print("step 1/4 reward 0.500")
    assert console.width == 80 and said.getvalue() == "step 1/4 reward 0.500\n"


def test_console_takes_the_width_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")
    assert make_console(file=io.StringIO()).width == 132


@pytest.mark.heavy
@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_command_whose_reader_is_gone_continues_to_its_end(tmp_path, closed):
    with start(tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        assert one.stdin is not None and one.stdout is not None and one.stderr is not None
        assert one.stdout.readline() == b"first\n"
        for name in closed:
            getattr(one, name).close()
        one.stdin.write(b"\n")
        one.stdin.close()
        left = one.stderr if "stdout" in closed and "stderr" not in closed else one.stdout
        said = b"" if left.closed else left.read()
    assert one.returncode == 5 and (tmp_path / "done").read_text() == "done"
    assert b"Traceback" not in said and b"rror" not in said


@pytest.mark.heavy
def test_command_whose_terminal_hung_up_continues_to_its_end(tmp_path):
    main, terminal = pty.openpty()
    with start(tmp_path, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal, start_new_session=True) as one:
        os.close(terminal)
        assert one.stdin is not None and b"first" in os.read(main, 100)
        os.close(main)
        one.stdin.write(b"\n")
        one.stdin.close()
    assert one.returncode == 5 and (tmp_path / "done").read_text() == "done"


@pytest.mark.heavy
def test_command_that_is_started_with_closed_streams_continues_to_its_end(tmp_path):
    shell = f'exec "{sys.executable}" -c "$WRITER" --config="{tmp_path / "done"}" </dev/null >&- 2>&-'
    env = os.environ | {"PYTHONPATH": str(REPO), "WRITER": WRITER}
    assert subprocess.run(["sh", "-c", shell], cwd=REPO, env=env).returncode == 5
    assert (tmp_path / "done").read_text() == "done"


def test_line_in_letters_that_the_encoding_lacks_is_escaped():
    program = "from launch import cli\ncli.run(lambda: print('\\u2581') or 0)"
    env = os.environ | {"PYTHONPATH": str(REPO), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, env=env, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"\\u2581\n"), done.stderr


def test_commands_make_their_consoles_in_one_place():
    files = [f for f in (REPO / "launch").rglob("*.py") if f.name != "terminal.py"]
    assert len(files) > 100
    assert [str(f) for f in files if " Console(" in f.read_text()] == []
