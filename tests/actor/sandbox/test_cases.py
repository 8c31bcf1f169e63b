"""Programs in real sandboxes: cases one after the other, calls, compilers, the pool."""

import dataclasses
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import threading

import pytest

from actor.sandbox import languages
from actor.sandbox.bwrap import HostView
from actor.sandbox.pool import Sandbox
from actor.sandbox.program import (
    MIB,
    Call,
    Case,
    CompileError,
    LanguageError,
    Outcome,
    Program,
    SandboxError,
    SandboxLimits,
)
from tests.actor.sandbox.trap import processes_with
from tests.integration.support.processes import wait_until

pytestmark = pytest.mark.integration
PATIENT_S = 60.0

SOURCES = {
    "python": "print(sum(map(int, input().split())))",
    "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }',
    "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }",
    "go": 'package main\nimport "fmt"\nfunc main() { var a, b int; fmt.Scan(&a, &b); fmt.Println(a + b) }',
    "rust": (
        "use std::io;\nfn main() { let mut s = String::new(); io::stdin().read_line(&mut s).unwrap();\n"
        'println!("{}", s.split_whitespace().map(|x| x.parse::<i32>().unwrap()).sum::<i32>()); }'
    ),
    "java": (
        "import java.util.*;\npublic class Main { public static void main(String[] a) {\n"
        "Scanner s = new Scanner(System.in); System.out.println(s.nextInt() + s.nextInt()); } }"
    ),
    "javascript": (
        "console.log(require('fs').readFileSync(0, 'utf8').trim().split(' ').map(Number).reduce((a, b) => a + b))"
    ),
    "bash": "read a b; echo $((a + b))",
    "perl": "my ($a, $b) = split ' ', <STDIN>; print $a + $b, qq(\\n);",
    "ruby": "puts gets.split.sum(&:to_i)",
}
"""The sum of two numbers, in every language."""
LOOK = (
    "import os, sys\nif sys.stdin.read() == 'look':\n"
    "    print(sorted(os.listdir('.')), os.listdir('/tmp'), os.listdir('/dev/shm'), sorted(os.listdir('/scratch')),\n"
    "          sum(p.isdigit() for p in os.listdir('/proc')))\n    sys.exit()\n"
)
CLEAN = b"['main.py'] [] [] ['tmp', 'work'] 2\n"
LEAVINGS = {
    "files": "for p in ('.', '/tmp', '/dev/shm'): open(p + '/.hidden', 'w').write('x')",
    "another program": "open('main.py', 'w').write('print(1)')",
    "folders without rights": "os.makedirs('/tmp/a/b/c')\nfor p in ('/tmp/a/b', '/tmp/a', '.'): os.chmod(p, 0)",
    "a deep tree": ("for i in range(5000):\n    os.mkdir('d'); open('f', 'w').close(); os.chdir('d')"),
    "links and FIFOs": "os.symlink('/usr', 'l'); os.symlink('.', '/tmp/loop'); os.mkfifo('/tmp/f')",
    "many files": "for i in range(10_000): open(f'/tmp/{i}', 'w').close()",
    "places taken away": "for p in ('/scratch', '/dev/shm', '/scratch/work', '/scratch/tmp'):\n"
    "    try: os.chmod(p, 0)\n    except OSError: pass",
    "a process": "if os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(1000)",
}


def python(source: str, **options) -> Program:
    return languages.program("python", source, **options)


def run(sandbox: Sandbox, program: Program, **case) -> Outcome:
    (outcome,) = sandbox.run(program, [Case(timeout_s=case.pop("timeout_s", PATIENT_S), **case)])
    return outcome


@pytest.mark.parametrize("name", SOURCES)
def test_language_that_is_there_adds_two_numbers(sandbox: Sandbox, name: str):
    program = languages.program(name, SOURCES[name])
    if missing := [tool for tool in program.tools if tool not in sandbox.tools()]:
        with pytest.raises(LanguageError, match=missing[0]), sandbox.open(program):
            pass
        pytest.skip(f"{name}: the sandbox lacks {missing[0]}")
    outcomes = list(
        sandbox.run(program, [Case(timeout_s=PATIENT_S, stdin=b"19 23\n"), Case(timeout_s=PATIENT_S, stdin=b"1 2\n")])
    )
    assert [(o.ended, o.code, o.stdout) for o in outcomes] == [("exited", 0, b"42\n"), ("exited", 0, b"3\n")]


def test_every_language_has_a_source_here():
    assert set(SOURCES) == set(languages.LANGUAGES)


