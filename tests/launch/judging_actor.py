"""A process with a fake judge beside it, which says when that is ready: `python -m tests.launch.judging_actor FOLDER`."""

import sys
import threading
from pathlib import Path

from tests.launch.test_judge import CONFIG, JudgeService

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    JudgeService(
        CONFIG,
        folder / "judge.log",
        stopped_s=3600.0,
        command=(sys.executable, "-m", "tests.launch.fake_judge", str(folder)),
    )
    (folder / "ready").touch()
    threading.Event().wait()
