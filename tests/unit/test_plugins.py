"""Tests of what packages add: found by name, refused in one sentence, and never in the way of a run without it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from fork_server import Call, ForkServer

from raycl import plugins
from raycl.config import as_tree, validate
from raycl.config.reference import commented_yaml
from raycl.data.benchmarks.orders import find
from raycl.data.settings import StreamConfig
from raycl.data.stream import open_stream
from raycl.errors import BankError, ConfigError, PluginError
from raycl.methods.registry import METHODS, method_class
from raycl.metrics.answers import Answers
from raycl.metrics.per_example import score
from raycl.operations.plan import tables
from raycl.operations.sweep.trials.prefix import prefix_keys
from raycl.routing.routers import make_router, router_class, with_package
from raycl.testing.packages import write_package
from raycl.training.definition.inputs import different_versions, versions
from raycl.training.setup.plugins_list import plugins_list
from raycl.training.setup.run_config import RunConfig, load_config, plugins_of
from raycl.types import RouterState

MODULE = '''
from typing import ClassVar, Literal

from pydantic import Field

from raycl.data.benchmarks.knowledge import PublishedTask
from raycl.data.benchmarks.orders import Benchmark
from raycl.data.sources.fields import SourceRow
from raycl.metrics.answers import Metric, mean_best
from raycl.methods.base import MethodConfig
from raycl.methods.finetune import Finetune
from raycl.methods.modifier import GradientModifier, ModifierConfig
from raycl.methods.wrapper import Wrapper, WrapperConfig
from raycl.routing.routers import SumRouter


class ToyConfig(MethodConfig):
    """A toy."""

    name: Literal["toy"] = "toy"
    rank: int = Field(3, ge=1, description="of nothing")


class Toy(Finetune):
    Config: ClassVar = ToyConfig


class Unnamed(Finetune):
    pass


class AroundConfig(WrapperConfig):
    """Around another method."""

    name: Literal["around"] = "around"


class Around(Wrapper):
    Config: ClassVar = AroundConfig


class Router(SumRouter):
    pass


class ScaleConfig(ModifierConfig):
    """Gradients times a factor."""

    name: Literal["scale"] = "scale"
    factor: float = Field(0.5, ge=0, description="what gradients are multiplied by")


class Scale(GradientModifier):
    Config = ScaleConfig


def upper(file, columns, findings):
    for number, line in file.lines():
        text, _, label = line.partition("|")
        yield SourceRow(number, text.upper(), (label,))


half = Metric(mean_best(lambda answer, reference: 0.5))
order = Benchmark("toy-order", ("one", "two"), known={"one": PublishedTask(("x", "y"), "half", folders=("first",))})
'''
ADDS: dict[plugins.Kind, dict[str, str]] = {
    "method": {"toy": "toy_pkg:Toy", "around": "toy_pkg:Around", "broken": "toy_pkg.missing:X"},
    "router": {"toy-sum": "toy_pkg:Router"},
    "modifier": {"scale": "toy_pkg:Scale"},
    "metric": {"half": "toy_pkg:half"},
    "format": {"piped": "toy_pkg:upper"},
    "order": {"toy-order": "toy_pkg:order"},
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installed package."""
    folder = write_package(tmp_path / "site", "toy-pkg", ADDS, "1.2", {"toy_pkg.py": MODULE})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "toy_pkg", raising=False)
    return folder


def more(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, adds: dict[plugins.Kind, dict[str, str]]) -> None:
    monkeypatch.syspath_prepend(str(write_package(folder, name, adds)))


