"""The strict config: what is refused and with which words, named nodes, overrides, fingerprint, round trip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import Field, field_validator

from raycl import config
from raycl.cli.main import main
from raycl.config import Section, sections
from raycl.config.sections import allowing
from raycl.errors import ConfigError
from raycl.training.setup.run_config import load_config


class Lora(Section):
    name: Literal["lora"] = "lora"
    rank: int = 4
    targets: tuple[str, ...] = ("q", "v")

    @field_validator("rank")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 1:
            raise ValueError("rank must be at least 1")
        return value


class Sapt(Section):
    name: Literal["sapt"] = "sapt"
    keys: int


class Migu(Section):
    threshold: float = 0.7


class Data(Section):
    path: str = "data"
    steps: int | Literal["all"] = "all"
    rate: float = 1e-3


class Output(Section):
    dir: str = "runs"
    note: str | None = None


class Run(Section):
    seed: int = 0
    method: Annotated[Lora | Sapt, Field(discriminator="name")] = Lora()
    modifiers: dict[str, Migu] = Field(default_factory=dict)
    data: Data = Data()
    output: Output = Output()
    extra: Section = Section()


def written(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_no_file_and_no_overrides_give_the_defaults() -> None:
    assert config.load(Run, None) == Run()


def test_sections_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Run().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"sede": 1}, "unknown config key 'sede': did you mean 'seed'?"),
        ({"data": {"pth": "x"}}, "unknown config key 'data.pth': did you mean 'data.path'?"),
        ({"method": {"name": "lora", "rnak": 8}}, "unknown config key 'method.rnak': did you mean 'method.rank'?"),
        (
            {"modifiers": {"migu": {"treshold": 1}}},
            "unknown config key 'modifiers.migu.treshold': did you mean 'modifiers.migu.threshold'?",
        ),
        ({"output": {"zzz": 1}}, "unknown config key 'output.zzz': expected one of dir, note"),
        ({"data": {"rate": "fast"}}, "config key 'data.rate' is 'fast': input should be a valid number"),
        ({"data": {"steps": []}}, "config key 'data.steps' is []: input should be a valid integer"),
        ({"data": 3}, "config key 'data' is 3: input should be a valid dictionary"),
        ({"method": {"name": "sapt"}}, "config key 'method.keys' is missing: it has no default, give it a value"),
        ({"method": {"name": "slim"}}, "config key 'method' names 'slim': expected one of lora, sapt"),
        ({"method": {"name": "lora", "rank": 0}}, "method.rank: rank must be at least 1"),
    ],
)
def test_wrong_trees_name_the_dotted_path_the_value_and_the_way_out(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.validate(Run, tree)
    assert str(caught.value).startswith(words)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config.validate(Run, {"sede": 1, "data": {"rate": "fast"}})
    assert "'sede'" in str(caught.value)
    assert "'data.rate'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2", "duplicate key seed"),
        ("data: {path: a, path: b}", "duplicate key path"),
        ("data: [", "is not valid YAML"),
        ("- seed", "holds a list: expected a mapping of sections"),
        ("3", "is not valid YAML"),
        (
            "data: {path: '${output.nowhere}'}",
            "cannot be resolved: Interpolation key 'output.nowhere' not found, at 'data.path'",
        ),
        ("data:\n  path: ???", "Missing mandatory value: path, at 'data.path'"),
        ("x: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_unreadable_files_are_config_errors_that_name_the_file(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load_tree(path)
    assert path in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(Run, str(tmp_path / "no.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(Run, str(tmp_path / "binary.yaml"))


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert config.load(Run, written(tmp_path, "")) == Run()


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "0.001", "1.0e-3"])
def test_floats_without_a_dot_are_floats_in_files_and_overrides(tmp_path: Path, number: str) -> None:
    assert config.load(Run, written(tmp_path, f"data: {{rate: {number}}}")).data.rate == 0.001
    assert config.load(Run, None, [f"data.rate={number}"]).data.rate == 0.001


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("x=1", 1),
        ("x=true", True),
        ("x=null", None),
        ("x=", None),
        ("x='3'", "3"),
        ("x=a=b", "a=b"),
        ("x=a,b", "a,b"),
        ("x=[a, 1]", ["a", 1]),
        ("x={a: {b: 2}}", {"a": {"b": 2}}),
        (" x = 1 ", 1),
        ("x=s3://bucket/key", "s3://bucket/key"),
    ],
)
def test_override_values_are_yaml(override: str, value: object) -> None:
    tree: dict[str, Any] = {}
    config.apply_override(tree, override)
    assert tree == {"x": value}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "not of the form key.path=value"),
        ("=1", "not of the form key.path=value"),
        ("data..rate=1", "not of the form key.path=value"),
        ("data.rate=[", "the value is not valid YAML"),
        ("seed.low=1", "'seed' is 3 and has no keys below it"),
        ("method.rank=1", "'method' is '${other}' and has no keys below it"),
    ],
)
def test_malformed_overrides_are_quoted_back(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.apply_override({"seed": 3, "method": "${other}"}, override)
    assert f"'{override}'" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "tree"),
    [
        (["method=lora"], {"method": "lora"}),
        (["method=lora", "method.rank=8"], {"method": {"name": "lora", "rank": 8}}),
        (["method.rank=8", "method=lora"], {"method": {"name": "lora", "rank": 8}}),
        (["method=lora", "method.rank=8", "method=lora"], {"method": {"name": "lora", "rank": 8}}),
        (["method=lora", "method.rank=8", "method=sapt"], {"method": "sapt"}),
        (["method.rank=8", "method.rank=16"], {"method": {"rank": 16}}),
        (["modifiers=[migu]"], {"modifiers": ["migu"]}),
        (["modifiers=[migu]", "modifiers.migu.threshold=0.5"], {"modifiers": {"migu": {"threshold": 0.5}}}),
        (["modifiers.migu.threshold=0.5", "modifiers=[migu]"], {"modifiers": {"migu": {"threshold": 0.5}}}),
        (
            ["modifiers.migu.threshold=0.5", "modifiers=[other,migu]"],
            {"modifiers": {"other": {}, "migu": {"threshold": 0.5}}},
        ),
        (["modifiers.migu.threshold=0.5", "modifiers=[other]"], {"modifiers": ["other"]}),
        (["modifiers.migu.threshold=0.5", "modifiers=[]"], {"modifiers": []}),
    ],
)
def test_named_nodes(overrides: list[str], tree: dict[str, Any]) -> None:
    built: dict[str, Any] = {}
    for override in overrides:
        config.apply_override(built, override)
    assert built == tree


def test_overrides_beat_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 1\ndata: {path: a, rate: 0.5}")
    run = config.load(Run, path, ["seed=2", "data.path=b", "seed=3"])
    assert (run.seed, run.data.path, run.data.rate) == (3, "b", 0.5)


def test_interpolations_see_the_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYCL_DATA", "/scratch")
    path = written(tmp_path, "output: {dir: '${oc.env:RAYCL_DATA}/${data.path}-${seed}'}")
    run = config.load(Run, path, ["data.path=c4", "seed=7", "output.note=${output.dir}"])
    assert run.output.dir == run.output.note == "/scratch/c4-7"


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from raycl.config import Section, fingerprint\n"
        "class A(Section):\n    b: float = 1.0\n    a: dict[str, int] = {'y': 1, 'x': 2}\n"
        "print(fingerprint(A()))"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1
    assert len(prints.pop().strip()) == 16


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ([], True),
        (["data.rate=0.001"], True),
        (["data.rate=0.002"], False),
        (["method.name=lora"], True),
        (["method=lora", "method.rank=5"], False),
        (["method=lora", "method.targets=[v,q]"], False),
        (["modifiers.migu.threshold=0.7"], False),
        (["output.dir=elsewhere"], True),
    ],
)
def test_fingerprint_follows_meaning(overrides: list[str], same: bool) -> None:
    base = config.fingerprint(Run(), without=["output"])
    run = config.load(Run, None, overrides)
    assert (config.fingerprint(run, without=["output"]) == base) is same


def test_fingerprint_sees_through_a_field_typed_as_its_base_class() -> None:
    assert config.fingerprint(Run(extra=Migu(threshold=0.1))) != config.fingerprint(Run(extra=Migu(threshold=0.2)))


def test_differences_name_both_values_and_skip_the_sections_left_out() -> None:
    old = config.as_tree(Run())
    new = config.as_tree(Run(seed=1, data=Data(rate=0.5), output=Output(dir="b")))
    assert config.differences(old, new, without=["output"]) == {"seed": (0, 1), "data.rate": (0.001, 0.5)}
    assert config.differences(old, old) == {}


def test_differences_see_added_and_removed_keys() -> None:
    assert config.differences({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a.b": (1, None), "a.c": (None, 2)}


def test_flatten_keeps_empty_nodes() -> None:
    assert config.flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


def test_the_resolved_tree_can_be_loaded_again(tmp_path: Path) -> None:
    run = config.load(Run, None, ["method=sapt", "method.keys=3", "modifiers.migu.threshold=1e-7", "data.steps=12"])
    again = config.load(Run, written(tmp_path, config.to_yaml(run)))
    assert again == run
    assert config.fingerprint(again) == config.fingerprint(run)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("ab1e-.+:${}\\ '\"#yn?~ä\n"), max_size=12).filter(lambda text: text != "???")
)
def test_any_text_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    run = Run(data=Data(path=text), output=Output(note=text))
    path = written(tmp_path_factory.mktemp("config"), config.to_yaml(run))
    assert config.load(Run, path) == run
    assert config.from_yaml(config.to_yaml(run), "memory") == config.as_tree(run)
    nodes = OmegaConf.create(sections._escape({"text": text}))
    assert config.tree_to_yaml({"text": text}) == sections.MARK + OmegaConf.to_yaml(nodes)


@pytest.mark.parametrize(
    ("text", "words"),
    [("- a", "'run/config.yaml' holds a list"), ("a: [", "not valid YAML"), ("a: 1\na: 2", "duplicate key a")],
)
def test_yaml_text_that_is_no_tree_names_its_source(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.from_yaml(text, "run/config.yaml")
    assert str(caught.value).startswith("'run/config.yaml'")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["::", "fe80::", "::1", "0.0.0.0", "a:"])
def test_a_word_with_colons_is_text(text: str) -> None:
    """An IPv6 address above all, which YAML takes for a mapping or does not take."""
    assert config.read_override(f"host={text}") == ("host", text)


@pytest.mark.parametrize(
    ("text", "value"), [("{a: 1}", {"a": 1}), ("[1, 2]", [1, 2]), ("[a]", ["a"]), ("{a: }", {"a": None})]
)
def test_a_mapping_or_list_on_the_command_line_stands_in_brackets(text: str, value: object) -> None:
    assert config.read_override(f"key={text}") == ("key", value)


def test_a_relative_bank_is_in_the_folder_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers run in a folder of Ray's, which is deleted with the cluster."""
    monkeypatch.chdir(tmp_path)
    assert load_config(None, ["bank.dir=bank"]).bank.dir == str(tmp_path / "bank")
    assert load_config(None, ["bank.dir=s3://team/bank"]).bank.dir == "s3://team/bank"


