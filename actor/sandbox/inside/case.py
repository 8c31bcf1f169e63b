"""Run of one case: limits, output caps, watch of time, memory and files, kill.

CPU time and idle time do not grow while a runnable program waits for a core, so a busy machine fails no program.
"""

import contextlib
import fcntl
import os
import resource
import select
import signal
import time

from actor.sandbox.inside import workspace

_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmPTE:", b"VmSwap:")
"""Memory fields of /proc status: without file pages, which the host shares; with page tables, which sparse memory uses.
"""


def memory_bytes(tmpfs, socket_bytes):
    """Returns memory of all other processes and of files in `tmpfs`, plus `socket_bytes` per socket, in bytes.

    Pages shared after a fork count in each process, so the result is an upper bound.
    """
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/status", "rb", 0) as file:
                lines = file.read(4096).split(b"\n")
        except OSError:
            continue  # it exited
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))
    for info in map(os.statvfs, tmpfs):
        total += (info.f_blocks - info.f_bfree) * info.f_frsize
    # The UNIX sockets of the network namespace; no other kind can be created.
    with open("/proc/net/unix", "rb") as file:
        return total + (sum(1 for _ in file) - 1) * socket_bytes


def cpu():
    """Returns the CPU seconds of all other processes and their reaped children, and True if a thread is runnable."""
    ticks, is_runnable = 0, False
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            state, times = _stat(f"/proc/{name}")
            ticks += sum(times)
            is_runnable = is_runnable or state == b"R" or _has_runnable(f"/proc/{name}/task")
        except OSError:
            continue  # it exited
    return ticks / _TICKS, is_runnable


def _has_runnable(folder):
    tasks = os.listdir(folder)
    return len(tasks) > 1 and any(_stat(f"{folder}/{task}")[0] == b"R" for task in tasks)


def _stat(folder):
    """Returns state and clock ticks: user, kernel, and both of reaped children."""
    with open(f"{folder}/stat", "rb", 0) as file:
        fields = file.read(1024).rpartition(b")")[2].split()
    return fields[0], [int(ticks) for ticks in fields[11:15]]


def num_files(tmpfs):
    """Returns the number of files, directories and links in these folders."""
    infos = [os.statvfs(folder) for folder in tmpfs]
    return sum(info.f_files - info.f_ffree for info in infos)


IDLE_FACTOR = 5
"""Idle seconds that count as one second: a sleeping or deadlocked program ends, and a slow disk costs little."""


class Clock:
    """Time of one run, sampled at each look."""

    def __init__(self, began, before_s):
        """Starts at `began`; `before_s`: CPU seconds that the first process had used by then."""
        self._looked = began
        self._before_s = before_s
        self._cpu_s = 0.0
        self._idle_s = 0.0

    def look(self, now, planned_s):
        """Adds the time since the last look, at most `planned_s` of it as idle, because a late look missed activity."""
        cpu_s, is_runnable = cpu()
        cpu_s = max(self._cpu_s, cpu_s - self._before_s)
        if not is_runnable:
            self._idle_s += max(0.0, min(now - self._looked, planned_s) - (cpu_s - self._cpu_s))
        self._cpu_s, self._looked = cpu_s, now

    def is_over(self, timeout_s):
        """Returns True if the program has used `timeout_s`."""
        if self._spent(self._cpu_s) < timeout_s:
            return False
        # A child reaped between two reads of one look counts twice, so look again.
        self._cpu_s = min(self._cpu_s, max(0.0, cpu()[0] - self._before_s))
        return self._spent(self._cpu_s) >= timeout_s

    def seconds(self, cpu_s):
        """Returns the time used; `cpu_s` is the kernel's count over all exited processes."""
        return self._spent(max(0.0, cpu_s - self._before_s))

    def _spent(self, cpu_s):
        return max(cpu_s, self._idle_s / IDLE_FACTOR)


PREPARE_S = 3.0
"""Timeout for recreating the writable directories, in seconds; on expiry the sandbox is used up."""
LOOK_S = 0.025
"""Interval of checks of time, memory and files, in seconds."""
_CHUNK = 65536
_TMPFS = (workspace.SCRATCH, workspace.SHARED)


class CaseNotRunError(Exception):
    """The case did not run, and this sandbox cannot begin another."""


