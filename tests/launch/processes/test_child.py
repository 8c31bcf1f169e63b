import pytest

from launch.processes.child import Child, telling_line


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "I1124 13:53:15.622544 140120281615232 client.py:147] weights served version=0:54\n",
            "weights served version=0:54",
        ),
        ("error: no room\nI1124 13:53:15.6 7 client.py:1] bye\n", "no room"),
        ("ValueError: seven\n\n", "ValueError: seven"),
        ("\n", "it printed nothing"),
    ],
)
def test_telling_line_is_the_error_or_the_last_one_without_the_logs_head(tmp_path, log, said):
    (tmp_path / "log").write_text(log)
    assert telling_line(tmp_path / "log") == said


def test_actor_that_is_started_again_has_another_name_and_is_told_in_whose_place_it_is(tmp_path):
    child = Child("actor-1", ["--run_dir=x"], tmp_path / "log", devices="")
    commands = []
    for child.num_restarts in range(3):
        commands.append(child.command()[4:])
    assert commands == [
        ["--run_dir=x", "--name=actor-1"],
        ["--run_dir=x", "--name=actor-1-r1", "--instead_of=actor-1"],
        ["--run_dir=x", "--name=actor-1-r2", "--instead_of=actor-1-r1"],
    ]
    learner = Child("learner", ["--run_dir=x"], tmp_path / "log", devices="")
    learner.num_restarts = 2
    assert learner.command()[4:] == ["--run_dir=x"]
