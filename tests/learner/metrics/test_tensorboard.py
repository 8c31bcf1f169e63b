import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learner.metrics.metrics_writer import MetricsWriter
from learner.metrics.tensorboard import TEXT, TensorBoardSink
from learner.metrics.trackers import table


def write(folder, steps, *, restored_step=0, incarnation=0, value=0.5):
    board = TensorBoardSink(folder / "board", restored_step=restored_step, incarnation=incarnation, about=table())
    writer = MetricsWriter(folder, restored_step=restored_step, incarnation=incarnation, view=board)
    for step in steps:
        writer.write("step", step, {"loss": value, "rewards/my_judges.style:score": 0.25})
    writer.close()


def shown(folder) -> EventAccumulator:
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    return board


def scalars(folder, name):
    """What TensorBoard shows."""
    return [(e.step, e.value) for e in shown(folder).Scalars(name)]


def test_values_stand_at_the_time_at_which_their_row_was_written(tmp_path):
    board = TensorBoardSink(tmp_path / "board", restored_step=0, incarnation=0, about=table())
    times = iter([1.5e9, 1.5e9 + 60.25])
    writer = MetricsWriter(tmp_path, restored_step=0, incarnation=0, view=board, clock=lambda: next(times))
    for step in (1, 2):
        writer.write("step", step, {"loss": 0.5})
    writer.close()
    assert [(e.step, e.wall_time) for e in shown(tmp_path).Scalars("loss")] == [(1, 1.5e9), (2, 1.5e9 + 60.25)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_value_that_is_not_finite_is_not_shown(tmp_path, value):
    write(tmp_path, [1], value=value)
    assert shown(tmp_path).Tags()["scalars"] == ["rewards/my_judges.style:score"]


@pytest.mark.heavy
def test_restarted_learner_takes_back_the_abandoned_values(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5])
    write(tmp_path, [4, 5, 6], restored_step=3, incarnation=1, value=0.75)
    assert scalars(tmp_path, "loss") == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.75), (5, 0.75), (6, 0.75)]


@pytest.mark.heavy
def test_restart_within_a_second_is_read_behind_what_it_takes_back(tmp_path, monkeypatch):
    for incarnation, host in enumerate("cba"):  # what comes behind the second in a file's name goes down
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        write(tmp_path, [1], incarnation=incarnation, value=incarnation / 4)
    assert scalars(tmp_path, "loss") == [(1, 0.5)]


def test_units_and_meanings_are_shown_as_a_text(tmp_path):
    write(tmp_path, [1])
    (text,) = shown(tmp_path).Tensors(TEXT)
    assert text.tensor_proto.string_val[0].decode() == table()
