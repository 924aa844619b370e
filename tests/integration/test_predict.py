"""Answers without a server equal the endpoint's, for files of every format; scores of files equal the run's matrix."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from local_endpoint import Served
from tiny import Complete, Lab, matrix, run

from raycl import config as configs
from raycl.bank import Bank
from raycl.bank.activations import Activations
from raycl.cli import main
from raycl.errors import BankError
from raycl.operations.banks import unlearning
from raycl.serve.gate.judge import judge
from raycl.serve.offline.model import WINDOW, OfflineModel
from raycl.serve.settings import ServeConfig
from raycl.serve.snapshots.parts import router_of
from raycl.storage import Storage
from raycl.training.records.named_bank import snapshot_at
from raycl.training.setup.checks import check

Model = Callable[..., OfflineModel]


@pytest.fixture
def model(complete: Complete) -> Iterator[Model]:
    """(backbone kind, settings of serving) -> the offline model of its complete run of SLM."""
    opened = []

    def get(kind: str, **settings: Any) -> OfflineModel:
        bank, snapshot = snapshot_at(uri(complete, kind))
        opened.append(OfflineModel.open(bank, snapshot, ServeConfig(bank=bank.storage.address, **settings)))
        return opened[-1]

    yield get
    for item in opened:
        item.close()


def uri(complete: Complete, kind: str) -> str:
    return complete(kind, "slm", "torch").storage.sub("bank").uri


def texts_of(lab: Lab) -> list[str]:
    return [json.loads(line)["text"] for task in lab.tasks for line in open_lines(Path(task["path"]) / "test.jsonl")]


def open_lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_labels_and_mixtures_equal_the_endpoints(model: Model, served: Callable[[str], Served], lab: Lab) -> None:
    texts = texts_of(lab)
    status, result = served("bert").ask("/v1/classify", {"input": texts})
    routed = served("bert").ask("/v1/route", {"input": texts})[1]["data"]
    predictions = list(model("bert", max_batch=5).predict(texts))
    assert status == 200 and len(predictions) == len(texts)
    for prediction, theirs, route in zip(predictions, result["data"], routed, strict=True):
        assert prediction.text == theirs["label"]
        assert prediction.scores == pytest.approx(theirs["scores"], abs=1e-5)
        assert prediction.tasks == pytest.approx(theirs["raycl"]["tasks"], abs=1e-5)
        assert prediction.adapters == pytest.approx(theirs["raycl"]["adapters"], abs=1e-5)
        assert prediction.ood_score == pytest.approx(route["raycl"]["ood_score"], abs=1e-3)


def test_out_of_distribution_scores_are_the_routers(lab: Lab, tmp_path: Path) -> None:
    storage = run(lab.config("bert", "slm", stream={"dev_fraction": 0.3}), Storage.at(tmp_path)).storage
    bank, snapshot = snapshot_at(storage.sub("bank").uri)
    texts = [*texts_of(lab), "a a a a"]
    with OfflineModel.open(bank, snapshot) as model:
        ood_scores = [prediction.ood_score for prediction in model.predict(texts)]
    wanted = router_of(bank, snapshot).route(texts, None).ood_scores
    assert wanted is not None and ood_scores == pytest.approx(wanted.tolist()) and len(set(wanted.tolist())) > 1


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_generated_answers_equal_the_endpoints(
    model: Model, served: Callable[[str], Served], lab: Lab, kind: str
) -> None:
    texts = texts_of(lab)[:5]
    chats = [
        served(kind).ask(
            "/v1/chat/completions",
            {"model": "auto", "temperature": 0, "messages": [{"role": "user", "content": text}]},
        )[1]
        for text in texts
    ]
    answers = [prediction.text for prediction in model(kind).predict(texts)]
    assert answers == [chat["choices"][0]["message"]["content"] for chat in chats]


def test_texts_are_read_as_answers_are_taken(model: Model) -> None:
    read = count()

    def texts() -> Iterator[str]:
        while True:
            next(read)
            yield "the sky"

    answers = model("bert", max_batch=2).predict(texts())
    assert [next(answers).text for _ in range(3)] and next(read) == 2 * WINDOW
    answers.close()  # type: ignore[attr-defined]


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main.main(list(words))
    return status, *capsys.readouterr()


@pytest.mark.parametrize("case", ["jsonl", "csv", "parquet", "folder"])
def test_files_of_every_format_are_answered_row_by_row(
    complete: Complete, model: Model, lab: Lab, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, words = texts_of(lab), []
    if case == "csv":
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("id", "body"), *enumerate(texts)])
        words = [str(tmp_path / "rows.csv"), "--text", "body"]
    elif case == "parquet":
        pandas.DataFrame({"text": texts, "more": 1}).to_parquet(tmp_path / "rows.parquet")
        words = [str(tmp_path / "rows.parquet")]
    else:
        for name, part in (("a.jsonl", texts[:4]), ("b.jsonl", texts[4:])):
            (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        (tmp_path / "notes.md").write_text("not data\n")
        words = [str(tmp_path)] if case == "folder" else [str(tmp_path / "a.jsonl")]
    bank = uri(complete, "bert")
    capsys.readouterr()  # what libraries print while the run is made
    status, out, err = command(capsys, "predict", bank, *words, "max_batch=4")
    assert status == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    wanted = [answer.text for answer in model("bert").predict(texts[:4] if case == "jsonl" else texts)]
    assert [record["answer"] for record in records] == wanted
    if case == "folder":
        assert [(record["file"], record["row"]) for record in records][3:5] == [("a.jsonl", 4), ("b.jsonl", 1)]
    assert all(record["tasks"] and record["scores"] for record in records)


ROWS = (
    {"id": 7, "text": "the sky", "answer": "blue", "when": "2026-01-01", "tags": ["a", "b"]},
    {"id": 8, "text": " ", "answer": "?", "when": None, "tags": []},
    {"id": 9, "text": 5, "answer": "?", "when": "", "tags": None},
    {"id": 10, "text": "the sea\u2028is cold", "answer": "", "when": "never", "tags": None},
)
"""Two rows of four can be answered; a column has the name of one of the output's."""


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_that_cannot_be_answered_have_an_error_and_all_keep_their_columns(
    complete: Complete, model: Model, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / f"answers.{suffix}"
    lines = [json.dumps(row) for row in ROWS]
    rows.write_text("\n".join([*lines, '{"id": 11, "text": "cut off']) + "\n")
    status, out, err = command(capsys, "predict", uri(complete, "bert"), str(rows), "--output", str(output))
    assert status == 0, err
    assert f"5 rows in {output}" in out and "3 rows could not be answered: the column 'error' says why" in out
    read = {"csv": pandas.read_csv, "parquet": pandas.read_parquet}
    if suffix == "jsonl":
        trees = [json.loads(line) for line in output.read_text().split("\n")[:-1]]
    else:
        trees = json.loads(read[suffix](output).to_json(orient="records"))
        assert list(trees[0])[:5] == ["row", "id", "input.answer", "when", "tags"]
        assert list(trees[0])[5:9] == ["answer", "error", "scores", "tasks"]
    assert [row["row"] for row in trees] == [1, 2, 3, 4, 5]
    assert [row.get("id") for row in trees] == [7, 8, 9, 10, None]
    wanted = [answer.text for answer in model("bert").predict([str(ROWS[0]["text"]), str(ROWS[3]["text"])])]
    assert [trees[number]["answer"] for number in (0, 3)] == wanted and not trees[1]["answer"]
    errors = [trees[number]["error"].partition(":")[0] for number in (1, 2, 4)]
    assert errors[:2] == ["the text is empty", "the text is a int"] and errors[2].startswith("malformed JSON")
    assert not trees[0].get("error") and trees[0]["input.answer"] == "blue" and trees[0]["when"] == "2026-01-01"
    assert trees[0]["tags"] == (["a", "b"] if suffix == "jsonl" else '["a", "b"]')
    weights = trees[0]["tasks"] if suffix == "jsonl" else json.loads(trees[0]["tasks"])
    assert set(weights) <= {"colour", "animal"} and sum(weights.values()) == pytest.approx(1)


def test_labels_may_hold_any_line_separator(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels may hold any line separator, and a compressed copy of a part beside the parts is none of them."""
    labels = ("yes\u2028indeed", "no\x85never")
    for split in ("train", "test"):
        lines = [
            json.dumps({"text": text, "label": labels[row % 2]}) for row, text in enumerate(["the sky", "fire"] * 6)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    task = {"name": "lines", "path": str(tmp_path)}
    storage = run(lab.config("bert", "lora", stream={"tasks": [task]}), Storage.at(tmp_path / "run")).storage
    given = ["predict", storage.sub("bank").uri, str(tmp_path / "test.jsonl"), "--part-rows", "5"]
    given += ["--to", str(tmp_path / "out")]
    assert command(capsys, *given)[0] == 0
    (tmp_path / "out/part-000000.jsonl.gz").write_bytes(
        gzip.compress((tmp_path / "out/part-000000.jsonl").read_bytes())
    )
    (tmp_path / "out/part-000001.jsonl").unlink()
    status, out, err = command(capsys, *given)
    assert status == 0 and "5 answered now" in out, err
    answers = json.loads((tmp_path / "out/summary.json").read_text())["answers"]
    assert sum(answers.values()) == 12 and set(answers) <= set(labels)
    out = command(capsys, "evaluate", given[1], given[2])[1]
    for start in ("yes", "no"):
        line = next(line for line in out.split("\n") if line.strip().startswith(start))
        assert len(line.split()) > 4, "a label's figures stand in its line"


def test_parts_that_are_written_are_not_answered_again(
    complete: Complete, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, to = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(lab)))
    given = ["predict", uri(complete, "bert"), str(rows), "--to", str(to), "--part-rows", "5"]
    status, out, _ = command(capsys, *given)
    assert status == 0 and "12 rows in" in out and "12 answered now" in out
    parts = sorted(path.name for path in to.glob("part-*.jsonl"))
    before = [path.read_bytes() for path in sorted(to.glob("part-*.jsonl"))]
    assert parts == ["part-000000.jsonl", "part-000001.jsonl", "part-000002.jsonl"]
    assert sum(json.loads((to / "summary.json").read_text())["answers"].values()) == 12
    (to / parts[1]).unlink()
    (to / "summary.json").unlink()
    status, out, _ = command(capsys, *given)
    assert status == 0 and "5 answered now" in out
    assert [path.read_bytes() for path in sorted(to.glob("part-*.jsonl"))] == before
    status, _, err = command(capsys, *given, "--task", "colour")
    assert status == 1 and "holds answers of another settings" in err
    given[1] += "@1"
    status, _, err = command(capsys, *given)
    assert status == 1 and "holds answers of another snapshot" in err
    rows.write_text(json.dumps({"text": "the sky"}) + "\n")
    status, _, err = command(capsys, *given)
    assert status == 1 and "another input, snapshot" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "FILE"], "there is no bank at"),
        (["BANK@none", "FILE"], "has no 'none': expected a branch"),
        (["BANK", "none.jsonl"], "the file does not exist"),
        (["BANK", "FILE", "--task", "none"], "has no task 'none': expected one of colour, animal"),
        (["BANK", "FILE", "--text", "body"], "the body is a missing value: expected a string"),
        (["BANK", "FILE", "max_btch=4"], "did you mean 'max_batch'"),
        (["BANK", "EMPTY"], "row 1: the text is empty"),
        (["BANK", "FILE", "--output", "answers.xlsx"], "expected a file that ends with .csv, .jsonl, .parquet"),
        (["BANK", "FILE", "--output", "FILE"], "which is read: name another file"),
        (["BANK", "FILE", "--to", "FULL"], "is not empty and holds no predictions.json"),
    ],
)
def test_bad_input_is_one_sentence(
    complete: Complete, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "the sky"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": "  "}\n')
    known = {"BANK": uri(complete, "bert"), "FILE": str(tmp_path / "rows.jsonl"), "FULL": str(tmp_path)}
    known |= {"EMPTY": str(tmp_path / "empty.jsonl"), "none.jsonl": str(tmp_path / "none.jsonl")}
    known |= {"BANK@none": f"{known['BANK']}@none", "nowhere": str(tmp_path / "nowhere")}
    capsys.readouterr()  # of the run that makes the bank
    status, out, err = command(capsys, "predict", *(known.get(word, word) for word in words))
    (said,) = [line for line in err.splitlines() if not line.startswith("loading snapshot ")]
    assert "--task" not in words or "loading" not in err, "it is refused before the model is read"
    assert status == 1 and out == "" and said.startswith("error: ") and message in said


def test_a_missing_column_is_named_by_the_commands_option_before_a_model_is_loaded(
    complete: Complete, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("body,team\nthe sky,a\n")
    given = (uri(complete, "bert"), str(tmp_path / "rows.csv"))
    capsys.readouterr()
    for words, message in (
        (("predict", *given), "no text column among body, team: expected text or input or sentence or prompt"),
        (("predict", *given, "--text", "bodi"), "no text column among body, team: expected bodi"),
        (("evaluate", *given, "--text", "body"), "no label column among body, team: expected label or output"),
    ):
        status, out, err = command(capsys, *words)
        assert status == 1 and out == "" and err.count("\n") == 1 and err.startswith("error: ") and message in err
        assert f", or set --{message.split()[1]}\n" in err
    status, _, err = command(capsys, "evaluate", *given, "--text", "body", "--label", "team", "--metric", "acu")
    assert status == 1 and err == "error: unknown metric 'acu': did you mean 'accuracy'?\n"


def test_train_rows_in_a_folder_that_is_scored_are_said(
    complete: Complete, lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, bank = lab.tasks[0]["path"], uri(complete, "bert")
    capsys.readouterr()
    said = "train.jsonl too: name the file of test rows to score them alone"
    assert said in command(capsys, "evaluate", bank, folder)[2]
    assert said not in command(capsys, "evaluate", bank, f"{folder}/test.jsonl")[2]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_scores_of_files_equal_the_matrix(
    complete: Complete, lab: Lab, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    last = matrix(complete(kind, "slm", "torch").storage)[-1]
    capsys.readouterr()  # of the run that makes the bank
    for task, value in zip(lab.tasks, last, strict=True):
        file = str(Path(task["path"]) / "test.jsonl")
        given = ["evaluate", uri(complete, kind), file, "--task", task["name"]]
        tree = json.loads(command(capsys, *given, "--json")[1])
        status, out, err = command(capsys, *given, "--quiet")
        assert (status, err) == (0, "")
        assert tree["score"]["value"] == pytest.approx(value) and f"{value:.1f}   (6 rows)" in out
        if kind == "bert":
            truth = [json.loads(line)["label"] for line in open_lines(Path(file))]
            assert {label: sum(row) for label, row in zip(tree["labels"], tree["confusion"], strict=True)} == {
                label: truth.count(label) for label in tree["labels"]
            }
            right = sum(row[index] for index, row in enumerate(tree["confusion"]))
            assert 100 * right / 6 == pytest.approx(value)


def test_answers_are_kept_to_a_tasks_labels_wherever_they_are_scored(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `eval.labels=task`, scores by the run itself, `raycl evaluate`, `forget` and the gate are equal."""
    storage = run(lab.config("llama", "lora", eval={"labels": "task"}), Storage.at(tmp_path / "run")).storage
    bank, snapshot = snapshot_at(storage.sub("bank").uri)
    names, last = [task["name"] for task in lab.tasks], matrix(storage)[-1]
    with OfflineModel.open(bank, snapshot) as model:
        for task, info in zip(lab.tasks, snapshot.tasks, strict=True):
            texts = [json.loads(line)["text"] for line in open_lines(Path(task["path"]) / "test.jsonl")]
            answers = [answer.text for answer in model.predict(texts, info.name, allowed=model.answers_of(info))]
            lines = storage.read(f"predictions/001-{names[1]}/{info.name}.jsonl").decode().splitlines()
            assert answers == [json.loads(line)["answer"] for line in lines] and {*answers} <= {*(info.labels or ())}
            assert not {*answers} & {answer.text for answer in model.predict(texts, info.name)}, "it would say more"
            file = str(Path(task["path"]) / "test.jsonl")
            given = ["evaluate", storage.sub("bank").uri, file, "--task", info.name, "--json"]
            assert json.loads(command(capsys, *given)[1])["score"]["value"] == last[names.index(info.name)]
    assert max(last) > 0, "answers of other words would score 0"
    assert [score.value for score in unlearning.evaluate(bank, snapshot).values()] == last
    tree = {"bank": bank.storage.address, "snapshot": "1", "follow": {"enabled": False}, "gate": {"split": "test"}}
    Activations(bank, "main").add(bank.open(1), "requested")
    assert [score.value for score in judge(configs.validate(ServeConfig, tree), 2).after.values()] == last


def test_labels_that_differ_by_their_sign_are_scored_alike(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    task = {"name": "signs", "path": str(tmp_path / "signs")}
    Path(task["path"]).mkdir()
    lines = [
        json.dumps({"text": "the sky is " + "a " * (row % 3), "label": ("-1", "1")[row // 3 % 2]}) for row in range(12)
    ]
    for split in ("train", "test"):
        (tmp_path / "signs" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    config = lab.config("bert", "lora", stream={"tasks": [task]})
    with caplog.at_level("INFO", "raycl"):
        check(config)
    assert caplog.text.count("'signs': answers are compared as they are, since '-1' and '1' are equal without") == 1
    storage = run(config, Storage.at(tmp_path / "run")).storage
    answers = [json.loads(line) for line in storage.read("predictions/000-signs/signs.jsonl").decode().splitlines()]
    share = 100 * sum(line["answer"] == line["references"][0] for line in answers) / 12
    assert {line["answer"] for line in answers} <= {"-1", "1"} and 0 < share < 100
    file = str(tmp_path / "signs" / "test.jsonl")
    status, out, _ = command(capsys, "evaluate", storage.sub("bank").uri, file, "--json")
    assert status == 0
    assert matrix(storage)[0][0] == json.loads(out)["score"]["value"] == pytest.approx(share)


def test_confusion_is_drawn_for_labels_alone(
    complete: Complete, lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, png = str(Path(lab.tasks[0]["path"]) / "test.jsonl"), tmp_path / "confusion.png"
    assert command(capsys, "evaluate", uri(complete, "bert"), file, "--png", str(png))[0] == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    status, _, err = command(capsys, "evaluate", uri(complete, "llama"), file, "--png", str(png))
    assert status == 1 and "leave --png out" in err


def test_torch_keeps_its_number_of_threads(complete: Complete) -> None:
    bank, snapshot = snapshot_at(uri(complete, "bert"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with OfflineModel.open(bank, snapshot) as model:
            assert list(model.predict(["the sky"])) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_task_that_the_router_does_not_go_by_is_said_once(
    model: Model, complete: Complete, lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slm = model("bert")
    (free,) = slm.predict(["the sky"])
    for _ in range(2):  # as for two parts
        (told,) = slm.predict(["the sky"], task="animal")
        assert told.text == free.text and told.tasks == pytest.approx(free.tasks)
    told_of = [message for message in caplog.messages if "task 'animal'" in message]
    assert told_of == ["task 'animal' has no effect: the router of snapshot 2 goes by each text"]
    caplog.clear()
    given = lab.config("bert", {"name": "slm", "retrieval": {"task_id": True}})
    for done in (complete("bert", "separate", "torch"), run(given, Storage.at(tmp_path))):
        with OfflineModel.open(*snapshot_at(done.storage.sub("bank").uri)) as result:
            assert list(next(result.predict(["the sky"], task="animal")).tasks) == ["animal"]
    assert not [message for message in caplog.messages if "task 'animal'" in message]


def test_an_unknown_task_is_refused_before_texts_are_read(model: Model) -> None:
    with pytest.raises(BankError, match="has no task 'none'"):
        next(model("bert").predict(iter(()), task="none"))


def test_a_reference_is_a_branch_a_number_or_a_hash(complete: Complete) -> None:
    address = uri(complete, "bert")
    bank = Bank.at(address)
    for reference, number in (("", 2), ("@main", 2), ("@1", 1), (f"@{bank.open(1).sha256[:12]}", 1)):
        assert snapshot_at(address + reference)[1].number == number
