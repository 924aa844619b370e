"""Numbers in tables."""

from __future__ import annotations

import pytest

from raycl.text_tables import short_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512, "512"),
        (1234, "1.23k"),
        (999_499, "999k"),
        (999_600, "1M"),
        (134_600_000, "135M"),
        (999_900_000, "1B"),
    ],
)
def test_a_number_has_three_digits_and_a_unit(value: float, text: str) -> None:
    assert short_number(value) == text
