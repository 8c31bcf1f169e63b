"""The run's processes, found from outside by the kernel's tables."""

import contextlib
import signal

import psutil

_WORKER, _ZYGOTE = "actor.rewards.verifier_worker", "actor.environments.fork_server"


def below(pid: int) -> set[psutil.Process]:
    """Returns all processes below one; each is itself and no later one of its id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(psutil.Process(pid).children(recursive=True))
    return set()


def find(run: int) -> dict[str, list[psutil.Process]]:
    """Returns verifier workers, zygotes and episodes' processes below the run's command."""
    found: dict[str, list[psutil.Process]] = {"worker": [], "zygote": [], "episode": []}
    for process in sorted(below(run), key=lambda p: p.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            command, parent = process.cmdline(), process.parent()
            if _WORKER in command:
                found["worker"].append(process)
            elif _ZYGOTE in command:
                is_forked = parent is not None and _ZYGOTE in parent.cmdline()
                found["episode" if is_forked else "zygote"].append(process)
    return found


def status(process: psutil.Process) -> str:
    """Returns `psutil.STATUS_*`; that of a process that is gone is dead."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    return psutil.STATUS_DEAD


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signals a process; returns False if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return True
    return False
