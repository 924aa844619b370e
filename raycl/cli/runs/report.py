"""Print matrices, routing, attention, kept rows, a comparison of finished runs and its verdicts; also as pictures.

Runs that differ in their seeds alone have one matrix: mean ± standard deviation. Verdicts say which methods are better
or worse than a reference, by default the one with the highest AP, and what the runs do not decide.

raycl report runs/sapt runs/lora
raycl report runs --png matrices.png --latex tables.tex
raycl report runs --against lora --measure ap f_ra
raycl report runs --html report.html
raycl report runs --csv comparison.csv --matrix-csv matrices.csv --runs-csv runs.csv
raycl report runs/slm --router-png router.png
raycl report runs/sapt --attention-png attention.png
raycl report docs/results/methods-long8.csv --html methods.html
"""

import argparse
from pathlib import Path

from raycl.cli.commands import INSTALLED, note, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", help="run folder, folder of runs, results.json (path or URI), or files of --runs-csv"
    )
    parser.add_argument("--against", metavar="NAME", help="the reference of verdicts (default: the highest AP)")
    parser.add_argument(
        "--measure",
        nargs="+",
        action="extend",
        choices=("ap", "f_ra"),
        default=[],
        help="what verdicts are about (default: ap)",
    )
    parser.add_argument("--html", type=Path, help="write one page with all tables and pictures, which needs no network")
    parser.add_argument("--png", type=Path, help="draw the matrices as heat maps, in rows")
    parser.add_argument("--each", action="store_true", help="the tables of each run, those of several seeds too")
    parser.add_argument(
        "--router-png", type=Path, help="draw the routers of the runs that have one: keys, t-SNE, tasks found"
    )
    parser.add_argument(
        "--attention-png", type=Path, help="draw the adapters' weights for each task's texts in runs of sapt"
    )
    parser.add_argument("--latex", type=Path, help="write every printed table for LaTeX, with booktabs' rules")
    parser.add_argument("--csv", type=Path, help="write the comparison and its verdicts, with full precision")
    parser.add_argument("--matrix-csv", type=Path, help="write one line a cell of the matrices, with full precision")
    parser.add_argument("--runs-csv", type=Path, help="write one line a run, with full precision")


def run(options: argparse.Namespace) -> int:
    """Print the tables, write the files."""
    recorded = [root for root in options.runs if root.endswith(".csv")]
    if recorded:
        return _recorded(options, recorded)
    from raycl.metrics.run_results import FOLDER, find_results

    results = [result for root in options.runs for result in find_results(root)]
    results = list({result[FOLDER]: result for result in results}.values())  # folders may lie in one another
    from raycl.operations.report.latex import to_latex
    from raycl.operations.report.phase_summaries import has_attention, has_routing
    from raycl.operations.report.plots import attention_figure, matrix_figure, save_png
    from raycl.operations.report.router_plots import router_figure
    from raycl.operations.report.run_comparison import compare, matrices_to_csv, runs_to_csv, seed_matrices, to_csv
    from raycl.operations.report.tables import comparison_table, mean_matrix_table, routing_comparison, tables_of
    from raycl.operations.report.verdicts import verdict_table, verdicts_of

    routed = [result for result in results if has_routing(result)]
    pages = []
    for matrix in seed_matrices(results):
        several = len(matrix.results) > 1
        pages += [mean_matrix_table(matrix)] if several else []
        pages += [page for result in matrix.results if options.each or not several for page in tables_of(result)]
    pages += [routing_comparison(routed)] if len(routed) > 1 else []
    pages.append(comparison_table(compare(results)))
    verdicts = {measure: verdicts_of(results, options.against, measure) for measure in options.measure or ["ap"]}
    pages += [verdict_table(some) for some in verdicts.values() if some]
    trees = [verdict.tree for some in verdicts.values() for verdict in some]
    show(options, "\n\n".join(map(str, pages)), {"results": results, "verdicts": trees})
    if options.html:
        from raycl.operations.report.page.report_page import report_page

        _write(options, options.html, report_page(results, _title(options.runs), options.against))
    if options.png:
        note(options, f"wrote {save_png(matrix_figure(results), options.png)}")
    if options.router_png:
        note(options, f"wrote {save_png(router_figure(routed), options.router_png)}")
    if options.attention_png:
        attending = [result for result in results if has_attention(result)]
        note(options, f"wrote {save_png(attention_figure(attending), options.attention_png)}")
    if options.latex:
        _write(options, options.latex, to_latex(pages))
    if options.matrix_csv:
        _write(options, options.matrix_csv, matrices_to_csv(seed_matrices(results)))
    if options.csv:
        _write(options, options.csv, to_csv(results, trees))
    if options.runs_csv:
        _write(options, options.runs_csv, runs_to_csv(results))
    return 0


def _recorded(options: argparse.Namespace, files: list[str]) -> int:
    """Print the comparison and the verdicts of recorded runs, write what needs no folders of runs.

    A file that has the name of an installed comparison has the papers' numbers that stand there beside its own.
    """
    from raycl.errors import RunError
    from raycl.operations.report.latex import to_latex
    from raycl.operations.report.page.recorded_sections import recorded_sections, studies_of
    from raycl.operations.report.page.report_page import page_of
    from raycl.operations.report.recorded_runs import RecordedRuns, published_in
    from raycl.operations.report.tables import comparison_table
    from raycl.operations.report.verdicts import verdict_table

    needs = [name for name in FOLDERS if getattr(options, name)] + ["measure"] * ("f_ra" in options.measure)
    if needs or len(files) < len(options.runs):
        other = f"--{needs[0].replace('_', '-')}" if needs else next(run for run in options.runs if run not in files)
        raise RunError(
            f"'{files[0]}' has the numbers of runs alone, and {other} needs their folders: give one or the other"
        )
    comparisons = INSTALLED / "jobs/configs/compare"
    recorded = [RecordedRuns(Path(file), published_in(comparisons / f"{Path(file).stem}.yaml")) for file in files]
    studies = studies_of(recorded, options.against)
    pages = []
    for study in studies:
        pages += [comparison_table(study.lines), *([verdict_table(study.verdicts)] if study.verdicts else [])]
    trees = [verdict.tree for study in studies for verdict in study.verdicts]
    show(options, "\n\n".join(map(str, pages)), {"runs": [study.runs.runs for study in studies], "verdicts": trees})
    if options.html:
        _write(options, options.html, page_of(recorded_sections(studies), _title(files)))
    if options.latex:
        _write(options, options.latex, to_latex(pages))
    return 0


FOLDERS = ("png", "each", "router_png", "attention_png", "csv", "matrix_csv", "runs_csv")
"""Options that need more than the numbers of a recorded run."""


def _title(roots: list[str]) -> str:
    """Return a title: the last part of each folder."""
    names = [str(root).rstrip("/").rpartition("/")[2] or str(root) for root in roots]
    return ", ".join(names)


def _write(options: argparse.Namespace, path: Path, text: str) -> None:
    from raycl.storage.output import write_output

    note(options, f"wrote {write_output(path, text.encode())}")
