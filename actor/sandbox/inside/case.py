"""One case: limits, output caps, memory/file watching, kill.

Neither grows while a program could run and gets no core, so that a busy machine makes no program slow.
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
"""Without the pages of files, which are the host's and shared; with page tables, which sparse memory is made of."""


def memory_bytes(tmpfs, socket_bytes):
    """Memory of all processes but this one, of the files in those folders, and `socket_bytes` for each socket.

    Pages that are shared after a fork count in each process: what is found is at least what is used.
    """
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/status", "rb", 0) as file:
                lines = file.read(4096).split(b"\n")
        except OSError:
            continue  # it ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_COUNTED))
    for info in map(os.statvfs, tmpfs):
        total += (info.f_blocks - info.f_bfree) * info.f_frsize
    # The UNIX sockets of the network namespace; none other can be made in it.
    with open("/proc/net/unix", "rb") as file:
        return total + (sum(1 for _ in file) - 1) * socket_bytes


def cpu():
    """CPU seconds of all processes but this one and of their ended children; True if a thread of them is runnable."""
    ticks, is_runnable = 0, False
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            state, times = _stat(f"/proc/{name}")
            ticks += sum(times)
            is_runnable = is_runnable or state == b"R" or _has_runnable(f"/proc/{name}/task")
        except OSError:
            continue  # it ended
    return ticks / _TICKS, is_runnable


def _has_runnable(folder):
    tasks = os.listdir(folder)
    return len(tasks) > 1 and any(_stat(f"{folder}/{task}")[0] == b"R" for task in tasks)


def _stat(folder):
    """State, and clock ticks of the user's, the kernel's, and those of children that were waited for."""
    with open(f"{folder}/stat", "rb", 0) as file:
        fields = file.read(1024).rpartition(b")")[2].split()
    return fields[0], [int(ticks) for ticks in fields[11:15]]


def num_files(tmpfs):
    """Files, folders and links in those folders."""
    infos = [os.statvfs(folder) for folder in tmpfs]
    return sum(info.f_files - info.f_ffree for info in infos)


IDLE_FACTOR = 5
"""Idle seconds that count as one: what sleeps or waits for itself ends, too, and a slow disk costs little."""


class Clock:
    """Time of one run, counted at each look."""

    def __init__(self, began, before_s):
        """Starts at `began`; `before_s` are CPU seconds that the first process had used by then."""
        self._looked = began
        self._before_s = before_s
        self._cpu_s = 0.0
        self._idle_s = 0.0

    def look(self, now, planned_s):
        """Counts the time since the last look, at most `planned_s` of it as idle: a late look saw nothing."""
        cpu_s, is_runnable = cpu()
        cpu_s = max(self._cpu_s, cpu_s - self._before_s)
        if not is_runnable:
            self._idle_s += max(0.0, min(now - self._looked, planned_s) - (cpu_s - self._cpu_s))
        self._cpu_s, self._looked = cpu_s, now

    def is_over(self, timeout_s):
        """Returns True if the program has used that much."""
        if self._spent(self._cpu_s) < timeout_s:
            return False
        # A child that is reaped between two reads of one look is counted twice.
        self._cpu_s = min(self._cpu_s, max(0.0, cpu()[0] - self._before_s))
        return self._spent(self._cpu_s) >= timeout_s

    def seconds(self, cpu_s):
        """Time that the run took; `cpu_s` is what the kernel counted of all its processes when they had ended."""
        return self._spent(max(0.0, cpu_s - self._before_s))

    def _spent(self, cpu_s):
        return max(cpu_s, self._idle_s / IDLE_FACTOR)


PREPARE_S = 3.0
"""For making the writable places anew; a sandbox in which that takes longer is used up."""
LOOK_S = 0.025
"""Between two looks at time, memory and files."""
_CHUNK = 65536
_TMPFS = (workspace.SCRATCH, workspace.SHARED)


class CaseNotRunError(Exception):
    """This sandbox can't begin another case; it did not run."""


def run(order, content, uid, limits, host):
    """Runs one case and returns (head, stdout, stderr, returned); `order` has argv, environment, timeout_s and so on.

    `host.began()` is called when its clock begins; while it runs, `host.timeout_s()` gives another timeout whenever
    `host.fileno()` can be read.

    Raises:
      CaseNotRunError: what earlier cases left can't be cleared away, or no process be made.
    """
    stdin, call = order["blobs"]
    says, say = os.pipe()
    pipes = {"in": os.pipe(), "out": os.pipe(), "err": os.pipe()}
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
    """Kills every process of the sandbox but PID 1, past which nobody can fork, and sees them gone: how each ended."""
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
    """When the new process executed the program, its CPU seconds before that, and what kept it from it, if anything."""
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
    """In the new process: makes its world, puts its bounds on and executes the program; never returns."""
    # Out of the way first: what is to become 0 to 4 may lie there.
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
        # Where the sandbox has one user only, PID 1 counts too.
        _bound(limits, order["reserves"], limits["num_processes"] + (uid is None))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        # A compiler or interpreter that can't be executed is no fault of the program; a file of its own is.
        stage = "exec" if "/" in order["argv"][0] else "dirty"
        os.write(say, b"%.6f %.6f\n" % (time.monotonic(), time.process_time()))
        os.execvpe(order["argv"][0], order["argv"], order["environment"])
    except BaseException as e:
        os.write(say, f"{stage}: {type(e).__name__}: {e}".encode("utf-8", "replace")[:4000])
    finally:
        os._exit(127)


def drop_to(uid):
    """Becomes that user for good, without any right; None: the sandbox has one user only."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)  # and with it all rights


def _bound(limits, reserves, num_processes):
    """The kernel's own bounds; none can be taken back."""
    memory = resource.RLIMIT_DATA if reserves else resource.RLIMIT_AS
    if reserves:  # who started us may have a soft bound of its own
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
        # A second more to the hard limit of CPU time: the soft one's signal says what it was.
        resource.setrlimit(
            which, (value, value + 1 if which == resource.RLIMIT_CPU and value < hard % 2**63 else value)
        )


class _Running:
    """A program that has begun."""

    def __init__(self, pid, clock, feeds, bounds, *, kept_short):
        self._pid = pid
        self._clock = clock
        self._feeds = {fd: memoryview(data) for fd, data in feeds.items()}
        self._bounds = bounds
        self._kept_short = kept_short
        """Of this one the rest is thrown away; of others it ends the program."""
        self.read = {fd: bytearray() for fd in bounds}

    def until_end(self, timeout_s, limits, host):
        """How it ended, its code, its seconds; then nothing of it runs any more and all it said is read."""
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
        """What made us end it; empty when it ended by itself."""
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
                    # A look at many processes takes a while: a tenth of the time at most.
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
        """Reads a piece; False at the end."""
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
        """Writes a piece; False when there is no more to write, or nobody reads."""
        data = self._feeds[fd]
        try:
            if data:
                self._feeds[fd] = data = data[os.write(fd, data[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            data = b""
        if not data:
            # End of file for the reader: another descriptor of nothing takes this one's number.
            null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, fd, inheritable=False)
            os.close(null)
        return bool(data)

    def _drain(self):
        """Reads what pipes still hold; nobody is left to write more."""
        for fd in self.read:
            while not self._is_over(fd) and self._take_left(fd):
                pass

    def _take_left(self, fd):
        before = len(self.read[fd])
        if fd == self._kept_short and before >= self._bounds[fd]:
            return False
        return self._take(fd) and len(self.read[fd]) > before