@pytest.mark.usefixtures("package")
def test_a_method_of_a_package_is_chosen_by_its_name() -> None:
    config = load_config(None, ["method=toy", "method.rank=5"])
    assert (config.method.name, as_tree(config)["method"]["rank"]) == ("toy", 5)
    assert validate(RunConfig, as_tree(config)) == config
    assert "rank: 5 " in commented_yaml(config) and "# of nothing" in commented_yaml(config)
    assert load_config(None, ["method=replay", "method.learner=toy"]).method.learner.name == "toy"
    assert load_config(None, ["method=around", "method.learner=olora"]).method.learner.name == "olora"
    assert load_config(None, ["modifiers=[scale]"]).modifiers["scale"].name == "scale"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=tooy"], "config key 'method' names 'tooy': did you mean 'toy'?"),
        (["method=toy", "method.rnk=5"], "unknown config key 'method.rnk': did you mean 'method.rank'?"),
        (["method=toy", "method.rank=0"], "config key 'method.rank' is 0: input should be greater than or equal to 1"),
        (
            ["method=replay", "method.learner=toy", "method.learner.rank=0"],
            "config key 'method.learner.rank' is 0: inp",
        ),
        (["method=replay", "method.learner=around"], "method.learner is 'around', a method around another one"),
        (["modifiers=[scale]", "modifiers.scale.factr=1"], "unknown config key 'modifiers.scale.factr': did you mean"),
        (["modifiers=[scale,migu]", "modifiers.migu.threshold=3"], "config key 'modifiers.migu.threshold' is 3: input"),
        (["modifiers=[scal]"], "modifiers: 'scal' is unknown: did you mean 'scale'?"),
        (
            ["method=broken"],
            "method 'broken' of package 'toy-pkg' 1.2 cannot be used: importing toy_pkg.missing:X fail",
        ),
        (["stream.tasks=[{name: a, path: x, format: pipd}]"], "stream.tasks.0.format: 'pipd' is no known format: did"),
    ],
)
def test_errors_use_the_users_names_and_those_of_the_package(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith(words)
    rest = str(caught.value).removesuffix("; repair or uninstall the package").replace("; 'toy_pkg'", "")
    assert ";" not in rest, "one mistake is one sentence"


def test_a_broken_package_stops_no_run_without_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "toy_pkg.py").write_text("raise KeyError('x')")
    assert load_config(None, ["method=olora"]).method.name == "olora"
    with pytest.raises(PluginError, match=r"method 'toy' of package 'toy-pkg' 1.2 cannot be used: .*KeyError: 'x'"):
        load_config(None, ["method=toy"])
    monkeypatch.setattr(tables, "METHODS", ("sapt",))  # one built-in method is counted, and not all
    table = tables.methods_table()
    assert "`sapt`" in table and "not in the table: method 'toy' of package 'toy-pkg' 1.2 cannot be used" in table


def test_names_that_are_taken_are_refused(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more(monkeypatch, tmp_path / "two", "two", {"method": {"toy": "toy_pkg:Toy", "wrong": "toy_pkg:Router"}})
    more(monkeypatch, tmp_path / "three", "three", {"method": {"lora": "toy_pkg:Toy", "other": "toy_pkg:Unnamed"}})
    assert method_class("lora").__module__ == "raycl.methods.single_adapter"
    with pytest.raises(PluginError, match=r"method 'toy' comes from packages 'toy-pkg' 1.2 and 'two' 0.0: un"):
        load_config(None, ["method=toy"])
    with pytest.raises(PluginError, match=r"'wrong' of package 'two' 0.0 is .* expected a subclass of raycl.methods.b"):
        load_config(None, ["method=wrong"])
    with pytest.raises(
        PluginError, match=r"'other' of package 'three' 0.0 has the settings .*FinetuneConfig: expected"
    ):
        load_config(None, ["method=other"])
    usable, problems = plugins_list()
    assert {"scale", "toy-sum", "half", "piped", "toy-order", "around"} == {plugin.name for plugin in usable}
    assert "method 'lora' of package 'three' 0.0 has a built-in name, and the built-in method is used" in str(problems)
    assert len(problems) == 5


@pytest.mark.usefixtures("package")
def test_what_a_run_uses_of_packages_is_recorded() -> None:
    config = load_config(None, ["method=replay", "method.learner=toy", "modifiers=[scale]"])
    used = plugins_of(config)
    assert used == {"method toy": "toy-pkg 1.2", "modifier scale": "toy-pkg 1.2"}
    assert plugins_of(load_config(None, [])) == {}
    assert versions(used).items() >= used.items()
    assert (
        different_versions(used, {**used, "method toy": "toy-pkg 1.3"}) == "method toy toy-pkg 1.3, before toy-pkg 1.2"
    )


def test_trials_share_no_phases_of_other_versions(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["method=toy"])
    before = prefix_keys(config, ["a", "b", "c"])
    record = package / "toy_pkg-1.2.dist-info"
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-pkg\nVersion: 1.3\n")
    monkeypatch.syspath_prepend("/nowhere")
    assert not set(before) & set(prefix_keys(config, ["a", "b", "c"]))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("what", "source", "words"),
    [
        (
            "method toy",
            "toy-pkg 1.1",
            "comes from package 'toy-pkg' 1.1, and the worker on .* has toy-pkg 1.2: install",
        ),
        (
            "method else",
            "x 3",
            "method 'else' comes from package 'x' 3, and the worker on .* does not have it: install it",
        ),
    ],
)
def test_a_worker_without_the_package_says_so(what: str, source: str, words: str) -> None:
    plugins.require({"method toy": "toy-pkg 1.2"})
    with pytest.raises(PluginError, match=words):
        plugins.require({what: source})