def run(order, content, uid, limits, host):
    """Runs one case; returns (head, stdout, stderr, returned). `order` has argv, environment, timeout_s etc.

    `host.began()` is called when the clock starts. While the case runs, `host.timeout_s()` returns a new timeout
    whenever `host.fileno()` is readable. Raises CaseNotRunError if leftovers cannot be removed, or no process can be
    started.
    """
    stdin, call = order["blobs"]
    says, say = os.pipe()
    pipes = {"in": os.pipe(), "out": os.pipe(), "err": os.pipe()}
    for fd in (*pipes["in"], *pipes["out"], *pipes["err"]):
        os.fchmod(fd, 0o666)  # a program of another user may open /dev/stdin
    if order["calls"]:
        pipes |= {"call": os.pipe(), "return": os.pipe()}
    pid = os.fork()
    if pid == 0:
        _become(order, content, uid, limits, say, pipes)
    os.close(say)
    ours = _our_ends(pipes)
    try:
        began, before_s, problem = _wait_for_exec(says)
        if problem.startswith(b"dirty"):
            raise CaseNotRunError(problem.decode("utf-8", "replace"))
        host.began()
        feeds = {ours["in"]: stdin} | ({ours["call"]: call} if "call" in ours else {})
        bounds = {ours["out"]: limits["output_bytes"], ours["err"]: limits["stderr_bytes"]}
        if "return" in ours:
            bounds[ours["return"]] = limits["output_bytes"]
        running = _Running(pid, Clock(began, before_s), feeds, bounds, kept_short=ours["err"])
        ended, code, seconds = running.until_end(order["timeout_s"], limits, host)
        if problem:
            return {"ended": "exited", "code": 127, "seconds": seconds}, b"", problem, b""
        out, err = running.read[ours["out"]], running.read[ours["err"]]
        returned = running.read[ours["return"]] if "return" in ours else b""
        return {"ended": ended, "code": code, "seconds": seconds}, bytes(out), bytes(err), bytes(returned)
    finally:
        end_all()
        os.close(says)
        for fd in ours.values():
            os.close(fd)


def end_all():
    """Kills and reaps every process but PID 1, so that none can fork; returns each one's status and usage."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    ends = {}
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return ends
        ends[pid] = (status, usage)


def _our_ends(pipes):
    ours = {}
    for name, (read, write) in pipes.items():
        theirs, ours[name] = (read, write) if name in ("in", "call") else (write, read)
        os.close(theirs)
        os.set_blocking(ours[name], False)
    return ours


def _wait_for_exec(says):
    """Returns exec time, CPU seconds before it, and the problem that prevented exec, if any."""
    poll = select.poll()
    poll.register(says, select.POLLIN)
    said, deadline = b"", time.monotonic() + PREPARE_S
    while True:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return deadline, 0.0, b"dirty: still at it after %d s" % PREPARE_S
        chunk = os.read(says, 4096)
        if not chunk:
            times, _, problem = said.partition(b"\n") if said[:1].isdigit() else (b"0 0", b"", said or b"dirty: died")
            began, before_s = map(float, times.split())
            return began, before_s, problem
        said += chunk


def _become(order, content, uid, limits, say, pipes):
    """Prepares the child process (files, user, limits) and executes the program; never returns."""
    # Duplicate the pipe fds to >= 20 first: dup2() below overwrites fds 0 to 4.
    ends = [pipes["in"][0], pipes["out"][1], pipes["err"][1]]
    special = [pipes["call"][0], pipes["return"][1]] if "call" in pipes else []
    say = fcntl.fcntl(say, fcntl.F_DUPFD_CLOEXEC, 20)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in ends + special]
    stage = "dirty"
    try:
        os.setsid()
        drop_to(uid)
        workspace.prepare(content)
        os.chdir(workspace.WORK)
        for number, fd in enumerate(high):
            os.dup2(fd, number)
        # If the sandbox has only one user, PID 1 counts as well.
        _bound(limits, order["reserves"], limits["num_processes"] + (uid is None))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # A compiler or interpreter that cannot be executed is not the program's fault; its own file is.
        stage = "exec" if "/" in order["argv"][0] else "dirty"
        os.write(say, b"%.6f %.6f\n" % (time.monotonic(), time.process_time()))
        os.execvpe(order["argv"][0], order["argv"], order["environment"])
    except BaseException as e:
        os.write(say, f"{stage}: {type(e).__name__}: {e}".encode("utf-8", "replace")[:4000])
    finally:
        os._exit(127)


def drop_to(uid):
    """Switches permanently to an unprivileged user; None means that the sandbox has only one user."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)  # drops all capabilities


