"""Sums and differences of numbers below a hundred, in words: rows for verifier=math, with worked answers.

Each row draws its numbers up to a size, one of `SIZES`: a given one, for a curriculum, or a random one. A row is a
function of (seed, index, size). The pair of numbers alone decides whether it is held out, so training never sees the
pair in any wording. One in four held-out problems uses a wording of training (`TRAINED`), the others one of `UNSEEN`.
A recipe's settings are chosen by rows with wordings of `DEVELOPMENT`.
"""

import hashlib
import itertools
import random
from collections.abc import Mapping
from typing import Any

TRAINED: Mapping[str, tuple[str, str]] = {
    "what_is": ("What is {a} + {b}?", "What is {a} - {b}?"),
    "calculate": ("Calculate {a} + {b}.", "Calculate {a} - {b}."),
    "equation": ("{a} + {b} = ?", "{a} - {b} = ?"),
    "sum_of": ("What is the sum of {a} and {b}?", "What is the difference between {a} and {b}?"),
    "work_out": ("Work out {a} plus {b}.", "Work out {a} minus {b}."),
    "marbles": (
        "Tom has {a} marbles. He finds {b} more. How many marbles are there then?",
        "Tom has {a} marbles. He loses {b} of them. How many marbles are there then?",
    ),
    "pencils": (
        "Mia has {a} pencils. She buys {b} more. How many pencils does she have now?",
        "Mia has {a} pencils. She hands out {b}. How many pencils does she have now?",
    ),
    "birds": (
        "{a} birds sit in a tree and {b} more come. How many birds are there now?",
        "{a} birds sit in a tree and {b} fly off. How many birds are there now?",
    ),
    "put_or_take": ("Put {b} on top of {a}.", "Take {b} from {a}."),
    "increase_or_reduce": ("Increase {a} by {b}.", "Reduce {a} by {b}."),
    "larger_or_smaller": ("Which number is {b} larger than {a}?", "Which number is {b} smaller than {a}?"),
    "how_much": ("How much is {a} plus {b}?", "How much is {a} minus {b}?"),
    "add_or_subtract": ("Add {b} to {a}.", "Subtract {b} from {a}."),
    "apples": (
        "Ann has {a} apples and gets {b} more. How many apples has she now?",
        "Ann has {a} apples and gives {b} away. How many apples has she now?",
    ),
    "bus": (
        "{a} people are on a bus and {b} get on. How many people are on the bus?",
        "{a} people are on a bus and {b} get off. How many people are on the bus?",
    ),
    "tank": (
        "A tank holds {a} litres. {b} litres are poured in. How many litres does it hold?",
        "A tank holds {a} litres. {b} litres are drawn out. How many litres does it hold?",
    ),
    "ribbons": (
        "A red ribbon is {a} cm long and a blue one {b} cm. How long are both together?",
        "A red ribbon is {a} cm long and a blue one {b} cm. How much longer is the red one?",
    ),
    "chairs": (
        "There were {a} chairs in a room. Then {b} were brought in. How many are there?",
        "There were {a} chairs in a room. Then {b} were carried out. How many are there?",
    ),
    "more_or_less": ("What number is {b} more than {a}?", "What number is {b} less than {a}?"),
    "equals": ("{a} plus {b} equals what?", "{a} minus {b} equals what?"),
    "evaluate": ("Evaluate {a} + {b}.", "Evaluate {a} - {b}."),
    "total_or_gap": ("Give the total of {a} and {b}.", "Give the gap between {a} and {b}."),
    "tell_me": ("Tell me {a} plus {b}.", "Tell me {a} minus {b}."),
    "increased_or_decreased": ("What is {a} increased by {b}?", "What is {a} decreased by {b}?"),
    "more_or_without": ("{a} and {b} more make how many?", "{a} without {b} makes how many?"),
    "added_or_taken": ("{b} added to {a} gives what?", "{b} taken from {a} gives what?"),
    "bigger_or_smaller": ("Make {a} bigger by {b}.", "Make {a} smaller by {b}."),
    "get_or_give": (
        "If you have {a} and get {b}, what do you have?",
        "If you have {a} and give {b}, what do you have?",
    ),
    "age": ("Lina is {a}. How old is she in {b} years?", "Lina is {a}. How old was she {b} years ago?"),
    "school": (
        "There are {a} boys and {b} girls in a school. How many children are there?",
        "There are {a} children in a school, {b} of them girls. How many boys are there?",
    ),
    "rolls": (
        "A baker has {a} rolls and bakes {b} more. How many rolls are there?",
        "A baker has {a} rolls and sells {b}. How many rolls are left?",
    ),
    "degrees": (
        "It is {a} degrees and gets {b} degrees warmer. How warm is it?",
        "It is {a} degrees and gets {b} degrees colder. How warm is it?",
    ),
    "lift": (
        "A lift is on floor {a} and goes {b} floors higher. Which floor is it on?",
        "A lift is on floor {a} and goes {b} floors lower. Which floor is it on?",
    ),
    "points": (
        "Ben has {a} points and wins {b} more. What is his score?",
        "Ben has {a} points and {b} are taken off. What is his score?",
    ),
    "rope": (
        "A rope of {a} m is made {b} m longer. How long is it?",
        "A rope of {a} m is made {b} m shorter. How long is it?",
    ),
    "walk": (
        "Zoe walks {a} km, then {b} km further. How far did she walk?",
        "Zoe has walked {b} of {a} km. How far is it to the end?",
    ),
    "weight": (
        "A box of {a} kg gets {b} kg heavier. What does it weigh?",
        "A box of {a} kg gets {b} kg lighter. What does it weigh?",
    ),
    "class": (
        "A class has {a} pupils. {b} join. How many pupils are in it?",
        "A class has {a} pupils. {b} leave. How many pupils are in it?",
    ),
    "plums": (
        "Leo picks {a} plums and Eva {b}. How many have they?",
        "Leo picks {a} plums and Eva {b}. How many more has Leo?",
    ),
    "cars": (
        "{a} cars are in a lot and {b} drive in. How many cars are in the lot?",
        "{a} cars are in a lot and {b} drive out. How many cars are in the lot?",
    ),
    "sweets": (
        "A jar has {a} sweets. Kim puts {b} in. How many sweets are in the jar?",
        "A jar has {a} sweets. Kim eats {b}. How many sweets are in the jar?",
    ),
    "shelf": (
        "On a shelf are {a} books. Then {b} are put there. How many books are there?",
        "On a shelf are {a} books. Then {b} are lent out. How many books are there?",
    ),
}
"""Question wordings used in training, of a sum and of a difference, by name."""

