import pytest

from actor.sandbox.program import Case, SandboxLimits


@pytest.mark.parametrize("name", ["memory_bytes", "cpu_s", "output_bytes", "compile_timeout_s"])
def test_limit_that_allows_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"SandboxLimits.{name} must be > 0, got 0"):
        SandboxLimits(**{name: 0})


def test_limit_of_processes_too_few_for_a_compiler_is_refused():
    with pytest.raises(ValueError, match="num_processes must be >= 4"):
        SandboxLimits(num_processes=3)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_case_without_a_timeout_is_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be"):
        Case(timeout_s=timeout_s)
