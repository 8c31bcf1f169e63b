"""Starts the process of a gradient helper, as a child of the learner."""

import dataclasses
import os
import pathlib
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from bridge.credentials import without_secrets
from configs import custom_functions
from configs.run_folder import RunFolder
from launch.supervision import process_tree
from launch.supervision.backend import CPU_DEVICES
from launch.supervision.placement import JAX_VARIABLES_IN_TURNS, VISIBLE


@dataclasses.dataclass(frozen=True)
class HelperChild:
    """A running process; see `learner.gradient_helper.helper_client.HelperProcess`."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def kill(self) -> None:
        """Kills the process and waits until it has exited."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


@dataclasses.dataclass(frozen=True)
class HelperService:
    """Starter of a helper's processes, which die with the learner."""

    folder: pathlib.Path
    devices: str
    """CUDA_VISIBLE_DEVICES of the helper: the devices of its engines. Empty on a CPU."""
    cpu_cores: str = ""
    """Cores of the helper, on a CPU. Empty: all."""
    module: str = "launch.gradient_helper"
    """Module of the process."""

    @property
    def num_devices(self) -> int:
        """Devices of the helper."""
        return len(self.devices.split(",")) if self.devices else 1

    def start(self) -> HelperChild:
        """Starts a process without waiting for it."""
        ours, its = Pipe()
        log = RunFolder(self.folder).log("gradient-helper")
        log.parent.mkdir(parents=True, exist_ok=True)
        with its, open(log, "ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", self.module, f"--run_dir={self.folder.resolve()}"),
                    *(f"--pipe={its.fileno()}", f"--cpu_cores={self.cpu_cores}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the learner
                pass_fds=(its.fileno(),),
                env=without_secrets(os.environ)
                | JAX_VARIABLES_IN_TURNS
                | {
                    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {CPU_DEVICES}=1".strip(),
                    "PYTHONPATH": custom_functions.python_path(),
                    "PYTHONUNBUFFERED": "1",
                    process_tree.VARIABLE: str(os.getpid()),
                }
                | ({VISIBLE: self.devices} if self.devices else {"JAX_PLATFORMS": "cpu"}),
            )
        return HelperChild(process, ours)
