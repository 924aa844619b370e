"""The documentation's excerpts are what the source says, its tables are what was measured, and the files that its pages
name exist.
"""

from __future__ import annotations

import csv
import re
import shutil
from datetime import date
from pathlib import Path

import excerpts
import pytest
import run_tables
import yaml
from report_picture import overview, shown_in

from raycl.errors import RunError
from raycl.methods.registry import METHODS, MODIFIERS
from raycl.scoring.general_ability import SUITES

REPO = Path(__file__).resolve().parents[2]
FOLDERS = {"raycl", "jobs", "sweeps", "tests", "cluster", "docs"}
FOLDERS |= {path.parent.name for path in REPO.glob("raycl/*/__init__.py")} - {"bank"}  # runs have a folder bank/ too


BETWEEN_PAGES = "\n<!-- here a page ends -->\n"


def test_excerpts_in_the_pages_are_what_the_source_says() -> None:
    written = [page.read_text() for page in excerpts.PAGES]
    made = excerpts.filled(BETWEEN_PAGES.join(written)).split(BETWEEN_PAGES)  # all at once: what they read is read once
    stale = [page.name for page, old, new in zip(excerpts.PAGES, written, made, strict=True) if old != new]
    assert stale == [], "run `make docs-excerpts`"
    pages = REPO.glob("docs/extending/*.md")
    marks = [line for page in pages for line in page.read_text().splitlines() if "excerpt:" in line]
    assert len(marks) > 15 and all(re.fullmatch(r"<!-- excerpt: \S+( \w+)? -->", mark) for mark in marks)


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        ("raycl/nothing.py", None, "names no file of the repository"),
        ("raycl/routing/router.py", "Nobody", "no top-level 'Nobody'"),
    ],
)
def test_a_missing_excerpt_fails(path: str, name: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        excerpts.excerpt(path, name)


@pytest.mark.parametrize(
    ("page", "name", "run", "column"),
    [
        ("README.md", "readme", "slm-s1", "ap"),
        ("docs/results/methods.md", "long8", "separate-slm-s2", "ap"),
        ("docs/results/methods.md", "long8-others", "sapt-third-s0", "peak_memory_mb"),
        ("docs/results/methods.md", "best-long8", "slm-s1", "ap"),
        ("docs/results/methods.md", "claims-long8", "idbr-s1", "score_dbpedia"),
        ("docs/results/methods.md", "backwards", "slm-s1", "bwt"),
    ],
)
def test_one_changed_figure_makes_a_page_stale(tmp_path: Path, page: str, name: str, run: str, column: str) -> None:
    """That they are not stale before is `test_excerpts_in_the_pages_are_what_the_source_says`."""
    shutil.copytree(run_tables.RESULTS, tmp_path / "results")
    (written,) = re.findall(rf"<!-- table: {name} -->.*?<!-- /table -->", (REPO / page).read_text(), re.DOTALL)
    change(tmp_path / "results/methods-long8.csv", {run: {column: "12.5"}})
    assert run_tables.with_tables(written, tmp_path / "results") != written


@pytest.mark.parametrize(("before", "after"), [("[SLM, 86.3, 0.5]", "[SLM, 86.4, 0.5]"), ("3caf65e2", "0caf65e2")])
def test_one_changed_figure_or_source_of_a_command_makes_a_page_stale(tmp_path: Path, before: str, after: str) -> None:
    shutil.copytree(run_tables.RESULTS, tmp_path / "results")
    page, file = (REPO / "docs/results.md").read_text(), tmp_path / "results/printed.yaml"
    assert "Printed by `make demo`; recorded on 2026-11-21 (3caf65e2) and 2026-11-24 (ed11570d)." in page
    file.write_text(file.read_text().replace(before, after))
    assert run_tables.with_tables(page, tmp_path / "results") != page


def test_figures_of_a_command_have_a_commit_of_their_day() -> None:
    for name, figures in yaml.safe_load((run_tables.RESULTS / "printed.yaml").read_text()).items():
        assert {len(row) for row in figures["rows"]} == {len(figures["heads"])}, name
        assert figures["recorded"] and all(isinstance(day, date) for day in figures["recorded"]), name
        assert all(re.fullmatch(r"[0-9a-f]{8}", commit) for some in figures["recorded"].values() for commit in some), (
            name
        )


def change(file: Path, changes: dict[str, dict[str, str]]) -> None:
    """Write other figures for some runs into a file of results."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        row |= changes.get(row["run"], {})
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_changed_result_changes_the_verdict_in_the_page(tmp_path: Path) -> None:
    shutil.copytree(run_tables.RESULTS, tmp_path / "results")
    claim = re.compile(r"^\|[^|]*\| `epi` > `replay` \|.*$", re.MULTILINE)
    tables = run_tables.TABLE.finditer((REPO / "docs/results/methods.md").read_text())
    (written,) = [table[0] for table in tables if claim.search(table[0])]
    (before,) = claim.findall(written)
    assert [cell.strip() for cell in before.split("|")[-3:-1]] == ["yes", ""]
    file = tmp_path / "results/methods-long8.csv"
    tasks = ("mnli", "cb", "boolq", "rte", "yelp", "amazon", "dbpedia", "agnews")
    change(file, {"epi-s1": {f"score_{task}": "5.0" for task in tasks}})
    (after,) = claim.findall(run_tables.with_tables(written, tmp_path / "results"))
    told, could_tell = (cell.strip() for cell in after.split("|")[-3:-1])
    assert told == "cannot be told" and could_tell.endswith("seeds")
    change(file, {f"epi-s{seed}": {f"score_{task}": f"{5 + seed}" for task in tasks} for seed in range(3)})
    (after,) = claim.findall(run_tables.with_tables(written, tmp_path / "results"))
    assert after.split("|")[-3].strip() == "no, the reverse"


def test_changed_scores_of_earlier_tasks_change_what_the_page_says_of_them(tmp_path: Path) -> None:
    shutil.copytree(run_tables.RESULTS, tmp_path / "results")
    for values, word in [((9.0, 9.1, 9.2), "yes"), ((-1.0, -1.1, -1.05), "no, they lower them")]:
        changes = {f"epi-s{seed}": {"bwt": str(value)} for seed, value in enumerate(values)}
        change(tmp_path / "results/methods-long8.csv", changes)
        page = run_tables.with_tables("<!-- table: backwards -->\n<!-- /table -->", tmp_path / "results")
        (line,) = re.findall(r"^\| eight [^|]*\| `epi` \|.*$", page, re.MULTILINE)
        assert line.split("|")[-3].strip() == word


@pytest.mark.parametrize("page", ["docs/results.md", "docs/results/methods.md"])
def test_tables_of_results_have_heads(page: str) -> None:
    text = (REPO / page).read_text()
    assert re.findall(r"^\|.*\| ?\|.*\n\|-|^\| ?\|.*\n\|-", text, re.MULTILINE) == [], "a column has no head"


ELSEWHERE = {
    "docs/gpu.md": "written by the GPU suite",
    "docs/licenses.md": "written by make licenses",
    "docs/guides/errors.md": "exit statuses",
    "docs/guides/reproduce.md": "figures of papers, as files of jobs/configs have them",
}
"""Pages whose numbers in tables are not measured ones, or have another generator."""
FIGURE = re.compile(r"[-+]?\d[\d.,]*(?: ?(?:±.*|%|x|s|ms|MiB|GiB|of \d+))?")


@pytest.mark.parametrize("page", excerpts.PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_no_figures_are_copied_by_hand_into_tables(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", run_tables.TABLE.sub("", page.read_text()), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d (?:x )?/ [\d-]|\d\.\d+/[\d-]", prose) == [], (
        "figures stand in a list with slashes: give each a column"
    )
    rows = re.findall(r"^\|(.*)\|$", prose, re.MULTILINE)
    by_hand = [row for row in rows if any(FIGURE.fullmatch(cell.strip()) for cell in row.split("|"))]
    if str(page.relative_to(REPO)) not in ELSEWHERE:
        assert by_hand == [], "write them to docs/results/printed.yaml, with the command and the commit"


@pytest.mark.parametrize("name", ["long8", "superni6-mini-t5", "superni6-mini-llama"])
def test_a_table_has_what_each_compared_method_was_searched_over(name: str) -> None:
    page = (REPO / "docs/results/methods.md").read_text()
    table = re.search(rf"table: planned-{name} -->(.*?)<!--", page, re.S)
    assert table is not None and "train.label_loss=seen" in page, "what differs from the authors' training is named"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].strip().splitlines()[2:]]
    searched = {method.strip("`") for method, *_ in lines}
    rows = run_tables.Study(run_tables.RESULTS, f"methods-{name}").streams(compared=True)
    assert {row.partition("-")[0] for row in rows} == {row.partition("-")[0] for row in searched & set(rows)}
    for _, trials, rates, *_, chosen in lines:
        assert int(trials) >= 4 and chosen.partition(",")[0] in re.split(r", | or ", rates)


def test_the_pictures_of_all_methods_are_of_the_runs_that_are_recorded() -> None:
    """`python tests/lab/pictures.py docs/results/methods-*.csv --report` makes both."""
    recorded = overview(sorted(run_tables.RESULTS.glob("methods-*.csv")))
    assert {name: shown_in(REPO / f"docs/{name}.png") for name in ("report", "report-dark")} == {
        "report": recorded,
        "report-dark": recorded,
    }


def test_each_published_zero_shot_suite_stands_in_the_guide_of_published_results() -> None:
    guide = (REPO / "docs/guides/reproduce.md").read_text()
    of_papers = [suite for suite in SUITES if suite.endswith("zero-shot") or suite == "trace"]
    assert len(of_papers) == 3 and all(f"[{suite}]" in guide for suite in of_papers)
    assert "| 44.7 | 76.0 | 76.3 | 67.7 |" in guide, "SLM, table 6"


VERDICT = re.compile(
    r"(?:can|cannot) be\s+told\s+from |(?:is|are)\s+(?:better|worse)\s+than\s+(?:`|without)"
    r"|(?:does|not)\s+hold\b|it\s+holds\s+for|makes?\s+no\s+difference|is\s+ahead\b|are\s+ahead\b|no\s+verdict",
    re.IGNORECASE,
)
"""What a verdict on two methods says, outside of tables that code writes."""


@pytest.mark.parametrize(
    "page",
    [
        "docs/results.md",
        "docs/results/methods.md",
        "docs/results/smollm2.md",
        "docs/guides/migu.md",
        "docs/guides/sapt.md",
    ],
)
def test_people_write_no_verdicts(page: str) -> None:
    prose = run_tables.TABLE.sub("", (REPO / page).read_text())
    assert VERDICT.findall(prose) == [], "leave it to a table of claims (docs/results/tables.yaml)"


def test_the_readme_counts_the_methods() -> None:
    others = len(METHODS) + len(MODIFIERS) - len(("slm", "sapt", "migu"))
    assert f"SLM, SAPT, MIGU and {others} others behind one command line" in (REPO / "README.md").read_text()


def test_every_table_of_runs_stands_in_a_page_and_a_wrong_name_fails() -> None:
    named = [name for page in excerpts.PAGES for name in re.findall(r"^<!-- table: (\S+) -->$", page.read_text(), re.M)]
    files = [yaml.safe_load((run_tables.RESULTS / name).read_text()) for name in ("tables.yaml", "printed.yaml")]
    assert sorted(named) == sorted([*files[0], *files[1]])
    with pytest.raises(ValueError, match="have no table 'nothing'"):
        run_tables.with_tables("<!-- table: nothing -->\n<!-- /table -->")
    with pytest.raises(RunError, match="no run of 'nothing'"):
        run_tables.table({"runs": "methods-long8", "rows": {"nothing": ["x"]}})


@pytest.mark.parametrize(
    "page", [*sorted(REPO.glob("docs/**/*.md")), REPO / "CONTRIBUTING.md", REPO / "README.md", REPO / "SECURITY.md"]
)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """`raycl/training/step.py`, or `training/step.py` for short; folders with a slash at their end."""
    named = re.findall(r"`([\w./-]+/(?:[\w.-]+\.(?:py|yaml|md))?)`", page.read_text())
    ours = [name for name in named if name.split("/")[0] in FOLDERS or name.endswith(".py")]
    assert [name for name in ours if not (REPO / name).exists() and not (REPO / "raycl" / name).exists()] == []
