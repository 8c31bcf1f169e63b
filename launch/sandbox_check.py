"""Whether this machine can isolate programs, asked before anything starts that would run some."""

from actor.sandbox.isolation import check_isolation
from actor.sandbox.languages import LANGUAGES, program
from actor.sandbox.program import SandboxUnavailableError
from configs.schema import Config


def check_sandbox(config: Config) -> list[str]:
    """What to know of the sandboxes that the config's rewards need; nothing where they need none.

    Raises:
      ValueError: one line that says what is missing, and how to get it.
    """
    if "code" not in config.parts:
        return []
    try:
        found = check_isolation()
    except SandboxUnavailableError as e:
        raise ValueError(f"code rewards are refused: {e}") from e
    there = [name for name in LANGUAGES if found.tools.issuperset(program(name, "").tools)]
    return [f"code is judged in sandboxes: Python {found.python_version}; languages {', '.join(there)}"]
