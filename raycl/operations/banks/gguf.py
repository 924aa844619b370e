"""Exported folders as GGUF files, by the converters of llama.cpp, which are programs of their own.

    convert_lora_to_gguf.py --outfile FILE [--base MODEL] ADAPTER     a LoRA in PEFT's layout
    convert_hf_to_gguf.py --outfile FILE MODEL                        a merged model

They are found on PATH. A LoRA in GGUF has one alpha, and llama.cpp scales each linear by alpha / rank: linears of
other ranks are padded with zeros first (`of_one_rank`).
"""

import shutil
import subprocess
from pathlib import Path

from raycl.errors import BankError

LORA, MODEL = "convert_lora_to_gguf.py", "convert_hf_to_gguf.py"
"""Converters of an adapter and of a model."""

FILES = {LORA: "adapter.gguf", MODEL: "model.gguf"}
"""Converter -> the file that it writes, in the exported folder."""


def converter(merged: bool) -> str:
    """Return the path of the converter.

    Raises:
        BankError: it is not installed.
    """
    name = MODEL if merged else LORA
    found = shutil.which(name)
    if found is None:
        raise BankError(
            f"--gguf needs {name} of llama.cpp, which is not on PATH: git clone https://github.com/ggml-org/llama.cpp, "
            "install its requirements.txt, make the script executable, and add the folder to PATH"
        )
    return found


def convert(program: str, folder: Path, base: Path | None = None) -> Path:
    """Write a GGUF file into an exported folder; returns the file.

    Args:
        program: `converter`. base: folder of the backbone of an adapter; None: a merged model.

    Raises:
        BankError: the converter failed; the exported folder stays.
    """
    file = folder / FILES[Path(program).name]
    words = [program, "--outfile", str(file), *(["--base", str(base)] if base else []), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not file.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise BankError(
            f"{Path(program).name} ended with status {done.returncode} and wrote no '{file}': {last:.300}; the "
            f"exported folder '{folder}' is complete: convert it yourself, or use a version of llama.cpp for this model"
        )
    return file
