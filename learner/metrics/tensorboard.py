"""TensorBoard: event files in the run's folder, by tensorboard's own writer (the usual wrappers import torch)."""

import math
import pathlib
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

TEXT = "metrics"
"""The text that says every metric's unit and meaning."""


class TensorBoardSink:
    """Writes each row as the learner does; a file on this machine needs no process of its own."""

    def __init__(self, folder: pathlib.Path, *, restored_step: int, incarnation: int, about: str) -> None:
        """Begins a file for rows after `restored_step`.

        Args:
          folder: of TensorBoard's files.
          restored_step: whatever an earlier process wrote of later steps is void.
          incarnation: of the learner, in the file's name.
          about: what the metrics are, as Markdown.
        """
        _await_a_later_name(folder)
        self._writer = EventFileWriter(str(folder), flush_secs=10, filename_suffix=f".{incarnation}")
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=restored_step + 1, session_log=start))
        text = TensorProto(dtype=DT_STRING, string_val=[about.encode()])
        metadata = create_summary_metadata(display_name=TEXT, description="")
        value = Summary.Value(tag=TEXT, tensor=text, metadata=metadata)
        self._writer.add_event(Event(wall_time=time.time(), step=restored_step + 1, summary=Summary(value=[value])))

    def write(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Writes a row, of a moment in Unix seconds; what is not finite is left out."""
        finite = [Summary.Value(tag=k, simple_value=v) for k, v in values.items() if math.isfinite(v)]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=finite)))

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


def _await_a_later_name(folder: pathlib.Path) -> None:
    """Waits, for a second at most, until no file of this second is there.

    TensorBoard reads files in the order of their names, which begin with whole seconds and go on with what has no
    order: a restart in the second of a start might be read before it.
    """
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.02)
