"""`python jobs/benchmark.py predict` with few rows: its figures are there, and both sides answered the same texts."""

from __future__ import annotations

import argparse

from benchmarks.serving import predict


def test_figures_are_measured() -> None:
    parser = argparse.ArgumentParser()
    predict.add_flags(parser)
    words = ["--rows", "40", "--rounds", "1", "--adapters", "2", "--batch", "8", "--threads", "1"]
    report = predict.measure(parser.parse_args(words))
    values = {figure.name: figure.value for figure in report.figures}
    assert values["rows per second"] > 0 and values["the model's own batch loop"] > 0
    assert values["predict over the loop"] == values["rows per second"] / values["the model's own batch loop"]
