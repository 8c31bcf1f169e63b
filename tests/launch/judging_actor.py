"""A process beside which a fake judge runs, and which says when that is ready: its argument is a test's folder."""

import sys
import threading
from pathlib import Path

from launch.services.judge_server import JudgeService
from tests.launch.services.test_judge_server import CONFIG, MAX_RESTARTS, START_S

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    JudgeService(
        CONFIG,
        folder / "judge.log",
        stopped_s=3600.0,
        start_timeout_s=START_S,
        max_restarts=MAX_RESTARTS,
        command=(sys.executable, "-m", "tests.launch.fake_judge", str(folder)),
    )
    (folder / "ready").touch()
    threading.Event().wait()
