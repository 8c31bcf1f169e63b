"""Harness that calls one function: `harness.py FILE`, call on descriptor 3, result on descriptor 4, as JSON.

The program shares this process and can write any result itself, which is equivalent to returning it. The expected
result is not available here.
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
"""Modules that LeetCode imports for its starter code, by module name and by the names in each."""


def main() -> None:
    """Runs the program as a module not named `__main__`, calls the function and writes its result."""
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
    # NumPy's scalars and arrays have no JSON form, but become numbers and lists.
    body = json.dumps({"result": returned}, default=lambda value: value.tolist()).encode()
    sys.stdout.flush()
    sys.stderr.flush()
    while body:
        body = body[os.write(4, body) :]
    os._exit(0)  # ignore threads that still run


def starter(code):
    """Returns undefined names of a program that modules of `STARTER` have, the first module first; not builtins."""
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
