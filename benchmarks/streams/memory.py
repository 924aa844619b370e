"""Memory of a run whose backbone is large: what all its processes hold together, under each engine.

A random LLaMA-shaped model is written to a folder, and `raycl train` learns two built-in tasks on it with SLM, as a
user would start it. Each process counts with its proportional memory (Pss: pages that several processes map are divided
among them), so the sum over the command, Ray's processes and the workers is what the node needs; the object store is in
it, since Ray's processes map it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.figures import Figure, Report, machine
from raycl.errors import RunError

GIB = 2**30
EVERY_S = 1.0
ENGINES: dict[str, tuple[str, ...]] = {
    "torch": ("engine=torch",),
    "zero3": ("engine=deepspeed", "engine.zero_stage=3"),
    "fsdp": ("engine=fsdp",),
}
SHAPES: dict[str, tuple[int, int, int]] = {
    "20M": (256, 8, 8),
    "60M": (512, 12, 8),
    "200M": (896, 20, 14),
    "1.1B": (2048, 22, 32),
}
"""Name -> width, layers and attention heads; the last is TinyLlama's, whose vocabulary the others have too."""
VOCABULARY = 32_000
LIMIT_GIB = 18.0
"""The limit of the 1.1B model in float32 (4.1 GiB a copy) with two workers."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of sizes."""
    parser.add_argument("--model", choices=list(SHAPES), default="60M", help="size of the random backbone")
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), default=list(ENGINES), help="engines in turn")
    parser.add_argument("--workers", type=int, default=2, help="of Ray Train")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each of two tasks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--method", default="slm", help="what learns")
    parser.add_argument("--other", type=Path, help="folder of another checkout of raycl, measured too")
    parser.add_argument("--other-engines", nargs="+", choices=list(ENGINES), default=["zero3"], help="of that checkout")


def measure(options: argparse.Namespace) -> Report:
    """Measure for each engine the peak of proportional memory over all processes of a run, traffic and time."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        sizes = map(str, (*SHAPES[options.model], VOCABULARY))
        program = [sys.executable, "-c", WRITE, f"{folder}/model", *sizes, options.dtype]
        subprocess.run(program, check=True)
        copy = sum(file.stat().st_size for file in Path(folder, "model").glob("*.safetensors")) / GIB
        figures = [figure for engine in options.engines for figure in _engine(engine, options, folder, copy)]
        for engine in options.other_engines if options.other else ():
            figures += _engine(engine, options, folder, copy, options.other)
    settings = {key: getattr(options, key) for key in ("model", "workers", "steps", "dtype", "method")}
    return Report("memory", settings, figures, machine(load))


def _engine(
    engine: str, options: argparse.Namespace, folder: str, copy: float, other: Path | None = None
) -> Iterator[Figure]:
    label = engine if other is None else f"{engine} of {other}"
    words = [f"backbone.name={folder}/model", *ENGINES[engine]]
    words += [f"output.dir={folder}/runs{'-other' if other else ''}", f"output.name={engine}"]
    words += [f"method={options.method}", f"backbone.dtype={options.dtype}", f"launch.workers={options.workers}"]
    words += [f"train.max_steps={options.steps}", "train.batch_size=4", "stream.max_source_tokens=64"]
    words += ["stream.name=builtin", "stream.tasks=[topic,sentiment]", "stream.train_rows=32", "stream.test_rows=4"]
    words += ["stream.max_target_tokens=4", "checkpoint.every_steps=4"]
    peak, seconds = peak_of([sys.executable, "-m", "raycl.cli.main", "train", *words], other)
    detail = f"{options.model}, {options.workers} workers, one copy of the weights is {copy:.2f} GiB"
    target = LIMIT_GIB if options.model == "1.1B" and other is None else None
    yield Figure(f"{label}: memory of all processes", peak / GIB, "GiB", target, detail=detail)
    if other is None:  # earlier commits do not count bytes
        results = json.loads(Path(folder, "runs", engine, "results.json").read_text())
        moved = results["phase_times"][-1]["step_bytes"] / 2**20
        yield Figure(f"{label}: moved between workers by a step", moved, "MiB")
    yield Figure(f"{label}: the whole run", seconds, "s")


def peak_of(words: Sequence[str], imports: Path | None = None) -> tuple[float, float]:
    """Return bytes that a command and its descendants held together at most, and the seconds it took.

    Args:
        words: the command.
        imports: folder from which it and its descendants import first.

    Raises:
        RunError: the command failed.
    """
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        env = None if imports is None else {**os.environ, "PYTHONPATH": str(imports.resolve())}
        command = subprocess.Popen(words, stdout=output, stderr=output, env=env, cwd=imports)  # python -m reads both
        over, peaks = threading.Event(), [0.0]
        watcher = threading.Thread(target=_watch, args=(command.pid, over, peaks), daemon=True)
        watcher.start()
        status = command.wait()
        over.set()
        watcher.join()
        if status:
            output.seek(0)
            raise RunError(f"'{' '.join(words)}' ended with {status}: {output.read().decode()[-2000:]}")
    return peaks[0], time.perf_counter() - began


def _watch(pid: int, over: threading.Event, peaks: list[float]) -> None:
    """Ray's processes are descendants of the command that starts it."""
    root = psutil.Process(pid)
    while not over.wait(EVERY_S):
        with suppress(psutil.NoSuchProcess):
            result = [root, *root.children(recursive=True)]
            peaks[0] = max(peaks[0], float(sum(map(_proportional, result))))


def _proportional(process: psutil.Process) -> int:
    """Return bytes; 0 if it has just ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


WRITE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from raycl.testing.tiny_models import word_tokenizer
folder, width, layers, heads, words, dtype = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
torch.manual_seed(0)
torch.set_default_dtype(getattr(torch, dtype))
shape = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
config = LlamaConfig(
    vocab_size=words, num_attention_heads=heads, num_key_value_heads=max(1, heads // 8),
    max_position_embeddings=2048,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape
)
LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")
word_tokenizer("llama", ["topic", "sentiment"]).save_pretrained(folder)
"""
"""Writes the model in a process of its own, so that its memory is not this one's."""
