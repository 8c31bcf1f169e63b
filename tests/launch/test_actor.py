"""How an actor ends that could not start, by what it met."""

import errno
import signal
from typing import Any

import pytest

from launch import actor, command_line


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (OSError(errno.EIO, "Input/output error", "model/config.json"), 4, "model/config.json: Input/output error; "),
        (OSError(errno.ENOSPC, "No space left on device", "events"), 4, "events: No space left on device; make room"),
        (OSError(errno.ETIMEDOUT, "Connection timed out", "run_id"), 4, "run_id: Connection timed out"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "model"), 2, "model: No such file or directory"),
        (ValueError("another version"), 2, "another version"),
    ],
)
def test_actor_that_can_not_start_is_started_again_unless_its_input_is_wrong(monkeypatch, capsys, raised, code, said):
    def join(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(command_line, "log_to_stderr", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(actor, "_join", join)
    with pytest.raises(SystemExit) as e:
        actor.main()
    assert e.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
