"""Tests that a growing bank's cost is held against a limit, and that what sharp attention leaves out is counted."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.growth import LIMITS, measure


def test_sapts_times_have_a_limit_and_sharp_attention_activates_few_adapters() -> None:
    sizes = {"tasks": [5, 1], "batch_size": 4, "rounds": 1, "threads": 1, "router": "discriminant"}
    report = measure(Namespace(**sizes, method="sapt", sharpness=30.0))
    figures = {figure.name: figure for figure in report.figures}
    limits = [figures[f"5 tasks: time per {what} over 1 tasks'"].target for what in ("step", "answer")]
    assert limits == list(LIMITS["sapt"])
    assert figures["1 tasks: adapters active in a batch"].value == 1
    assert 1 <= figures["5 tasks: adapters active in a batch"].value < 5
    assert figures["5 tasks: slots, on the device"].value > figures["1 tasks: slots, on the device"].value
