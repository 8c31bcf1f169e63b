"""How much a program may have."""

import dataclasses

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Bounds of one sandbox; a case's timeout is the case's own."""

    memory_bytes: int = 1024 * MIB
    """Of all processes together and the files they wrote, which are in memory too. Looked at every few hundredths of a
    second, as no cgroup can be counted on: what is over it is killed."""
    address_space_bytes: int = 2048 * MIB
    """Of each process, from the kernel: beyond it an allocation fails, so nothing grows far between two looks. Runtimes
    that reserve what they don't use (Java, Go, Node) have it as a bound of writable private memory instead."""
    cpu_s: int = 60
    """Of each process."""
    num_processes: int = 64
    """Processes and threads at one time, in this sandbox alone."""
    file_bytes: int = 64 * MIB
    num_open_files: int = 256
    """Of each process."""
    disk_bytes: int = 128 * MIB
    """Of the working folder and /tmp together, and again of /dev/shm."""
    num_files: int = 16_384
    """Files, folders and links that exist at one time; more is killed, as each costs the kernel a kilobyte."""
    output_bytes: int = 8 * MIB
    """Of standard output, and of a function's result; more is killed."""
    stderr_bytes: int = 64 * 1024
    """Kept of standard error; the rest is thrown away."""
    stack_bytes: int = 64 * MIB
    """Programs of contests recurse deeply. A thread's stack is as large."""
    compile_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuses what is not positive, and a file that no disk holds."""
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"SandboxLimits.{field.name} must be > 0, got {getattr(self, field.name)}")
        if self.num_processes < 4:
            raise ValueError(
                f"SandboxLimits.num_processes must be >= 4 (a compiler is several), got {self.num_processes}"
            )
