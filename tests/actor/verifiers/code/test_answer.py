import pytest

from actor.verifiers.code.answer import fenced, program_text

A, B, C = "print(1)\n", "print(2)\n", "int main() {}\n"


def block(body: str, name: str = "", marks: str = "```") -> str:
    return f"{marks}{name}\n{body}{marks}\n"


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
