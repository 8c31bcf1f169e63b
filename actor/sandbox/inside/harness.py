"""Calls one function of a program: `harness.py FILE`, the call on descriptor 3, the result on descriptor 4, as JSON.

It shares a process with the program, which can write there what it likes: that is worth as much as returning it. What
the function should return is not known here.
"""

import inspect
import json
import os
import sys
import types
from typing import Any


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
        exec(compile(source.read(), file, "exec"), solution.__dict__)
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


if __name__ == "__main__":
    main()
