import datetime

import pytest

from actor.rewards.verifiers.judge import retry_after_s

NOW = datetime.datetime(2026, 11, 23, 9, 0, 0, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("Mon, 23 Nov 2026 09:00:30 GMT", 30.0),
        ("Mon, 23 Nov 2026 08:59:30 GMT", 0.0),
        ("Mon, 23 Nov 2026 09:00:30 -0000", 30.0),
        (None, 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("-5", 0.0),
        ("1.5", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header, seconds):
    assert retry_after_s(header, NOW) == seconds