@pytest.mark.parametrize(
    "text",
    ["${oc.env:A_KEY}", "${oc.env:A_KEY,none}", "s3://b?x=${oc.env:${seed}}", "${oc.${kind}:A_KEY}"],
    ids=["plain", "with a default", "a name from a setting", "a resolver from a setting"],
)
def test_a_file_reads_no_environment_variable_that_the_command_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Otherwise a stranger's config could send a key to an address."""
    monkeypatch.setenv("A_KEY", "k3y")
    path = written(tmp_path, f"seed: A_KEY\nkind: env\noutput: {{dir: '{text}'}}")
    with pytest.raises(ConfigError, match=r"the environment variable 'A_KEY'.*or add --allow-env A_KEY") as refused:
        config.load_tree(path)
    assert "k3y" not in str(refused.value)
    with allowing(["A_KEY"]):
        assert "k3y" in config.load_tree(path)["output"]["dir"]
        with pytest.raises(ConfigError, match="a record has none"):
            config.from_yaml(Path(path).read_text(), "a record")
    with pytest.raises(ConfigError, match="--allow-env"):
        config.load_tree(path)
    assert OmegaConf.create({"x": "${oc.env:A_KEY}"}).x == "k3y", "OmegaConf's own resolver is back"


def test_the_command_allows_environment_variables_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_NAME", "mine")
    path = written(tmp_path, "output: {name: '${oc.env:A_NAME}'}")
    assert main(["train", "--config", path, "--print-config"]) == ConfigError.exit_status
    assert "--allow-env A_NAME" in capsys.readouterr().err
    assert main(["train", "--config", path, "--print-config", "--allow-env", "A_NAME"]) == 0
    assert "name: mine" in capsys.readouterr().out


def test_files_and_overrides_that_would_fill_memory_are_one_sentence(tmp_path: Path) -> None:
    """Deep YAML, numbers of thousands of digits, aliases that double with each line."""
    doubled = "".join(f"a{number}: &a{number} [*a{number - 1}, *a{number - 1}]\n" for number in range(1, 30))
    for text in ("[" * 5_000 + "]" * 5_000, "9" * 5_000, f"&a0 [x, y]\n{doubled}"):
        (tmp_path / "bomb.yaml").write_text(f"a: {text}")
        with pytest.raises(ConfigError, match=r"bomb\.yaml' is not valid YAML"):
            sections.load_tree(str(tmp_path / "bomb.yaml"))
        if "\n" not in text:
            with pytest.raises(ConfigError, match="the value is not valid YAML"):
                sections.load_tree(None, [f"a={text}"])
