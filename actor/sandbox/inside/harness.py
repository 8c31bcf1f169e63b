"""Calls one function of a program: `harness.py FILE`, the call on descriptor 3, the result on descriptor 4, as JSON.

It shares a process with the program, which can write there what it likes: that is worth as much as returning it. What
the function should return is not known here.
"""

import builtins
import importlib
import inspect
import json
import os
import sys
import types
from typing import Any

STARTER = (
    "typing", "collections", "heapq", "bisect", "itertools", "functools", "math", "string", "re", "random", "datetime",
    "copy", "operator", "statistics",
)  # fmt: skip
"""Modules that LeetCode has imported for its starter code, each by its name and by the names in it."""


def main() -> None:
    """Loads the program under a name of its own, so that what stands under `__name__ == "__main__"` is not run."""
    with os.fdopen(3, "rb") as channel:
        call = json.loads(channel.read())
    file = sys.argv[1]
    sys.argv[:] = [file]
    sys.path[0] = os.getcwd()
    solution = types.ModuleType("solution")
    solution.__file__ = file
    sys.modules["solution"] = solution
    with open(file, encoding="utf-8") as source:
        code = compile(source.read(), file, "exec")
    solution.__dict__.update(starter(code))
    exec(code, solution.__dict__)
    found: Any = solution
    for name in call["function"].split("."):
        found = getattr(found() if inspect.isclass(found) else found, name)
    arguments, keywords = call["arguments"], call["keywords"]
    returned = found(**arguments) if isinstance(arguments, dict) else found(*arguments, **keywords)
    body = json.dumps({"result": returned}).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    while body:
        body = body[os.write(4, body) :]
    os._exit(0)  # a thread that was left running is no part of the result


def starter(code):
    """Names that a program uses and need not import, as the first of `STARTER` has them; builtins stay what they are.

    What the program defines or imports itself replaces them.
    """
    used, codes = set(), [code]
    while codes:
        one = codes.pop()
        used.update(one.co_names)
        codes += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    used -= set(dir(builtins))
    found = {}
    for name in STARTER:
        if not used:
            break
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
        for one in used & {*public, name}:
            found[one] = module if one == name else getattr(module, one)
        used -= set(found)
    return found


if __name__ == "__main__":
    main()
