import pytest

from configs.schema import Config
from launch.supervision.backend import hang_timeouts
from launch.supervision.child import Child, alike, telling_line

BOUNDS = hang_timeouts(Config(preset="test"), of_actor=False)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "I1124 13:53:15.622544 140120281615232 client.py:147] weights served version=0:54\n",
            "weights served version=0:54",
        ),
        ("error: no room\nI1124 13:53:15.6 7 client.py:1] bye\n", "no room"),
        ("ValueError: seven\n\n", "ValueError: seven"),
        ("\n", "no output"),
    ],
)
def test_telling_line_is_the_error_or_the_last_one_without_the_logs_head(tmp_path, log, said):
    (tmp_path / "log").write_text(log)
    assert telling_line(tmp_path / "log") == said


ENGINE = "(EngineCore pid=7) "
HEAD = ENGINE + "ERROR 11-25 14:57:09 [core.py:708] "
POINTER = "error: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (f"{HEAD}ValueError: No available memory for the cache blocks.\n{POINTER}", "ValueError: No available memory"),
        (f"{ENGINE}torch.OutOfMemoryError: CUDA out of memory.\n{POINTER}", "torch.OutOfMemoryError: CUDA out of"),
        (f"{HEAD}RuntimeError: See stack trace for root cause.\n{ENGINE}OSError: bad file\n{POINTER}", "OSError: bad"),
        (f"{ENGINE}[W1 socket.cpp] Too many open files\nsomething\n{POINTER}", "[W1 socket.cpp] Too many open files"),
        (f"I am fine\n{POINTER}", "Engine core initialization failed; no cause found in"),
        (f"{HEAD}ValueError: one\nerror: the engine did not start within 600 s\n", "the engine did not start within"),
    ],
)
def test_telling_line_names_the_cause_where_the_last_error_points_elsewhere(tmp_path, log, said):
    (tmp_path / "log").write_text("OSError: of an earlier process\n" + log)
    found = telling_line(tmp_path / "log", since=len("OSError: of an earlier process\n"))
    assert found.startswith(said) and "root cause" not in found


def test_telling_line_of_a_process_that_printed_nothing_is_not_its_predecessors(tmp_path):
    (tmp_path / "log").write_text("OSError: of an earlier process\n")
    assert telling_line(tmp_path / "log", since=31) == "no output"


def test_telling_line_is_bounded(tmp_path):
    (tmp_path / "log").write_text("error: " + "x" * 100_000)
    assert len(telling_line(tmp_path / "log")) == 1000


def test_causes_are_alike_but_for_numbers_and_addresses():
    assert alike("no room for 12 at 0x7f3a (pid 7)") == alike("no room for 9 at 0xdead (pid 8100)") != alike("no port")


def test_actor_that_is_started_again_has_another_name_and_is_told_in_whose_place_it_is(tmp_path):
    child = Child("actor-1", ["--run_dir=x"], tmp_path / "log", devices="", bounds=BOUNDS)
    commands = []
    for child.num_restarts in range(3):
        commands.append(child.command()[4:])
    assert commands == [
        ["--run_dir=x", "--name=actor-1"],
        ["--run_dir=x", "--name=actor-1-r1", "--instead_of=actor-1"],
        ["--run_dir=x", "--name=actor-1-r2", "--instead_of=actor-1-r1"],
    ]
    learner = Child("learner", ["--run_dir=x"], tmp_path / "log", devices="", bounds=BOUNDS)
    learner.num_restarts = 2
    assert learner.command()[4:] == ["--run_dir=x"]