def test_program_that_does_not_compile_is_an_error_of_its_own(sandbox: Sandbox):
    if "gcc" not in sandbox.tools():
        pytest.skip("the sandbox lacks gcc")
    with pytest.raises(CompileError) as caught, sandbox.open(languages.program("c", "int main( { }")):
        pass
    assert b"error" in caught.value.outcome.stderr and caught.value.outcome.code == 1


def test_compiler_that_leaves_no_plain_files_ends_the_program_alone(sandbox: Sandbox):
    program = Program(
        files={"make.sh": b"mkfifo out; ln -s /etc/passwd link; ln -s / root; echo 'echo done' > main.sh"},
        compile_argv=("bash", "make.sh"),
        argv=("bash", "-c", "ls; bash main.sh"),
    )
    assert run(sandbox, program).stdout == b"main.sh\nmake.sh\ndone\n"


def test_compiler_whose_output_is_too_large_is_the_programs_fault(isolated):
    program = Program(files={"a": b"x"}, compile_argv=("bash", "-c", "yes | head -c 6000000 > b; cp b c"), argv=("ls",))
    with Sandbox(SandboxLimits(disk_bytes=10 * MIB), num_warm=1) as one, pytest.raises(CompileError), one.open(program):
        pass


@pytest.mark.parametrize("left", LEAVINGS)
def test_case_finds_nothing_of_what_the_one_before_left(sandbox: Sandbox, left: str):
    program = python(LOOK + LEAVINGS[left])
    with sandbox.open(program) as box:
        before = box.run(Case(timeout_s=PATIENT_S, stdin=b"look"))
        process = box._process
        leaves = box.run(Case(timeout_s=PATIENT_S))
        after = box.run(Case(timeout_s=PATIENT_S, stdin=b"look"))
        # Not because it was thrown away; but where a user's program takes away what its user owns, nothing else helps.
        assert box._process is process or left == "places taken away"
    assert (before.stdout, leaves.succeeded, after.stdout) == (CLEAN, True, CLEAN), (before, leaves, after)


def test_case_after_one_that_ran_out_of_time_has_the_same_sandbox(sandbox: Sandbox):
    with sandbox.open(python("text = input()\nwhile text == 'slow': pass\nprint(1)")) as box:
        process = box._process
        assert box.run(Case(timeout_s=1.0, stdin=b"slow")).ended == "timeout"
        assert box.run(Case(timeout_s=PATIENT_S, stdin=b"quick")).stdout == b"1\n"
        assert box._process is process


def test_many_cases_share_a_sandbox_and_are_run_when_asked_for(sandbox: Sandbox):
    asked = []

    def cases():
        for i in range(5):
            asked.append(i)
            yield Case(timeout_s=PATIENT_S, stdin=b"%d 1" % i)

    started = sandbox.num_started
    outcomes = sandbox.run(python(SOURCES["python"]), cases())
    assert [next(outcomes).stdout for _ in range(3)] == [b"1\n", b"2\n", b"3\n"] and asked == [0, 1, 2]
    outcomes.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert sandbox.num_started - started <= 1


@pytest.mark.parametrize(
    ("source", "call", "result"),
    [
        ("def add(a, b=1): print('noise'); return a + b", Call(function="add", arguments=[2]), 3),
        ("def add(a, b=1): return a + b", Call(function="add", arguments={"b": 5, "a": 1}), 6),
        ("class S:\n    def twice(self, x): return [x, x]", Call(function="S.twice", arguments=["y"]), ["y", "y"]),
        ("def f(x): return (x, None)", Call(function="f", arguments=[{"k": [1.5]}]), [{"k": [1.5]}, None]),
        ("if __name__ == '__main__': 1 / 0\ndef f(): return 'ö'", Call(function="f", arguments=[]), "ö"),
        ("import sys\ndef f(): return sys.stdin.read()", Call(function="f", arguments=[]), "input"),
        ("def f(xs): return sum(xs)", Call(function="f", arguments=[list(range(200_000))]), sum(range(200_000))),
        ("import array\ndef f(): return [array.array('i', [1, 2])]", Call(function="f", arguments=[]), [[1, 2]]),
        ("def f(): return [0] * 500_000", Call(function="f", arguments=[]), [0] * 500_000),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()\ndef f(): return 1",
         Call(function="f", arguments=[]), 1),
    ],
)  # fmt: skip
def test_call_gives_what_the_function_returned(sandbox: Sandbox, source: str, call: Call, result: object):
    outcome = run(sandbox, python(source, calls=True), call=call, stdin=b"input")
    assert outcome.succeeded, outcome
    assert outcome.result() == result


