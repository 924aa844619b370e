"""The peer: a plain single-process PyTorch loop with LoRA over the same tasks, as one writes it without a platform.

    python -m benchmarks.streams.plain WORKSHEET REPORT

The price of the platform is what it costs more than this. Nothing of raycl's training, data or method code runs here;
only loading the weights is shared, and the work comes as a worksheet of texts and batches.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from raycl.backbone import BackboneConfig, BackboneOptions, load_backbone, load_codec

TARGETS = {"encoder": ["query", "value"], "encoder-decoder": ["q", "v"], "decoder": ["q_proj", "v_proj"]}
"""Kind of model -> the linear layers that get LoRA (BERT, T5, LLaMA)."""


@dataclass(frozen=True)
class Row:
    """A tokenised example; `target` ends in the end-of-sequence id and is empty for encoders."""

    source: list[int]
    target: list[int]
    label: int


class Model:
    """A language model with LoRA that gives losses and answers. One subclass per kind of model."""

    def __init__(self, model: nn.Module, tokenizer: Any, lora: dict[str, Any], kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = get_peft_model(model, LoraConfig(**lora, lora_dropout=0.0, target_modules=TARGETS[kind]))
        self.tokenizer = tokenizer
        self.pad: int = tokenizer.pad_token_id
        self.device = next(model.parameters()).device
        self.bf16 = next(model.parameters()).dtype == torch.bfloat16
        self.generates = kind != "encoder"

    def learn_labels(self, labels: Sequence[str]) -> None:
        """Make room for the labels of a new task (models that generate need none)."""

    def rows(self, pairs: Sequence[tuple[str, str]]) -> list[Row]:
        """Tokenise prompts and answers."""
        sources = self.tokenizer([text for text, _ in pairs])["input_ids"]
        targets: list[list[int]] = [[] for _ in pairs]
        if self.generates:
            answers = self.tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
            targets = [[*ids, self.tokenizer.eos_token_id] for ids in answers]
        labels = [self.label(answer) for _, answer in pairs]
        return [Row(*row) for row in zip(sources, targets, labels, strict=True)]

    def label(self, answer: str) -> int:
        """Class number of an answer; -1 where there are no classes."""
        return -1

    def trained(self) -> list[nn.Parameter]:
        """LoRA, and what a subclass adds."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def padded(self, rows: Sequence[list[int]], value: int) -> Tensor:
        """Return `[len(rows), longest]`, padded on the right."""
        width = max(map(len, rows))
        return torch.tensor([row + [value] * (width - len(row)) for row in rows], device=self.device)

    def sources(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return ids and mask of the prompts."""
        ids = [row.source for row in rows]
        mask = [[1] * len(source) for source in ids]
        return {"input_ids": self.padded(ids, self.pad), "attention_mask": self.padded(mask, 0)}

    def loss_sum(self, rows: Sequence[Row]) -> Tensor:
        """Cross-entropy summed over the positions that carry loss."""
        raise NotImplementedError

    def answers(self, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
        """Return one greedy answer per row."""
        raise NotImplementedError


class Encoder(Model):
    """Mean pooling and a linear head that grows with the tasks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.labels: list[str] = []
        width = self.model.config.hidden_size
        self.weight = nn.Parameter(torch.zeros(0, width, device=self.device))
        self.bias = nn.Parameter(torch.zeros(0, device=self.device))

    def learn_labels(self, labels: Sequence[str]) -> None:
        """New rows start at zero, old ones keep their values."""
        new = [label for label in labels if label not in self.labels]
        self.labels += new
        with torch.no_grad():
            self.weight = nn.Parameter(torch.cat([self.weight, self.weight.new_zeros(len(new), self.weight.shape[1])]))
            self.bias = nn.Parameter(torch.cat([self.bias, self.bias.new_zeros(len(new))]))

    def label(self, answer: str) -> int:
        """Return the row of the head; of a label that no task has had yet: -1."""
        return self.labels.index(answer) if answer in self.labels else -1

    def trained(self) -> list[nn.Parameter]:
        """LoRA and the head."""
        return [*super().trained(), self.weight, self.bias]

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """Return `[B, labels]`."""
        inputs = self.sources(rows)
        mask = inputs["attention_mask"].unsqueeze(-1)
        states = self.model(**inputs).last_hidden_state
        return linear((states * mask).sum(1) / mask.sum(1), self.weight, self.bias)

    def loss_sum(self, rows: Sequence[Row]) -> Tensor:
        """Return the loss of one position per row."""
        labels = torch.tensor([row.label for row in rows], device=self.device)
        return cross_entropy(self.logits(rows).float(), labels, reduction="sum")

    def answers(self, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
        """Return the label with the largest logit."""
        return [self.labels[row] for row in self.logits(rows).argmax(-1).tolist()]


class Seq2Seq(Model):
    """T5 and its family: the model's own mean loss times the number of target tokens."""

    def loss_sum(self, rows: Sequence[Row]) -> Tensor:
        """Return all target tokens."""
        labels = self.padded([row.target for row in rows], -100)
        mean: Tensor = self.model(**self.sources(rows), labels=labels, use_cache=False).loss
        return mean * sum(len(row.target) for row in rows)

    def answers(self, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
        """Return the greedy generation."""
        ids = self.model.generate(**self.sources(rows), max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
        return [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]


class Causal(Model):
    """LLaMA and the like: prompt and answer in one sequence, loss on the answer, padding on the left to generate."""

    def loss_sum(self, rows: Sequence[Row]) -> Tensor:
        """Return all answer tokens."""
        ids = [row.source + row.target for row in rows]
        labels = self.padded([[-100] * len(row.source) + row.target for row in rows], -100)
        mask = self.padded([[1] * len(row) for row in ids], 0)
        inputs = {"input_ids": self.padded(ids, self.pad), "attention_mask": mask}
        mean: Tensor = self.model(**inputs, labels=labels, use_cache=False).loss
        return mean * sum(len(row.target) for row in rows)

    def answers(self, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
        """Return the greedy generation; only what follows the prompt."""
        width = max(len(row.source) for row in rows)
        blanks = [width - len(row.source) for row in rows]
        ids = [[self.pad] * blank + row.source for blank, row in zip(blanks, rows, strict=True)]
        mask = [[0] * blank + [1] * len(row.source) for blank, row in zip(blanks, rows, strict=True)]
        out = self.model.generate(
            input_ids=torch.tensor(ids, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=self.pad,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        return [text.strip() for text in self.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)]


def work(sheet: dict[str, Any]) -> dict[str, Any]:
    """Train on every task of the worksheet in turn; after each, answer the test rows of all tasks so far.

    Returns:
        `steps` (loss, seconds and tokens of each), `eval_s` per task, `answers` per task and task seen.
    """
    model = load(sheet)
    tested: list[tuple[dict[str, Any], list[Row]]] = []
    report: dict[str, Any] = {"steps": [], "eval_s": [], "answers": []}
    for task in sheet["tasks"]:
        model.learn_labels(task["labels"] or ())
        report["steps"] += train(model, model.rows(task["train"]), task["steps"], sheet)
        began = time.perf_counter()
        tested.append((task, model.rows(task["test"])))
        report["answers"].append({seen["name"]: evaluate(model, rows, seen, sheet) for seen, rows in tested})
        report["eval_s"].append(time.perf_counter() - began)
    return report


def load(sheet: dict[str, Any]) -> Model:
    """Return the backbone of the worksheet with fresh LoRA weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = BackboneConfig(**sheet["backbone"])
    codec = load_codec(config, *sheet["limits"])
    model = load_backbone(config, codec, device, sheet["seed"], BackboneOptions(trains=True)).model
    kinds: dict[str, type[Model]] = {"encoder": Encoder, "encoder-decoder": Seq2Seq, "decoder": Causal}
    return kinds[sheet["kind"]](model, codec.tokenizer, sheet["lora"], sheet["kind"], sheet["seed"])


def train(model: Model, rows: Sequence[Row], steps: Sequence[Any], sheet: dict[str, Any]) -> list[dict[str, float]]:
    """Train one task; every step is a list of micro-batches, each a list of rows."""
    fused = True if model.device.type == "cpu" else None  # as raycl's: ten times as fast there, and other roundings
    optimizer = torch.optim.AdamW(
        model.trained(), **sheet["optimizer"], weight_decay=sheet["weight_decay"], fused=fused
    )
    model.model.train()
    done = []
    for step in steps:
        began = time.perf_counter()
        batches = [[rows[row] for row in batch] for batch in step]
        loss, tokens = train_step(model, optimizer, batches, sheet["max_grad_norm"])
        done.append({"loss": loss, "seconds": time.perf_counter() - began, "tokens": tokens})
    return done


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[Row]], max_grad_norm: float
) -> tuple[float, int]:
    """Accumulate over the micro-batches and update; the loss is the mean over the whole step."""
    total = sum(len(row.target) if model.generates else 1 for batch in batches for row in batch)
    loss = 0.0
    for batch in batches:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            loss_sum = model.loss_sum(batch)
        (loss_sum / total).backward()  # type: ignore[no-untyped-call]
        loss += loss_sum.item()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss / total, sum(len(row.source) + len(row.target) for batch in batches for row in batch)


@torch.no_grad()
def evaluate(model: Model, rows: Sequence[Row], task: dict[str, Any], sheet: dict[str, Any]) -> list[str]:
    """Return answers of all test rows, in their order."""
    model.model.eval()
    answers = [""] * len(rows)
    for batch in task["test_batches"]:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.bf16):
            texts = model.answers([rows[row] for row in batch], sheet["max_new_tokens"])
        for row, text in zip(batch, texts, strict=True):
            answers[row] = text
    return answers


def peak_memory_mb() -> float:
    """Return the most memory this process held so far, in MiB: of the GPU, or resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20


def main() -> None:
    """Read the worksheet, do the work, write the report."""
    sheet = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(sheet["threads"])
    os.nice(max(0, sheet["niceness"] - os.nice(0)))
    report = {**work(sheet), "peak_memory_mb": peak_memory_mb()}
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
