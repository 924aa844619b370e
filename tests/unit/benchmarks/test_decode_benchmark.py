"""`python jobs/benchmark.py decode` with a tiny model: its figures are there, and their ratios fit each other."""

from __future__ import annotations

import argparse

import pytest
from tiny import Lab

from benchmarks.command import BENCHMARKS
from benchmarks.serving import decode


def test_figures_are_measured(lab: Lab) -> None:
    assert BENCHMARKS["decode"] == decode.__name__
    parser = argparse.ArgumentParser()
    decode.add_flags(parser)
    words = ["--backbone", str(lab.model_folder("llama")), "--streams", "1", "3", "--tokens", "4", "--rounds", "1"]
    report = decode.measure(parser.parse_args([*words, "--system-tokens", "6", "--threads", "1"]))
    figures = {figure.name: figure for figure in report.figures}
    assert all(figure.value > 0 for figure in report.figures)
    one, three = (figures[f"{name}: bare over generate, one text after another"] for name in ("1 stream", "3 streams"))
    assert (one.target, three.target) == (1.0, 4.0) and "by processor time" in three.detail
    rates = figures["3 streams: bare backbone"].value / figures["3 streams: generate, one text after another"].value
    assert three.value == pytest.approx(rates)
    assert figures["3 streams: time under mixtures over bare"].target == 1.15
    shared, new = (figures[f"first token, {name} system prompt"].value for name in ("shared", "new"))
    assert figures["first token, shared over new system prompt"].value == pytest.approx(shared / new)
