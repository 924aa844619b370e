"""The command line: what `raycl` prints without heavy libraries, and that each command is described and completed."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raycl import __version__
from raycl.cli import main
from raycl.cli.banks import push
from raycl.cli.commands import COMMANDS, INSTALLED, load, local_or_installed, parsed
from raycl.config import to_yaml
from raycl.errors import ConfigError
from raycl.operations.banks import sample_listing
from raycl.operations.sweep.comparison import load_comparison, plan
from raycl.storage import Storage
from raycl.training.records.run_folder import CONFIG

REPO = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "ray", "numpy", "pydantic", "omegaconf", "matplotlib")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_describes_itself_by_its_own_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith(f"usage: raycl {name}")
    assert f"raycl {name}" in (load(name).__doc__ or "")


def test_each_command_of_banks_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bank", "fuse"], ["bank", "rollback"]):
        with pytest.raises(SystemExit):
            main.main([*words, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "One adapter out of those of all tasks, and what that costs them." in text
    assert "Move a branch back to a snapshot that it had; nothing is deleted." in text


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        if words:
            with pytest.raises(SystemExit):
                main.main(words)
        else:
            assert main.main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text and command.summary in text for name, command in COMMANDS.items())


def test_what_is_no_command_is_one_line_about_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["trian"])
    text = capsys.readouterr().err
    assert ended.value.code == 2 and "invalid choice: 'trian' (choose from " in text and "train" in text


def test_an_error_of_raycl_is_one_sentence_and_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", "methd=lora"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "methd" in text and text.count("\n") == 1


def test_help_and_import_need_no_heavy_library() -> None:
    code = f"""
import sys
from contextlib import suppress
from raycl.cli import main
main.main([])
for words in (["train"], ["serve"], ["predict"], ["data", "check"], ["compare"], ["sweep"]):
    with suppress(SystemExit):
        main.main([*words, "--help"])