@pytest.mark.usefixtures("package")
def test_a_router_of_a_package_is_named_in_its_state() -> None:
    state = with_package(RouterState("toy-sum"))
    assert state.package == "toy-pkg 1.2" and with_package(RouterState("sum")).package == ""
    assert make_router(state, {"a": ("a",), "b": ("b",)}).route(["x"], None).weights.tolist() == [[1.0, 1.0]]


def test_a_router_whose_package_is_missing_is_one_sentence() -> None:
    with pytest.raises(
        BankError, match=r"router 'gone' comes from package 'far' 2.0, which is not installed here: pip"
    ):
        router_class(RouterState("gone", package="far 2.0"))


@pytest.mark.usefixtures("package")
def test_formats_metrics_and_orders_of_packages_are_used_by_name(tmp_path: Path) -> None:
    for task in ("first", "two"):
        (tmp_path / task).mkdir()
        for split in ("train", "test"):
            (tmp_path / task / f"{split}.jsonl").write_text('{"text": "a b", "label": "x"}\n' * 4)
    stream = open_stream(StreamConfig(name="toy-order", root=str(tmp_path), dev_fraction=0), 0)
    first = stream.tasks[0]
    assert (first.name, first.labels, first.metric) == ("one", ("x", "y"), "half")
    assert score("half", Answers(["x", "y"], [["x"], ["z"]])).value == 50.0
    (tmp_path / "piped").mkdir()
    for split in ("train", "test"):
        (tmp_path / "piped" / f"{split}.piped").write_text("a b|yes\nc d|no\n")
    spec = {"name": "own", "path": str(tmp_path / "piped"), "format": "piped", "metric": "half"}
    given = validate(StreamConfig, {"tasks": [spec], "dev_fraction": 0, "cache_dir": str(tmp_path / "cache")})
    result = open_stream(given, 0)
    raw = result.source(result.tasks[0], "train")
    assert raw is not None and raw.open().values("text", [0, 1]) == ["A B", "C D"]
    config = load_config(None, [f"stream.tasks=[{spec}]".replace("'", "")])
    assert plugins_of(config) == {"metric half": "toy-pkg 1.2", "format piped": "toy-pkg 1.2"}
    files = {split: f"{spec['path']}/{split}.piped" for split in ("train", "test")}
    by_suffix = open_stream(validate(StreamConfig, {**given.model_dump(), "tasks": [{"name": "own", **files}]}), 0)
    again = by_suffix.source(by_suffix.tasks[0], "train")
    assert again is not None and again.sha256 == raw.sha256


def test_an_order_has_the_name_that_it_is_installed_under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from raycl.data.benchmarks.orders import Benchmark\norder = Benchmark('a', ('yelp',))\n"
    adds: dict[plugins.Kind, dict[str, str]] = {"order": {"b": "orders_pkg:order"}}
    folder = write_package(tmp_path, "orders-pkg", adds, modules={"orders_pkg.py": text})
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(PluginError, match=r"order 'b' of package 'orders-pkg' 0.0 is a benchmark of the name 'a'"):
        find("b")


def test_a_package_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages come and go so by `pip install` and `pip uninstall` in a cell of a notebook."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plugins.find("method", "late") is None
    write_package(tmp_path, "late-pkg", {"method": {"late": "late_pkg:Late"}})
    os.utime(tmp_path, ns=(0, 1))  # the clock of a file system may not have gone on
    assert plugins.find("method", "late") is not None
    shutil.rmtree(tmp_path / "late_pkg-0.0.dist-info")
    os.utime(tmp_path, ns=(0, 2))
    assert plugins.find("method", "late") is None


def test_built_in_names_read_no_entry_points(fork_server: ForkServer, tmp_path: Path) -> None:
    """The default run and every built-in method read none, in a process that has not imported raycl yet."""
    code = (
        "import raycl.plugins; raycl.plugins.distributions = None\n"
        "from raycl.training.setup.run_config import load_config, plugins_of\n"
        f"for name in {[*METHODS]}: plugins_of(load_config(None, ['method=' + name, 'modifiers=[migu]']))\n"
        "from raycl.data.stream import open_stream; open_stream(load_config(None, []).stream, 0)\n"
    )
    fork_server.run([Call("fresh_package:main", (code,), tmp_path / "log")], 120)
