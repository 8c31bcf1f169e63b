"""TensorBoard sink: event files in the run's folder, by tensorboard's own writer (the usual wrappers import torch)."""

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
"""Tag of the text with every metric's unit and meaning."""


class TensorBoardSink:
    """In-process writer of event files, called as rows are written."""

    def __init__(self, folder: pathlib.Path, *, restored_step: int, incarnation: int, about: str) -> None:
        """Starts an event file; TensorBoard then hides the steps after `restored_step` of earlier files.

        The file's name has the `incarnation`. `about` describes the metrics, as Markdown.
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
        """Writes the finite values of a row with time `time_s` in Unix seconds."""
        finite = [Summary.Value(tag=k, simple_value=v) for k, v in values.items() if math.isfinite(v)]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=finite)))

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


def _await_a_later_name(folder: pathlib.Path) -> None:
    """Waits, at most one second, until no file is named after the current second."""
    # TensorBoard reads files in order of name, which starts with whole seconds followed by unordered parts: the file of
    # a restart within the same second might be read before the previous file.
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.02)
