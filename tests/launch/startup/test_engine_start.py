"""An actor's deadline while its engine starts, beside its supervisor's."""

import pathlib

from actor.elastic_control import EngineSizeFile, EngineSizeOverride
from bridge.liveness import Activity, Liveness
from launch.startup.actor_lifecycle import deadline
from launch.supervision.hang_detector import HangDetector, HangTimeouts

START_S = 600.0


def test_deadline_comes_before_the_supervisors_whatever_came_before_it(tmp_path: pathlib.Path):
    pulse, now_s = Liveness(Liveness.create()), 0.0
    bounds = HangTimeouts(
        first_heartbeat_timeout_s=3600, heartbeat_timeout_s=3600, start_timeout_s=START_S + 30, progress_timeout_s=1
    )
    vigil = HangDetector(bounds, clock=lambda: now_s)

    def hung_after(seconds: float) -> str | None:
        nonlocal now_s
        for _ in range(round(seconds * 2)):  # looked at often: only watched time counts
            now_s += 0.5
            if said := vigil.look(pulse.read()):
                return said
        return None

    pulse._put(0, 1)  # it beats
    limits = EngineSizeOverride(max_num_seqs=8, tensor_parallel_size=1)
    file = EngineSizeFile(tmp_path / "limits.json", default=limits, max_tensor_parallel_size=1)
    assert hung_after(120) is None  # imports, the run folder
    with deadline(START_S, file, pulse):
        assert pulse.read().activity is Activity.STARTING
        assert hung_after(START_S) is None
    assert hung_after(20) is None  # what is left to do before it serves
    assert hung_after(START_S + 30) == f"no progress during startup for {START_S + 30:g} s"
