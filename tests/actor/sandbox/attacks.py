"""Programs that mean harm, and how each is to end."""

import dataclasses
from collections.abc import Callable

from actor.sandbox.program import Ended, Outcome

ENDLESS_S = 1.5
"""The timeout of what never ends by itself."""
PATIENT_S = 30.0
"""Of what does: this machine may be busy."""

_GIVEN = "import json, os, signal, socket, sys, time\ngiven = json.load(sys.stdin)\n"
_TRY = """
def attempt(what, *arguments):
    try:
        print("got", what(*arguments))
    except (OSError, ValueError) as e:
        print("refused", type(e).__name__)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
    """One, on standard input a `trap.Trap` as JSON; `says` must hold for what came of it."""

    source: str
    ended: tuple[Ended, ...]
    timeout_s: float = PATIENT_S
    says: Callable[[Outcome], bool] = lambda outcome: True


def _nothing_got(outcome: Outcome) -> bool:
    return outcome.code == 0 and b"refused" in outcome.stdout and b"got" not in outcome.stdout


def _said_done(outcome: Outcome) -> bool:
    return outcome.code == 0 and outcome.stdout == b"done\n"


DEMANDED = {
    "infinite loop": Attack(source="while True: pass", ended=("timeout",), timeout_s=ENDLESS_S),
    "bounded fork loop": Attack(
        source="import os\nfor _ in range(500):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
        ended=("timeout",),
        timeout_s=ENDLESS_S,
    ),
    "4 GB allocation": Attack(
        source="taken = bytearray(4 * 2**30)\ntaken[::4096] = b'1' * 2**20\nprint('got')",
        ended=("exited",),
        says=lambda o: o.code == 1 and b"MemoryError" in o.stderr and not o.stdout,
    ),
    "1 GB of output": Attack(
        source="import sys\nfor _ in range(1024): sys.stdout.write('x' * 2**20)",
        ended=("output",),
        says=lambda o: len(o.stdout) <= 2**24 and set(o.stdout) == {ord("x")},
    ),
    "setsid child": Attack(
        source=(
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n"
            "    os._exit(0)\ntime.sleep(0.2)\nprint('done')"
        ),
        ended=("exited",),
        says=_said_done,
    ),
    "SIGTERM ignored": Attack(
        source=(
            "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: pass"
        ),
        ended=("timeout",),
        timeout_s=ENDLESS_S,
    ),
    "reading a host file": Attack(
        source=_GIVEN + _TRY + "for path in (given['file'], '/etc/shadow', '/etc/passwd', '/root', '/work', '/home'):\n"
        "    attempt(lambda: open(path).read() if not os.path.isdir(path) else os.listdir(path))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "reading the environment": Attack(
        source=_GIVEN + "print(dict(os.environ))\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for name in ('environ', 'cmdline'):\n"
        "        try: print(open(f'/proc/{pid}/{name}').read())\n        except OSError: pass",
        ended=("exited",),
        says=lambda o: o.code == 0 and b"SLUICE" not in o.stdout,
    ),
    "opening a socket": Attack(
        source=_GIVEN + _TRY + "for host in ('127.0.0.1', 'localhost', '10.0.0.1', '169.254.169.254'):\n"
        "    attempt(lambda: socket.create_connection((host, given['port']), timeout=1))\n"
        "def unix():\n    one = socket.socket(socket.AF_UNIX)\n    one.connect('\\0' + given['unix'])\n"
        "attempt(unix)\nfor family in (16, 17, 40):\n    attempt(lambda: socket.socket(family, socket.SOCK_DGRAM))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "writing outside": Attack(
        source=_GIVEN
        + _TRY
        + "for place in (given['folder'], '/usr', '/etc', '/', '/dev', '/proc/sys/kernel', '/sluice'):\n"
        "    attempt(lambda: open(place + '/written', 'w').write('x'))\n"
        "attempt(lambda: os.chmod('/usr', 0o777))\nattempt(lambda: os.mkdir('/x'))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "symlink escape": Attack(
        source=_GIVEN + _TRY + "os.symlink(given['file'], 'link')\nos.symlink(given['folder'], 'folder')\n"
        "os.symlink('/' + '../' * 20 + given['file'], '/tmp/up')\nos.remove('main.py')\n"
        "os.symlink(given['file'], 'main.py')\n"
        "for path in ('link', '/tmp/up', '/proc/self/root' + given['file'], '/proc/self/cwd/link'):\n"
        "    attempt(lambda: open(path).read())\n    attempt(lambda: open(path, 'a').write('x'))\n"
        "attempt(lambda: open('folder/written', 'w'))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "/proc of the host": Attack(
        source=_GIVEN + _TRY + "assert {int(p) for p in os.listdir('/proc') if p.isdigit()} == {1, os.getpid()}\n"
        "host = f'/proc/{given[\"pid\"]}/status'\n"
        "for path in (host, '/proc/1/environ', '/proc/1/mem', '/proc/1/root' + given['file']):\n"
        "    attempt(lambda: open(path, 'rb').read(64))\n"
        "for path in ('/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern', '/proc/1/oom_score_adj'):\n"
        "    attempt(lambda: open(path, 'w'))\n"
        "for path in ('/proc/1/fd', '/proc/1/cwd', '/proc/1/root'):\n    attempt(lambda: os.listdir(path))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "ptrace": Attack(
        source=_GIVEN + _TRY + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(name, *a):\n    if getattr(libc, name)(*a) < 0: raise OSError(ctypes.get_errno(), name)\n"
        "attempt(call, 'ptrace', 0, 0, 0, 0)\nattempt(call, 'ptrace', 16, 1, 0, 0)\n"
        "child = os.fork()\nif child == 0: time.sleep(100)\nattempt(call, 'ptrace', 16, child, 0, 0)\n"
        "attempt(call, 'process_vm_readv', 1, 0, 0, 0, 0, 0)\nattempt(call, 'unshare', 0x10000000)\n"
        "attempt(call, 'setns', 0, 0)\nattempt(call, 'mount', b'x', b'/tmp', b'tmpfs', 0, 0)",
        ended=("exited",),
        says=_nothing_got,
    ),
    "filling the tmpfs": Attack(
        source=(
            "import errno\nfor place in ('/tmp', '.', '/dev/shm'):\n    try:\n        for i in range(10_000):\n"
            "            with open(f'{place}/{i}', 'wb') as f: f.write(b'x' * 2**20)\n"
            "    except OSError as e: print(errno.errorcode[e.errno])"
        ),
        ended=("exited",),
        says=lambda o: o.code == 0 and o.stdout == b"ENOSPC\n" * 3,
    ),
    "deep recursion": Attack(
        source="import sys\nsys.setrecursionlimit(2**30)\ndef f(): return [f()]\nf()",
        ended=("exited", "signal", "memory"),
        says=lambda o: not o.succeeded,
    ),
    "binary garbage": Attack(
        source="import sys\nsys.stdout.buffer.write(bytes(range(256)) * 4000)",
        ended=("exited",),
        says=lambda o: o.code == 0 and o.stdout == bytes(range(256)) * 4000,
    ),
}
"""The sixteen that issue the sandbox was asked to withstand."""

OURS = {
    "memory in many processes": Attack(
        source=(
            "import os, time\nfor _ in range(4): os.fork()\ntaken = bytearray(2**27)\n"
            "taken[::4096] = b'1' * 2**15\ntime.sleep(100)"
        ),
        ended=("memory",),
    ),
    "memory that no process's size shows": Attack(
        source=_GIVEN + _TRY + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "attempt(lambda: os.memfd_create('x'))\n"
        "def shm():\n    if libc.shmget(0, 2**30, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')\n"
        "attempt(shm)",
        ended=("exited",),
        says=_nothing_got,
    ),
    "killing the runner": Attack(
        source=(
            "import os\nfor n in range(1, 65):\n    for pid in (1, -1):\n        if pid == 1 or n == 9:\n"
            "            try: os.kill(pid, n)\n            except OSError: pass\nprint('done')"
        ),
        ended=("exited",),
        says=_said_done,
    ),
    "bounds of the runner": Attack(
        source=_GIVEN + _TRY + "import resource\nattempt(resource.prlimit, 1, resource.RLIMIT_AS, (4096, 4096))\n"
        "attempt(resource.setrlimit, resource.RLIMIT_NPROC, (10000, 10000))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "priority and cores of the runner": Attack(
        source=_GIVEN + _TRY + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(name, *a):\n    if getattr(libc, name)(*a) < 0: raise OSError(ctypes.get_errno(), name)\n"
        "attempt(os.setpriority, os.PRIO_PROCESS, 1, 19)\nattempt(os.setpriority, os.PRIO_USER, 0, 19)\n"
        "attempt(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))\n"
        "attempt(os.sched_setaffinity, 1, os.sched_getaffinity(0))\n"
        "attempt(call, 'syscall', {'x86_64': 251, 'aarch64': 30}[os.uname().machine], 1, 1, 3 << 13)\n"
        "os.nice(1)\nos.sched_setaffinity(0, os.sched_getaffinity(0))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "others killed in its place": Attack(
        source=_GIVEN + _TRY + "assert open('/proc/self/oom_score_adj').read() == '1000\\n'\n"
        "attempt(lambda: open('/proc/self/oom_score_adj', 'w').write('0'))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "contexts of asynchronous I/O": Attack(
        source=_GIVEN + _TRY + "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def setup():\n    number = {'x86_64': 206, 'aarch64': 0}[os.uname().machine]\n"
        "    context = ctypes.c_ulong()\n"
        "    if libc.syscall(number, 1, ctypes.byref(context)): raise OSError(ctypes.get_errno(), 'io_setup')\n"
        "attempt(setup)",
        ended=("exited",),
        says=_nothing_got,
    ),
    "memory behind TCP": Attack(
        source=_GIVEN + _TRY + "attempt(socket.socket)\nattempt(socket.socket, socket.AF_INET6)\n"
        "attempt(lambda: socket.socketpair(socket.AF_INET6))\n"
        "attempt(lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**24))",
        ended=("exited",),
        says=_nothing_got,
    ),
    "memory behind UNIX sockets": Attack(
        source=(
            "import os, socket, time\nfor _ in range(5): os.fork()\nheld = []\ntry:\n    while True:\n"
            "        pair = socket.socketpair()\n        held.append(pair)\n        for one in pair:\n"
            "            one.setblocking(False)\n            try:\n                while True: one.send(b'x' * 65536)\n"
            "            except BlockingIOError: pass\nexcept OSError: pass\ntime.sleep(1000)"
        ),
        ended=("memory",),
    ),
    "forged messages on every descriptor": Attack(
        source=(
            "import json, os, struct\n"
            "head = json.dumps({'ended': 'exited', 'code': 0, 'seconds': 0, 'blobs': [4, 0, 0]}).encode()\n"
            "for fd in range(3, 256):\n    for text in (struct.pack('>II', 2**32 - 1, 2**32 - 1),\n"
            "                 struct.pack('>II', len(head), 4) + head + b'fake'):\n"
            "        try: os.write(fd, text)\n        except OSError: pass\nprint('done')"
        ),
        ended=("exited",),
        says=_said_done,
    ),
    "exhausting inodes": Attack(
        source="i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').close()\n    i += 1",
        ended=("files",),
    ),
    "FIFO in the place of the program": Attack(
        source="import os\nos.remove('main.py')\nos.mkfifo('main.py')\nos.mkfifo('/tmp/out')\nprint('done')",
        ended=("exited",),
        says=_said_done,
    ),
    "blocked on a FIFO": Attack(
        source="import os\nos.mkfifo('out')\nopen('out', 'w')", ended=("timeout",), timeout_s=ENDLESS_S
    ),
    "stdout closed, then endless": Attack(
        source="import os\nos.close(1)\nos.close(2)\nos.close(0)\nwhile True: pass",
        ended=("timeout",),
        timeout_s=ENDLESS_S,
    ),
    "10,000 tiny writes": Attack(
        source="import os\nfor _ in range(10_000): os.write(1, b'x')",
        ended=("exited",),
        says=lambda o: o.code == 0 and o.stdout == b"x" * 10_000,
    ),
    "stdout held open after the end": Attack(
        source="import os, time\nprint('done', flush=True)\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)",
        ended=("exited",),
        says=_said_done,
    ),
    "flood of stderr": Attack(
        source="import sys\nfor _ in range(64): sys.stderr.write('e' * 2**20)\nprint('done')",
        ended=("exited",),
        says=lambda o: _said_done(o) and len(o.stderr) == 64 * 1024,
    ),
    "stopping itself": Attack(
        source="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", ended=("timeout",), timeout_s=ENDLESS_S
    ),
    "a file that grows": Attack(
        source="with open('x', 'wb') as f:\n    while True: f.write(b'x' * 2**20)",
        ended=("exited",),
        says=lambda o: o.code == 1 and b"File too large" in o.stderr,
    ),
}
ALL = DEMANDED | OURS
