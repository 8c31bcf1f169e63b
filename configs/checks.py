"""Checks that sections of a configuration share."""


def positive(section: str, **values: float | None) -> None:
    """Refuses values that are given and not above 0.

    Raises:
      ValueError: names the field.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{section}.{name} must be > 0, got {value}")


def not_negative(section: str, **values: float | None) -> None:
    """Refuses values that are given and below 0.

    Raises:
      ValueError: names the field.
    """
    for name, value in values.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{section}.{name} must be >= 0, got {value}")
