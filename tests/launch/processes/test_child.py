import pytest

from launch.processes.child import telling_line


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