print(sorted(set({HEAVY}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.splitlines()[-1] == "[]"


WRONG = (
    (
        ("torch", "transformers", "ray", "matplotlib"),
        [
            ["train", "no.yaml"],
            ["train", "--resume", "no"],
            ["train", "--status", "no"],
            ["status", "no"],
            ["compare", "no.yaml"],
            ["sweep", "no.yaml"],
            ["report", "no"],
            ["probe", "no"],
        ],
    ),
    (
        ("transformers", "ray", "torch.distributed.tensor", "matplotlib"),
        [
            ["train", "method=loraa"],
            ["train", "train.epochs=many"],
            ["train", "backbone.name=/no"],
            ["train", "stream.tasks=[{name: a, path: no}]"],
            ["data", "check", "no"],
            ["serve", "no"],
            ["bank", "list", "no"],
            ["predict", "no", __file__, "--format", "text"],
            ["evaluate", "no", "no.csv"],
        ],
    ),
)
"""Libraries that the commands behind them do not wait for, in this order: each one is refused."""


def test_what_is_wrong_is_refused_before_heavy_libraries_are_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from raycl.cli import main
for libraries, commands in {WRONG}:
    for words in commands:
        assert main.main(words) == 1, words
        assert not set(libraries) & set(sys.modules), (words, set(libraries) & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == sum(len(commands) for _, commands in WRONG) and all(line.startswith("error: ") for line in said)


def test_completion_knows_commands_their_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*COMMANDS, "--print-config", "--keep-snapshots", "--only"))
    (tmp_path / "rows.jsonl").touch()
    expected = {"raycl tr": "train", "raycl train --config r": "rows.jsonl", "raycl bank list r": "rows.jsonl"}
    expected["raycl bank export b --engine v"] = "vllm"
    for line in expected:
        script += f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_raycl; echo $COMPREPLY\n"
    done = subprocess.run(["bash"], input=script, text=True, check=True, cwd=tmp_path, capture_output=True)
    assert done.stdout.splitlines() == list(expected.values()) and not done.stderr


def test_settings_may_follow_the_rows_of_a_comparison() -> None:
    options = parsed("compare", ["c.yaml", "at_once=2", "--only", "lora", "slm", "seeds=[0]"])
    assert options.only == ["lora", "slm"] and options.overrides == ["at_once=2", "seeds=[0]"]


def test_an_option_that_is_repeated_adds_to_what_it_had() -> None:
    assert parsed("compare", ["c.yaml", "--only", "lora", "--only", "slm"]).only == ["lora", "slm"]
    assert parsed("probe", ["run", "--set", "a=1", "--set", "b=2"]).set == ["a=1", "b=2"]
    assert parsed("report", ["run", "--measure", "ap", "--measure", "f_ra"]).measure == ["ap", "f_ra"]
    assert parsed("clean", ["--only", "cache", "--only", "prefixes"]).only == ["cache", "prefixes"]
    words = ["import", "bank", "folder", "--name", "n", "--tasks", "a", "--tasks", "b"]
    assert parsed("bank", words).tasks == ["a", "b"]


REFUSED = {
    "train --gpus 8": "--gpus needs --plan",
    "train --utilisation 0.1 method=lora": "--utilisation needs --plan",
    "train --status run --add task": "--status shows something and stops: leave --add out",
    "train --plan --resume run": "--plan shows something and stops: leave --resume out",
    "train --print-config --resume run": "--print-config shows something and stops: leave --resume out",
    "train --print-config --methods": "--print-config shows something and stops: leave --methods out",
    "train --methods method=lora": "--methods takes no config and no settings: leave method=lora out",
    "train --status run --config a.yaml": "--status takes no config and no settings: leave a.yaml out",
    "evaluate bank rows.csv --limit 5": "--limit needs --general",
    "evaluate bank --general arc --png a.png": "--png is about files: leave it out",
    "serve bank activate 3 --max-drop 1": "--max-drop has no effect on activate",
    "predict bank rows.csv --part-rows 0": "--part-rows: '0': expected a whole number, 1 or more",
    "predict bank rows.csv --workers -2 --to a": "--workers: '-2': expected a whole number, 1 or more",
    "predict bank rows.csv --max-tokens 0": "--max-tokens: '0': expected a whole number, 1 or more",
    "judge bank HHH --url u --model m --limit -1": "--limit: '-1': expected a whole number, 1 or more",
    "bank prune bank --sample-days -5": "--sample-days: '-5': expected a number, 0 or more",
    "bank prune bank --grace-s nan": "--grace-s: 'nan': expected a number, 0 or more",
    "data check rows.csv --examples x": "--examples: 'x': expected a whole number, 0 or more",
    "probe run --layer (": "--layer: '(' is no regular expression: missing )",
}
"""Command line -> what is wrong with it: an option without effect, or a value that is none."""


def test_options_without_effect_and_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line, expected in REFUSED.items():
        with pytest.raises(SystemExit) as ended:
            main.main(line.split())
        assert ended.value.code == 2 and expected in capsys.readouterr().err, line


def test_names_of_banks_are_not_read_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder may be called so; a part of it would be the name of another bank."""
    for bank in ("007", "runs/my #1", "a: b"):
        assert main.main(["serve", bank, "--print-config", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["bank"] == str(Path(bank).absolute())


def test_a_command_ends_when_nobody_reads_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reader is gone when a line is written, or when what is kept of it is, as behind `| head`."""

    class Unread(io.StringIO):
        file = (tmp_path / "output").open("w")

        def flush(self) -> None:
            raise BrokenPipeError

        def fileno(self) -> int:
            return self.file.fileno()

    monkeypatch.setattr(sys, "stdout", Unread())
    with pytest.raises(SystemExit) as ended:
        main.main(["plugins"])
    assert ended.value.code == 141 and os.fstat(Unread.file.fileno()).st_rdev == Path(os.devnull).stat().st_rdev


def test_skills_are_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "skills"
    assert main.main(["demo", "--write-skills", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"skills": ["shop", "teams", "orders"], "folder": str(folder)}
    assert all((folder / skill).is_dir() for skill in told["skills"])


def test_the_end_of_input_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of users are not sent after Ctrl-D."""
    nothing: Any = None
    monkeypatch.setattr(sample_listing, "stored_samples", lambda bank, snapshot: {"one": 2})
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert not push._agreed(nothing, nothing, parsed("push", ["bank", "me/bank", "--with-samples"]))


def test_the_state_of_a_comparison_is_that_of_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One was begun and never ran."""
    comparison = load_comparison(str(REPO / "jobs/configs/compare/demo.yaml"))
    first, *others = plan(comparison, str(tmp_path)).items()
    Storage.at(tmp_path).sub(comparison.name).sub(first[0]).write(CONFIG, to_yaml(first[1]).encode())
    assert main.main(["compare", "jobs/configs/compare/demo.yaml", "--dir", str(tmp_path), "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [first[0], *(name for name, _ in others)]
    assert "waiting: no worker has started yet" in lines[0] and "0 done" in lines[0]
    assert all(line.endswith("not started") for line in lines[1:])


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"raycl {__version__}\n"


def test_configs_of_the_package_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the user comes first; what neither has is refused."""
    monkeypatch.chdir(tmp_path)
    own = {path.relative_to(INSTALLED).as_posix() for path in INSTALLED.rglob("*.yaml")} | {
        path.relative_to(REPO).as_posix()
        for folder in ("sweeps", "jobs/configs")
        for path in (REPO / folder).rglob("*.yaml")
    }
    assert {"sweeps/seeds.yaml", "jobs/configs/demo.yaml", "jobs/configs/compare/demo.yaml"} <= own
    assert all(Path(local_or_installed(name)).is_file() for name in own)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/seeds.yaml").write_text("name: mine\n")
    assert local_or_installed("sweeps/seeds.yaml") == "sweeps/seeds.yaml"
    with pytest.raises(ConfigError, match=r"'sweeps/none\.yaml' does not exist"):
        local_or_installed("sweeps/none.yaml")


def test_what_libraries_print_is_no_part_of_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers prints a line on import, for example."""
    plugins = load("plugins")
    real = plugins.run

    def talkative(options: argparse.Namespace) -> int:
        print("[INFO] something")
        return int(real(options))

    monkeypatch.setattr(plugins, "run", talkative)
    assert main.main(["plugins", "--json"]) == 0
    said = capsys.readouterr()
    assert isinstance(json.loads(said.out), list | dict) and "[INFO] something" in said.err