NO_RESULT = {
    "raises": "def f(): raise ValueError('no')",
    "is not there": "def g(): pass",
    "is no JSON": "def f(): return {1, 2}",
    "ends the process": "import os\ndef f(): os._exit(0)",
    "exits": "import sys\ndef f(): sys.exit(0)",
    "says two things": "import os\ndef f(): os.write(4, b'{\"result\": 1}'); return 1",
    "says something else": 'import os\ndef f(): os.write(4, b\'{"result": 1, "verdict": "ok"}\'); os._exit(0)',
    "says no object": "import os\ndef f(): os.write(4, b'1'); os._exit(0)",
    "says garbage": "import os\ndef f(): os.write(4, bytes(range(256))); os._exit(0)",
    "nests deeply": "import os\ndef f():\n    for _ in range(100): os.write(4, b'[' * 10_000)\n    os._exit(0)",
    "is a number without end": "import os\ndef f(): os.write(4, b'{\"result\": ' + b'9' * 60_000 + b'}'); os._exit(0)",
    "forges the host's frames": f"import os\ndef f(): os.write(4, {struct.pack('>II', 2**32 - 1, 5)!r}); os._exit(0)",
}


@pytest.mark.parametrize("how", NO_RESULT)
def test_call_without_a_result_has_none(sandbox: Sandbox, how: str):
    outcome = run(sandbox, python(NO_RESULT[how], calls=True), call=Call(function="f", arguments=[]))
    assert outcome.ended == "exited"
    with pytest.raises(ValueError, match="could not be decoded"):
        outcome.result()


def test_result_without_end_is_ended(sandbox: Sandbox):
    source = "import os\ndef f():\n    while True: os.write(4, b'x' * 65536)"
    outcome = run(sandbox, python(source, calls=True), call=Call(function="f", arguments=[]))
    assert outcome.ended == "output" and len(outcome.returned) < 2 * sandbox.limits.output_bytes


def test_case_with_a_call_for_a_program_without_is_refused(sandbox: Sandbox):
    with sandbox.open(python("pass")) as box, pytest.raises(ValueError, match="calls=True"):
        box.run(Case(timeout_s=1.0, call=Call(function="f", arguments=[])))


def test_standard_streams_can_be_opened_by_name(sandbox: Sandbox):
    copies = "read = open('/dev/stdin').read()\nfor to in ('out', 'err'): open('/dev/std' + to, 'w').write(read)"
    outcome = run(sandbox, python(copies), stdin=b"1 2")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, b"1 2", b"1 2")


def test_large_input_that_nobody_reads_and_that_everybody_reads(sandbox: Sandbox):
    big = bytes(20 * MIB)
    assert run(sandbox, python("print('done')"), stdin=big).stdout == b"done\n"
    assert run(sandbox, python("import sys; print(len(sys.stdin.buffer.read()))"), stdin=big).stdout == b"20971520\n"


def test_cpu_time_over_its_bound_is_told_apart(isolated):
    with Sandbox(SandboxLimits(cpu_s=1), num_warm=1) as one:
        assert run(one, python("while True: pass")).ended == "cpu"


