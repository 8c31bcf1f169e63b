"""Checks that sections of a configuration share."""

from bridge.types import MAX_TEMPERATURE, MIN_TEMPERATURE


def positive(section: str, **values: float | None) -> None:
    """Refuses values that are given and not above 0.

    Raises:
      ValueError: names the field.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{section}.{name} must be > 0, got {value}")


def temperature(section: str, value: float) -> None:
    """Refuses a sampling temperature at which vLLM does not sample as it is told.

    Raises:
      ValueError: names the field.
    """
    if not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        raise ValueError(
            f"{section}.temperature must be in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}] (vLLM raises what is lower to "
            f"{MIN_TEMPERATURE}, and refuses what is higher), got {value}"
        )


def not_negative(section: str, **values: float | None) -> None:
    """Refuses values that are given and below 0.

    Raises:
      ValueError: names the field.
    """
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{section}.{name} must be >= 0, got {value}")


def is_core_list(text: str) -> bool:
    """Whether it is like "0", "0-3" or "0,2-3"."""
    bounds = [part.split("-") for part in text.split(",")]
    return all(len(b) <= 2 and all(n.strip().isdecimal() for n in b) and int(b[0]) <= int(b[-1]) for b in bounds)