DEVELOPMENT: Mapping[str, tuple[str, str]] = {
    "farm": (
        "A farm has {a} sheep and raises {b} more. How many sheep does it have?",
        "A farm has {a} sheep and trades {b} away. How many sheep does it have?",
    ),
    "after": ("After {a}, go {b} forward.", "After {a}, go {b} back."),
    "value": ("The value of {a} + {b} is what?", "The value of {a} - {b} is what?"),
    "level": (
        "The water level is {a} cm and rises by {b} cm. What is it now?",
        "The water level is {a} cm and falls by {b} cm. What is it now?",
    ),
    "combine": ("Combine {a} and {b}.", "Deduct {b} from {a}."),
}
"""Question wordings that are neither trained nor in `UNSEEN`, by name. Choose a recipe's settings by them."""

UNSEEN: Mapping[str, tuple[str, str]] = {
    "unknown": ("Let x = {a} + {b}. Find x.", "Let x = {a} - {b}. Find x."),
    "count_on": (
        "Start at {a} and count up by {b}. Where do you end?",
        "Start at {a} and count down by {b}. Where do you end?",
    ),
    "till": (
        "A shop has {a} euros in the till and takes in {b} euros. How many euros are in the till?",
        "A shop has {a} euros in the till and pays out {b} euros. How many euros are in the till?",
    ),
}
"""Question wordings used only for held-out pairs, by name. No setting was chosen by a response to them."""

SIZES = (9, 20, 50, 99)
"""Upper bounds of the numbers in a row."""

HELD_OUT_ONE_IN = 10
"""Inverse share of held-out pairs of numbers."""


def train_row(seed: int, index: int, *, size: int = 0) -> dict[str, Any]:
    """Returns a training row; size 0: a random one."""
    return _row(random.Random(f"train.{seed}.{size}.{index}"), TRAINED, size, is_held_out=False)


def held_out_row(
    seed: int, index: int, *, size: int = 0, unseen: Mapping[str, tuple[str, str]] = UNSEEN
) -> dict[str, Any]:
    """Returns a held-out row of an unseen wording or, as often as of each, of one of training; size 0: a random one."""
    turn, place = divmod(index, 1 + len(unseen))
    kinds = {"trained": list(TRAINED.values())[turn % len(TRAINED)], **unseen}
    kind = list(kinds)[place]
    return _row(random.Random(f"held_out.{seed}.{size}.{index}"), {kind: kinds[kind]}, size, is_held_out=True)


def worked_answer(a: int, sign: str, b: int) -> str:
    """Returns the answer in steps, one per line: first the tens of b, then its ones. The last number is the answer."""
    numbers = [n for n in (b // 10 * 10, b % 10) if n]
    values = list(itertools.accumulate(numbers, lambda x, n: x + n if sign == "+" else x - n, initial=a))
    return "\n".join(f"{x} {sign} {n} = {y}" for x, n, y in zip(values, numbers, values[1:], strict=False))


def _row(drawn: random.Random, kinds: Mapping[str, tuple[str, str]], size: int, *, is_held_out: bool) -> dict[str, Any]:
    size = size or drawn.choice(SIZES)
    while True:
        a, b = drawn.randint(1, size), drawn.randint(1, size)
        sign = drawn.choice("+-")
        if sign == "-":
            a, b = max(a, b), min(a, b)
        if _holds_out(a, sign, b) == is_held_out:
            break
    kind = drawn.choice(list(kinds))
    return {
        "prompt": kinds[kind][sign == "-"].format(a=a, b=b),
        "answer": a + b if sign == "+" else a - b,
        "response": worked_answer(a, sign, b),
        "metadata": {"kind": kind, "size": size},
    }


def _holds_out(a: int, sign: str, b: int) -> bool:
    """Returns True if the pair, in either order, is held out."""
    digest = hashlib.sha256(f"{min(a, b)}{sign}{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % HELD_OUT_ONE_IN == 0
