import pytest

from actor.rewards.verifiers.code import limits_of
from actor.rewards.verifiers.code_block import fenced, program_text
from configs.sections import RewardsConfig

A, B, C = "print(1)\n", "print(2)\n", "int main() {}\n"


def block(body: str, name: str = "", marks: str = "```") -> str:
    return f"{marks}{name}\n{body}{marks}\n"


@pytest.mark.parametrize(("max_timeout_s", "cpu_s"), [(30.0, 60), (90.5, 92)])
def test_limits_leave_cpu_time_for_the_longest_timeout(max_timeout_s, cpu_s):
    assert limits_of(RewardsConfig(max_timeout_s=max_timeout_s)).cpu_s == cpu_s


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"First {block(A, 'python')} then\n{block(B, 'Python3')} done", B),
        (f"so:\n{block(A, 'py')}{block(B)}", A),  # one that is named goes before one that is not
        (f"so:\n{block(A)}and\n{block(B)}{block(C, 'cpp')}", B),
        (f"so:\n{block(A, 'text')}", A),  # the only one
        (f"so:\n{block(A, 'text')}{block(B, 'cpp')}", None),
        ("print(1)", None),
        ("", None),
        (f"```python\n{A}", A),  # cut off
        (f"{block(A, 'python')}```python\n", A),  # an empty one is none
        (f"~~~python\n{A}```\n{B}~~~\n", f"{A}```\n{B}"),
        (block(A + block(B), "python", "````"), A + block(B)),
        ("inline ```python``` is none", None),
        ("```python title=x\nprint(1)\n```", A),
    ],
)
def test_program_of_a_response_is_its_last_block_of_the_language_or_the_only_one(text, want):
    assert program_text(text.replace("First ```", "First\n```"), "python", "block") == want


def test_program_in_text_is_the_whole_of_it():
    assert program_text(A, "python", "text") == A
    assert program_text(" \n", "python", "text") is None


@pytest.mark.parametrize("program", [A, "x = '''\n```python\nno\n```\n'''\n", "# ````\n", "x"])
def test_fenced_program_comes_out_as_it_was(program):
    found = program_text(fenced(program, "python"), "python", "block")
    assert found is not None and found.rstrip("\n") == program.rstrip("\n")


SUM = "def add(a, b):\n    return a + b\n"
DEMO = "print(add(1, 2))\n"
OTHER = "def add(a, b):\n    return a - b\n"
SPOILT = "def add(a, b):\n    return a + (\n"
LAMBDA = "add = lambda a, b: a + b\n"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"


@pytest.mark.parametrize("opened", ["<answer>```python\n", "<answer>\n```python\n"])
def test_block_on_the_lines_of_an_answers_tags_is_the_program(opened):
    assert program_text(f"I think.\n{opened}{A}```</answer>", "python", "block") == A


@pytest.mark.parametrize(
    ("blocks", "want"),
    [
        ([SUM, DEMO], SUM),
        ([SUM, DEMO, "assert add(1, 2) == 3\n"], SUM),
        ([OTHER, SUM, DEMO], SUM),  # the corrected one
        ([SUM, OTHER], OTHER),  # a right one that was taken back
        ([LAMBDA, DEMO], LAMBDA),
        ([METHOD, "s = Solution()\nassert s.add(1, 2) == 3\n"], METHOD),
        ([SUM, SPOILT], SPOILT),  # no Python, and the last
        ([DEMO, "x = 1\n"], "x = 1\n"),  # none has it: the last
    ],
)
def test_block_that_defines_what_is_called_is_the_program_and_a_demonstration_is_not(blocks, want):
    text = "\n".join(block(one, "python") for one in blocks)
    assert program_text(text, "python", "block", functions=["add"]) == want


def test_method_of_a_class_is_found_by_its_path():
    one, other = "class A:\n    def f(self): return 1\n", "class B:\n    def f(self): return 2\n"
    assert program_text(block(one, "python") + block(other, "python"), "python", "block", functions=["A.f"]) == one


def test_unmarked_block_with_the_function_goes_before_a_marked_one_without():
    assert program_text(block(SUM) + block(DEMO, "python"), "python", "block", functions=["add"]) == SUM


@pytest.mark.parametrize(
    ("blocks", "want"),
    [
        (["import math\n", "def area(r):\n    return math.pi * r\n", "print(area(1))\n"], [0, 1]),
        (["def one(): return 1\n", "def area(r): return one() + two()\n", "def two(): return one()\n"], [0, 2, 1]),
        # `n` and `half` are the function's own.
        (["n = int(input())\n", "def area(n):\n    half = n / 2\n    return half\n", "half = area(n)\n"], [1]),
        (["K = 3\n", "K = 4\n", "def area(r):\n    return K * r\n"], [1, 2]),  # the nearest
        (["@cache\ndef f(): return 1\n", "def area(r): return f()\n", "from functools import cache\n"], [0, 2, 1]),
    ],
)
def test_definitions_that_the_program_lacks_are_put_before_it(blocks, want):
    text = "\n".join(block(one, "python") for one in blocks)
    found = program_text(text, "python", "block", functions=["area"])
    assert found == "".join(blocks[i] for i in want)


