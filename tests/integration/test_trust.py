"""Code that comes with a model runs where the command allows it, never because a file asks for it."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import Lab, work

from raycl import config as configs
from raycl.bank import Bank
from raycl.config.trust import Permissions
from raycl.errors import BackboneError, BankError, ConfigError, RunError
from raycl.launch import prepared_run
from raycl.operations.banks.unlearning import RecordedSources, forget
from raycl.operations.sweep.comparison import load_comparison
from raycl.operations.sweep.definition.sweep_config import load_sweep
from raycl.serve.gate.judge import judge
from raycl.serve.service.opening import close_service, open_service
from raycl.serve.settings import ServeConfig, load_serve_config
from raycl.serve.snapshots.parts import backbone_of
from raycl.storage import Storage
from raycl.training.setup import checks, run_config

REPO = Path(__file__).resolve().parents[2]
TYPED = "backbone.trust_remote_code=true"
CODE = """
from pathlib import Path
from transformers import BertConfig, BertModel
Path({witness!r}).touch()
class Config(BertConfig):
    model_type = "custom"
class Model(BertModel):
    config_class = Config
"""


@dataclass(frozen=True)
class Custom:
    """A model that brings its code, what its code leaves when it runs, and a config file that asks for it."""

    folder: Path
    witness: Path
    file: Path

    @property
    def ran(self) -> bool:
        """True if the code ran since this property was last read."""
        there = self.witness.exists()
        self.witness.unlink(missing_ok=True)
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]
        return there


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Yield a cache of their own for modules that come with models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def custom(lab: Lab, tmp_path: Path, modules: None) -> Custom:
    folder, witness = shutil.copytree(lab.model_folder("bert"), tmp_path / "custom"), tmp_path / "ran"
    (folder / "own.py").write_text(CODE.format(witness=str(witness)))
    classes = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    summary = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**summary, "auto_map": classes, "model_type": "custom"}))
    tree = lab.tree("bert", "inclora", output={"dir": str(tmp_path / "runs"), "name": "mine"})
    tree["backbone"] |= {"name": str(folder), "trust_remote_code": True}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return Custom(folder, witness, file)


@pytest.fixture
def trained(custom: Custom) -> Storage:
    """Return a finished run, whose files all ask for the code."""
    prepared = prepared_run.prepare(run_config.load_config(str(custom.file), [TYPED]))
    work(prepared)
    assert custom.ran, "the command allowed it"
    return prepared.storage


def test_a_config_file_cannot_permit_remote_code(custom: Custom) -> None:
    with pytest.raises(ConfigError, match=rf"config\.yaml' sets backbone\.trust_remote_code.*add {TYPED} to the comm"):
        run_config.load_config(str(custom.file), ["method.r=4"])
    with pytest.raises(ConfigError, match="trust_remote_code"):
        run_config.load_config(str(custom.file), [TYPED, "backbone.trust_remote_code=${seed}"])
    assert not custom.ran


SAPT = {"name": "sapt", "arm": {"source": "generated"}}


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("backbone.allow_pickle", SAPT),
        ("method.generator.backbone.trust_remote_code", SAPT),
        ("method.encoder.allow_pickle", "slm"),
    ],
)
def test_a_config_file_cannot_permit_any_risk(lab: Lab, tmp_path: Path, path: str, method: Any) -> None:
    tree = lab.tree("bert", method)
    configs.assign(tree, path, True, "test")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=f"sets {path}"):
        run_config.load_config(str(tmp_path / "config.yaml"), [TYPED])
    run_config.load_config(str(tmp_path / "config.yaml"), [f"{path}=true"])


def test_a_run_starts_with_permission_on_the_command_line(custom: Custom, trained: Storage) -> None:
    with pytest.raises(ConfigError, match=rf"sets backbone\.trust_remote_code.*add {TYPED} to the command"):
        prepared_run.reopen(trained.uri)
    with pytest.raises(ConfigError, match="trust_remote_code"):
        prepared_run.extend(trained.uri, ["{name: later, path: x}"])
    assert not custom.ran
    with pytest.raises(RunError, match=rf"continue with --resume {trained.uri} {TYPED}, or"):
        prepared_run.prepare(run_config.load_config(str(custom.file), [TYPED]))
    assert prepared_run.reopen(trained.uri, overrides=(TYPED,)).done == 2
    again = prepared_run.prepare(run_config.load_config(str(custom.file), [TYPED, "output.exists=resume"]))
    assert again.done == 2 and custom.ran, "the same command, given again at the restart"


def test_a_bank_is_served_with_its_authors_code_where_the_endpoint_allows_it(custom: Custom, trained: Storage) -> None:
    bank = Bank(trained.sub("bank"))
    newest = bank.newest()
    assert newest is not None
    sentence = r"snapshot \d was made with backbone\.trust_remote_code=true, .* allow it with trust_remote_code=true"
    with pytest.raises(BankError, match=sentence):
        backbone_of(newest)
    config = ServeConfig(bank=bank.storage.uri, snapshot=1)
    for refused in (lambda: open_service(config), lambda: judge(config, 2), lambda: forget(bank, newest, "colour")):
        with pytest.raises(BankError, match=sentence):
            refused()
    assert not custom.ran
    service = open_service(config.model_copy(update={"trust_remote_code": True}))
    close_service(service)
    assert custom.ran
    assert (
        forget(
            bank,
            newest,
            "colour",
            scores=False,
            sources=RecordedSources(permissions=Permissions(trust_remote_code=True)),
        ).new
        == 3
    )


def test_an_endpoints_config_file_cannot_permit_remote_code(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("bank: bank\ntrust_remote_code: true\nallow_pickle: true\n")
    with pytest.raises(ConfigError, match=r"serve\.yaml' sets allow_pickle"):
        load_serve_config(str(file), ["trust_remote_code=true"])
    assert load_serve_config(str(file), ["trust_remote_code=true", "allow_pickle=true"]).allow_pickle


@pytest.mark.parametrize("flags", [(), ("--trust-remote-code",)])
def test_the_bank_command_needs_permission(
    custom: Custom, trained: Storage, tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    job = runpy.run_path(str(REPO / "jobs/bank.py"))["main"]
    bank = trained.sub("bank").uri
    assert job(["export", bank, "--adapters", "colour", "--to", str(tmp_path / "peft")]) == 0
    arguments = (
        ["export", bank, "--adapters", "colour", "--merged", "--to", str(tmp_path / "merged")],
        ["import", bank, str(tmp_path / "peft"), "--name", "guest", "--backbone", str(custom.folder)],
    )
    for given in arguments:
        capsys.readouterr()
        assert job([*given, *flags]) == (0 if flags else 1)
        if not flags:
            assert "--trust-remote-code" in capsys.readouterr().err
    assert custom.ran == bool(flags)


def test_a_sweep_file_cannot_permit_remote_code(custom: Custom, tmp_path: Path) -> None:
    base = yaml.safe_load(custom.file.read_text())
    base.pop("output")
    plain = {**base, "backbone": {**base["backbone"], "trust_remote_code": False}}
    rank = {"method.r": {"grid": [2, 4]}}
    asks = {"backbone.trust_remote_code": {"grid": [True, False]}}
    follows = {"backbone.trust_remote_code": {"expr": "method.r > 3"}}
    for number, (tree, space) in enumerate([(base, rank), (plain, rank | asks), (plain, rank | follows)]):
        file = tmp_path / f"sweep{number}.yaml"
        file.write_text(yaml.safe_dump({"name": "mine", "base": tree, "space": space}))
        with pytest.raises(ConfigError, match=rf"sweep\d\.yaml' sets .*add base\.{TYPED} to the command"):
            load_sweep(str(file))
        load_sweep(str(file), [f"base.{TYPED}"])
    assert not custom.ran


def test_a_comparison_file_cannot_permit_remote_code(custom: Custom, tmp_path: Path) -> None:
    tree = yaml.safe_load(custom.file.read_text())
    tree.pop("output")
    plain = {**tree, "backbone": {**tree["backbone"], "trust_remote_code": False}}
    for number, (base, row) in enumerate([(tree, []), (plain, [TYPED])]):
        file = tmp_path / f"compare{number}.yaml"
        file.write_text(yaml.safe_dump({"name": "mine", "base": base, "runs": {"a": {"set": row}}}))
        with pytest.raises(ConfigError, match=rf"compare\d\.yaml' sets .*add base\.{TYPED} to the command"):
            load_comparison(str(file))
        assert list(load_comparison(str(file), [f"base.{TYPED}"]).runs) == ["a"]
    assert not custom.ran


def test_a_model_with_code_of_its_own_names_the_setting(custom: Custom, lab: Lab) -> None:
    config = lab.config("bert", backbone={"name": str(custom.folder)})
    with pytest.raises(BackboneError, match=r"brings code of its own, .*backbone\.trust_remote_code=true"):
        checks.check(config)
    assert not custom.ran
