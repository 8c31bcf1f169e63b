import hashlib
import json

from learner.data.problem import is_held_out, task_of


def test_is_held_out_is_the_hash_of_the_stripped_text():
    for text in ("1 + 1 =", "zwölf", ""):
        number = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
        number = int.from_bytes(number.to_bytes(8, "big"), "little")
        for one_in in (2, 3, 10):
            assert is_held_out(text, one_in) == (number % one_in == 0)
            assert is_held_out(f"\n {text} ", one_in) == is_held_out(text, one_in)


def test_task_of_math_says_where_the_answer_is_beside_the_rows_metadata():
    task = task_of(3, {"math": 1.0}, answer_in="text", metadata={"tests": [1]})
    assert task.answer == "3" and json.loads(task.metadata) == {"tests": [1], "answer_in": "text"}
    assert json.loads(task_of("3", {"exact": 1.0}, answer_in="text").metadata) == {}
