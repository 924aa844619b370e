"""Exports as GGUF files: what llama.cpp's converters are called with, and what is said without them.

The converters are stand-ins: programs of the same names that write their arguments to the file. llama.cpp itself is not
installed where these tests run, so no real GGUF file is made here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tiny import Complete

from raycl.cli import main

STAND_IN = """#!{python}
import json, pathlib, sys
if {status}:
    sys.exit("architecture TinyForCausalLM is not supported")
pathlib.Path(sys.argv[2]).write_text(json.dumps(sys.argv[1:]))
"""


def install(folder: Path, patch: pytest.MonkeyPatch, status: int = 0) -> None:
    """Put stand-ins of both converters on PATH."""
    folder.mkdir()
    for name in ("convert_lora_to_gguf.py", "convert_hf_to_gguf.py"):
        (folder / name).write_text(STAND_IN.format(python=sys.executable, status=status))
        (folder / name).chmod(0o755)
    patch.setenv("PATH", str(folder))


def test_an_adapter_and_a_merged_model_are_converted(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins of the converters (see above) convert an adapter and a merged model."""
    done = complete("llama", "olora", "torch")
    bank, folder = done.storage.sub("bank").uri, tmp_path / "adapter"
    words = ["bank", "export", bank, "--to", str(folder), "--gguf"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main.main(words) == 1 and not folder.exists()
    error = capsys.readouterr().err
    assert "convert_lora_to_gguf.py of llama.cpp, which is not on PATH: git clone" in error
    install(tmp_path / "bin", monkeypatch)
    assert main.main(words) == 0
    assert f"wrote {folder}/adapter.gguf" in capsys.readouterr().out
    base = done.config.backbone.name
    given = json.loads((folder / "adapter.gguf").read_text())
    assert given == ["--outfile", f"{folder}/adapter.gguf", "--base", base, str(folder)]
    assert "rank_pattern" not in json.loads((folder / "adapter_config.json").read_text())
    merged = tmp_path / "merged"
    assert main.main([*words[:3], "--to", str(merged), "--gguf", "--merged"]) == 0
    assert json.loads((merged / "model.gguf").read_text()) == ["--outfile", f"{merged}/model.gguf", str(merged)]


def test_what_cannot_be_converted_is_one_sentence(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors of the stand-ins (see above) and of models that GGUF cannot hold are one sentence each."""
    install(tmp_path / "bin", monkeypatch, status=1)
    text, label = (complete(kind, "olora", "torch").storage.sub("bank").uri for kind in ("llama", "bert"))
    assert main.main(["bank", "export", text, "--to", str(tmp_path / "text"), "--gguf"]) == 1
    assert "ended with status 1" in (error := capsys.readouterr().err) and "TinyForCausalLM is not supported" in error
    assert main.main(["bank", "export", label, "--to", str(tmp_path / "label"), "--gguf"]) == 1
    assert "answers by label heads, which a GGUF file does not hold" in capsys.readouterr().err
