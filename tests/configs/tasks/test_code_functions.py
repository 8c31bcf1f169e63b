import ast
import collections

from bridge import code_tests
from configs.tasks.code_functions import LOOP_SHARE, row

ROWS = [row(3, i) for i in range(400)]


def test_row_is_a_function_of_seed_and_index():
    assert [row(3, i) for i in range(400)] == ROWS
    assert row(4, 0) != row(3, 0)


def test_solution_of_each_row_returns_what_its_cases_want():
    """By Python itself: the rows' own numbers are made otherwise."""
    for made in ROWS:
        tests = code_tests.read(made["metadata"])
        assert tests.are_calls and len(tests.cases) == 3
        scope: dict = {}
        exec(compile(ast.parse(tests.solution), "solution", "exec"), scope)
        for case in made["metadata"]["tests"]:
            assert scope[case["call"]](*case["args"]) == case["returns"], made["prompt"]


def test_cases_tell_a_row_from_one_whose_number_is_another():
    """The cases of a question are passed by no other question's solution, but for loops that no case enters."""
    formulas = [made for made in ROWS if "while" not in made["prompt"]][:40]
    for made in formulas:
        for other in formulas:
            scope: dict = {}
            exec(other["metadata"]["solution"], scope)
            passes = all(scope["f"](*case["args"]) == case["returns"] for case in made["metadata"]["tests"])
            assert not passes or _same(made, other)


def _same(made, other) -> bool:
    """Some differ in words alone, as in "plus 1 plus 2" and "plus 2 plus 1"."""
    one, two = {}, {}
    exec(made["metadata"]["solution"], one)
    exec(other["metadata"]["solution"], two)
    return all(one["f"](x) == two["f"](x) for x in range(-500, 500))


def test_loops_are_a_part_of_the_rows():
    loops = collections.Counter("while" in made["prompt"] for made in ROWS)
    assert abs(loops[True] / len(ROWS) - LOOP_SHARE) < 0.1