@pytest.mark.parametrize(
    ("language", "program", "demonstration"),
    [
        ("python", "print(2 * int(input()))\n", "print(2 * 3)\n"),
        ("python", "import sys\nprint(sys.stdin.read())\n", "# 3\n# 6\n"),
        ("python", "for line in open(0):\n    print(line)\n", ">>> solve(3)\n6\n"),
        ("cpp", "int main() { }\n", "std::cout << 6;\n"),
        ("javascript", "console.log(require('fs').readFileSync(0))\n", "console.log(6)\n"),
    ],
)
def test_block_that_reads_is_the_program_where_there_is_input(language, program, demonstration):
    text = block(program, language) + "For example:\n" + block(demonstration, language)
    assert program_text(text, language, "block", reads=True) == program
    assert program_text(text, language, "block") == demonstration


@pytest.mark.parametrize(
    "program",
    [
        "print(int(input())+1)\n",
        "import sys\ndef main():\n    print(sys.stdin.readline())\nmain()\n",
        "import sys as s\nprint(s.stdin.read())\n",
        "from sys import stdin\nprint(stdin.read())\n",
        "read = input\nprint(read())\n",
        "def solve(input):\n    return input\nprint(solve(input()))\n",
        "import os\nprint(os.read(0, 99))\n",
        "import sys\nif 0:\n    sys.stdin = open('a')\nprint(input())\n",
        "print(int(input())\n",  # does not parse
    ],
)
@pytest.mark.parametrize(
    "demonstration",
    [
        "import io, sys\nsys.stdin = io.StringIO('3')\nmain()\n",
        "import io, sys\nold = sys.stdin\nsys.stdin = io.StringIO('3')\nmain()\nsys.stdin = old\n",
        "# input: 3 -> prints 3\nprint(3)\n",
        "'''reads stdin by input()'''\nprint(3)\n",
        "input = '3'\nprint(solve(input))\n",
        "p = subprocess.Popen(['a'], stdin=PIPE)\np.stdin.write('3')\n",
        "with patch('builtins.input', lambda: '3'):\n    main()\n",
    ],
)
def test_block_that_names_input_or_puts_another_in_its_place_is_a_demonstration(program, demonstration):
    text = block(program, "python") + "Try it:\n" + block(demonstration, "python")
    assert (program_text(text, "python", "block", reads=True) or "").endswith(program)


@pytest.mark.parametrize(
    "program",
    [
        "try:\n    from lib import add\nexcept ImportError:\n    def add(a, b):\n        return a + b\n",
        "try:\n    import x\n    print(x)\nexcept ImportError:\n    def add(a, b):\n        return a + b\n",
        "if True:\n    def add(a, b):\n        return a + b\nelse:\n    add = None\n",
        "with open('a'):\n    def add(a, b):\n        return a + b\n",
        "if True:\n    class Solution:\n        def add(self, a, b):\n            return a + b\n",
    ],
)
def test_definition_within_another_statement_is_found(program):
    text = block(program, "python") + block(DEMO, "python")
    assert program_text(text, "python", "block", functions=["add"]) == program


def test_program_in_two_blocks_that_reads_is_put_together():
    text = block(SUM, "python") + block("print(add(int(input()), 1))\n", "python")
    assert program_text(text, "python", "block", reads=True) == f"{SUM}print(add(int(input()), 1))\n"


FENCES = [("", ""), ("   ", "   "), ("      ", "      "), ("1. ", "   "), ("- ", "  "), ("  * ", "    "), ("> ", "> "),
          ("> - ", ">   "), ("12) ", "    "), ("\t", "\t")]  # fmt: skip
"""Pairs: text before the fence, text before the lines that follow it."""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("before", "after"), FENCES)
def test_fence_within_a_list_or_a_quotation_takes_its_indentation_along(before, after, end):
    program = "if 1:\n    x = '''\n  two'''\n\n    print(x)\n"
    lines = [f"{before}```python", *(f"{after}{line}" if line else "" for line in program.splitlines()), f"{after}```"]
    assert program_text(end.join(["So:", "", *lines, "", "Done."]), "python", "block") == program


def test_fence_whose_lines_are_less_indented_than_it_keeps_them_whole():
    assert program_text("   ```python\nif 1:\n    print(1)\n```", "python", "block") == "if 1:\n    print(1)\n"


@pytest.mark.parametrize("piece", ["```", "```python\n", "~~~\n", "> ", "- ", "1. ", " ", "\r\n", "(", "def f(", "1+"])
@pytest.mark.parametrize("before", ["", "```python\n"])
def test_text_without_end_is_read_in_a_time_that_grows_as_it_does(before, piece):
    """A quadratic step would take hours of these."""
    program_text(before + piece * (1_000_000 // len(piece)), "python", "block", functions=["add"], reads=True)


@pytest.mark.parametrize("piece", ["(", "-", "1+", "lambda:", "x=", "[", "f(", "if 1:\n", "a.", "not ", "x if 1 else "])
def test_block_as_long_as_is_parsed_is_read_whatever_it_nests(piece):
    text = block(piece * (190_000 // len(piece)) + "\n" + SUM, "python") + block(DEMO, "python")
    program_text(text, "python", "block", functions=["add"], reads=True)