def _bound(limits, reserves, num_processes):
    """Sets the kernel's limits, which cannot be raised again."""
    memory = resource.RLIMIT_DATA if reserves else resource.RLIMIT_AS
    if reserves:  # the parent may have a soft limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    for which, wanted in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_open_files"]),
        (resource.RLIMIT_STACK, limits["stack_bytes"]),
        (resource.RLIMIT_NPROC, num_processes),
        (memory, limits["address_space_bytes"]),
    ):
        _, hard = resource.getrlimit(which)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        # One more second for the hard CPU limit: the soft limit's signal identifies the cause.
        resource.setrlimit(
            which, (value, value + 1 if which == resource.RLIMIT_CPU and value < hard % 2**63 else value)
        )


class _Running:
    """Program of a case, from its start to its end."""

    def __init__(self, pid, clock, feeds, bounds, *, kept_short):
        self._pid = pid
        self._clock = clock
        self._feeds = {fd: memoryview(data) for fd, data in feeds.items()}
        self._bounds = bounds
        self._kept_short = kept_short
        """Descriptor whose excess output is discarded; excess on others ends the program."""
        self.read = {fd: bytearray() for fd in bounds}

    def until_end(self, timeout_s, limits, host):
        """Returns reason, code and seconds once all processes are dead and their output is read."""
        why = self._watch(timeout_s, limits, host)
        ends = end_all()
        self._drain()
        seconds = self._clock.seconds(sum(usage.ru_utime + usage.ru_stime for _, usage in ends.values()))
        status, usage = ends[self._pid]
        if why:
            return why, 0, seconds
        if any(self._is_over(fd) for fd in self.read):
            return "output", 0, seconds
        if os.WIFEXITED(status):
            return "exited", os.WEXITSTATUS(status), seconds
        number = os.WTERMSIG(status)
        cpu_s = usage.ru_utime + usage.ru_stime
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= limits["cpu_s"]):
            return "cpu", number, seconds
        return "signal", number, seconds

    def _watch(self, timeout_s, limits, host):
        """Returns the limit that was exceeded; empty if the program ended by itself."""
        poll = select.poll()
        end = os.pidfd_open(self._pid)
        try:
            poll.register(end, select.POLLIN)
            for fd in self.read:
                poll.register(fd, select.POLLIN)
            for fd in self._feeds:
                poll.register(fd, select.POLLOUT)
            poll.register(host.fileno(), select.POLLIN)
            pause_s = LOOK_S
            look_at = time.monotonic() + pause_s
            while True:
                now = time.monotonic()
                if now >= look_at:
                    self._clock.look(now, pause_s)
                    if self._clock.is_over(timeout_s):
                        return "timeout"
                    if memory_bytes(_TMPFS, limits["socket_bytes"]) > limits["memory_bytes"]:
                        return "memory"
                    if num_files(_TMPFS) > limits["num_files"]:
                        return "files"
                    # Checks of many processes take long: at most a tenth of the time.
                    pause_s = max(LOOK_S, 10 * (time.monotonic() - now))
                    look_at = now + pause_s
                ready = dict(poll.poll(max(0.0, look_at - time.monotonic()) * 1000))
                if ready.pop(host.fileno(), 0):
                    timeout_s = host.timeout_s()
                for fd in ready:
                    goes_on = fd == end or (self._take(fd) if fd in self.read else self._feed(fd))
                    if not goes_on:
                        poll.unregister(fd)
                    if fd in self.read and self._is_over(fd):
                        return "output"
                if end in ready:
                    return ""
        finally:
            os.close(end)

    def _is_over(self, fd):
        return fd != self._kept_short and len(self.read[fd]) > self._bounds[fd]

    def _take(self, fd):
        """Reads a chunk; returns False at the end."""
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        if fd == self._kept_short:
            chunk, there = chunk[: max(0, self._bounds[fd] - len(self.read[fd]))], bool(chunk)
            self.read[fd] += chunk
            return there
        self.read[fd] += chunk
        return bool(chunk)

    def _feed(self, fd):
        """Writes a chunk; returns False when all is written, or the reader closed."""
        data = self._feeds[fd]
        try:
            if data:
                self._feeds[fd] = data = data[os.write(fd, data[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            data = b""
        if not data:
            # Signals end of file: a descriptor of /dev/null replaces this one.
            null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, fd, inheritable=False)
            os.close(null)
        return bool(data)

    def _drain(self):
        """Reads the rest of the pipes; no writer is left."""
        for fd in self.read:
            while not self._is_over(fd) and self._take_left(fd):
                pass

    def _take_left(self, fd):
        before = len(self.read[fd])
        if fd == self._kept_short and before >= self._bounds[fd]:
            return False
        return self._take(fd) and len(self.read[fd]) > before