def test_processes_of_one_sandbox_do_not_count_in_another(isolated):
    forks = (
        "import os, time\ntry:\n    for i in range(100):\n        if os.fork() == 0: time.sleep(1000)\n"
        "except OSError: print(i)\n"
    )
    wait = "import sys\nsys.stdin.read()\ntime.sleep(1.0)"
    counts: list[bytes] = []
    with Sandbox(SandboxLimits(num_processes=20), num_warm=3) as one:
        threads = [
            threading.Thread(target=lambda: counts.append(run(one, python(forks + wait)).stdout)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [b"19\n"] * 3


def test_language_nobody_knows_is_an_error_of_the_row():
    with pytest.raises(LanguageError, match=r"language: expected one of bash, c, cpp, .*, got 'cobol'"):
        languages.program("cobol", "")
    with pytest.raises(LanguageError, match="only in python"):
        languages.program("c", "", calls=True)


def test_language_name_in_any_spelling_is_known():
    assert languages.program(" C++ ", "x").files == {"main.cpp": b"x"}


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a//b", "", "a/./b", "a\0b"])
def test_program_file_that_leads_out_is_refused(name: str):
    with pytest.raises(ValueError, match="plain relative path"):
        Program(files={name: b""}, argv=("ls",))


def test_waiting_sandbox_that_was_killed_is_replaced_and_no_case_is_blamed(isolated):
    with Sandbox(num_warm=1) as one:
        one.tools()
        for kill in ("outer", "inner"):
            wait_until(lambda: len(one._warm) == 1, "one waits")
            process = one._warm[0]
            os.kill(process._process.pid if kill == "outer" else process._inner_pid, signal.SIGKILL)
            wait_until(lambda process=process: not process.is_alive, "it is gone")
            assert run(one, python("print(1)")).stdout == b"1\n"
        assert one.num_broken == 2


def test_sandbox_that_breaks_as_it_takes_the_program_is_replaced(isolated, monkeypatch):
    with Sandbox(num_warm=1) as one:
        taken = one._take

        def take_and_kill():
            process = taken()
            if not one.num_broken:
                os.kill(process._inner_pid, signal.SIGKILL)
            return process

        monkeypatch.setattr(one, "_take", take_and_kill)
        assert run(one, python("print(1)")).stdout == b"1\n" and one.num_broken == 1


def test_sandbox_killed_under_a_program_is_replaced_and_the_case_runs_in_the_new_one(isolated):
    with Sandbox(num_warm=1) as one, one.open(python("import time\ntime.sleep(1)\nprint(1)")) as box:
        process = box._process
        assert process is not None
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(box.run(Case(timeout_s=PATIENT_S))))
        thread.start()
        children = pathlib.Path(f"/proc/{process._inner_pid}/task/{process._inner_pid}/children")
        wait_until(lambda: bool(children.read_text()), "the program runs")
        os.kill(process._inner_pid, signal.SIGKILL)
        thread.join()
        assert [o.stdout for o in outcomes] == [b"1\n"] and box._process is not process and one.num_broken == 1


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_program_that_the_machine_killed_for_memory_is_run_again_and_one_that_killed_itself_is_not(
    isolated, monkeypatch, out_of_memory
):
    counts = iter([3, 4, 4, 4] if out_of_memory else [3, 3])

    class Counter:
        def read_text(self) -> str:
            return f"nr_free_pages 1\noom_kill {next(counts)}\n"

    monkeypatch.setattr("actor.sandbox.process._VMSTAT", Counter())
    with Sandbox(num_warm=1) as one:
        outcome = run(one, python("import os\nos.kill(os.getpid(), 9)"))
        assert (outcome.ended, outcome.code) == ("signal", signal.SIGKILL)
        assert one.num_broken == int(out_of_memory) and next(counts, None) is None


def test_pool_that_can_start_nothing_says_why_and_blames_no_program(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with Sandbox(num_warm=1) as one, pytest.raises(SandboxError, match="not installed"):
        run(one, python("print(1)"))


def test_closed_pool_leaves_no_process(isolated):
    with (
        Sandbox(num_warm=2) as one,
        one.open(dataclasses.replace(python("print(1)"), argv=("python3", "main.py"))) as box,
    ):
        box.run(Case(timeout_s=PATIENT_S))
        wait_until(lambda: len(one._warm) == 2, "two wait")
        ours = [p._inner_pid for p in one._warm] + [box._process._inner_pid]  # pyright: ignore[reportOptionalMemberAccess]
        assert all(os.path.exists(f"/proc/{pid}") for pid in ours)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ours)
    assert processes_with("nothing-has-this-mark") == []


def test_program_runs_on_the_python_that_was_asked_for_without_our_packages(isolated):
    path = getattr(sys, "_base_executable", sys.executable)
    source = "import sys, importlib.util as u; print(sys.base_prefix, u.find_spec('msgspec'), u.find_spec('actor'))"
    with Sandbox(num_warm=1, view=HostView(python=path)) as one:
        assert run(one, python(source)).stdout.decode().split() == [sys.base_prefix, "None", "None"]


def test_compiler_in_a_folder_of_its_own_is_found(isolated):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        (folder / "bin").mkdir()
        (folder / "bin" / "ruby").write_text("#!/bin/bash\necho as ruby: $(cat $1)\n")
        (folder / "bin" / "ruby").chmod(0o755)
        with Sandbox(num_warm=1, view=HostView(read_only_paths=(name,))) as one:
            assert run(one, languages.program("ruby", "x")).stdout == b"as ruby: x\n"


@pytest.mark.parametrize("path", ["opt/go", "/tmp/go", "/var/../tmp/go", "/scratch"])
def test_compiler_in_a_folder_that_a_sandbox_has_itself_is_refused(path):
    with pytest.raises(ValueError, match="a path of HostView must be absolute"):
        HostView(read_only_paths=(path,))


def test_runtime_that_reserves_memory_is_not_held_by_a_soft_bound_of_who_started_the_sandbox(isolated):
    """As a verifier's worker has one."""
    script = """
import dataclasses, resource
from actor.sandbox import languages
from actor.sandbox.pool import Sandbox
from actor.sandbox.program import Case
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (2**32, hard))
source = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])"
program = dataclasses.replace(languages.program("python", source), reserves_memory=True)
with Sandbox(num_warm=1) as sandbox, sandbox.open(program) as box:
    print(hard, box.run(Case(timeout_s=60.0)).stdout.decode())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    hard, inside = ran.stdout.split()
    assert inside == hard
