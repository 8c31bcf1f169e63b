import pytest

from configs.sections.actor import EnvironmentsConfig


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_turns", 0, "> 0"),
        ("max_turn_tokens", -1, ">= 0"),
        ("call_timeout_s", 0.0, "> 0"),
        ("episode_timeout_s", 0.0, "> 0"),
        ("max_processes", 0, "> 0"),
        ("max_memory_gib", 0.0, "> 0"),
        ("max_in_flight", -1, ">= 0"),
        ("truncated_reward", float("nan"), "finite"),
        ("truncated_reward", -2e6, r"in \[-1e.06, 1e.06\]"),
    ],
)
def test_environments_section_refuses_what_can_not_be(field, value, said):
    with pytest.raises(ValueError, match=rf"environments\.{field} must be {said}, got {value}"):
        EnvironmentsConfig(**{field: value})


def test_environments_section_has_no_limit_of_a_turn():
    assert EnvironmentsConfig(max_turn_tokens=0).max_turns == 8
