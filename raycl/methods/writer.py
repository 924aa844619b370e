"""SAPT's generator: a LoRA that learns to write a task's inputs, and is forgotten when it has (SAPT, section 4.3).

It reads one special token, [Gen], whose embedding is trained with it, and writes an input text to its end token. The
task's template is put around what it wrote, as around real data: so the instruction is the real one, no
separator has to be written and parsed, and no token is added to a vocabulary. The authors' generator writes
instruction, separator and input: its instructions can come out wrong (one in SAPT's table 12 does), and as released it
trains nothing, since its LoRA weights are frozen.
Every worker trains the same one: it is small, and no part of the stream's own training.
What it does not know: the method, what its texts are used for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone, BackboneConfig, load_backbone, load_codec
from raycl.backbone.base import summed_cross_entropy
from raycl.backbone.roles import linear_names
from raycl.config import Section
from raycl.errors import ConfigError, RunError
from raycl.methods.pseudo import PseudoSamples, volume
from raycl.methods.stage_rows import StageRows
from raycl.types import IGNORE, Mixture

NAME = "generator"
TRIES = 4
"""Rounds of sampling before too few texts are an error."""


class WriterConfig(Section):
    """The generator's settings (rank, steps, batch, rate: SAPT, appendix C; else the authors' scripts)."""

    backbone: BackboneConfig | None = Field(
        None, description="who writes; null: the run's own backbone. Encoder-only backbones cannot, and must name one"
    )
    rank: int = Field(8, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)
    targets: tuple[str, ...] = Field(
        ("attention.query", "attention.value"),
        min_length=1,
        description="on a named backbone, and with prompts; else the linears that the tasks' blocks are on",
    )
    steps: int = Field(5000, ge=1, description="optimizer steps for each task")
    batch: int = Field(16, ge=1)
    rate: float = Field(1e-3, gt=0, description="of AdamW, constant")
    max_tokens: int = Field(512, ge=1, description="of a written input")
    top_k: int = Field(20, ge=1)
    repetition_penalty: float = Field(2.5, gt=0)


def check_writer(config: WriterConfig, kind: str) -> None:
    """Whether somebody can write.

    Args:
        kind: of the run's backbone.

    Raises:
        ConfigError: nobody can. BackboneError: the named backbone is not there.
    """
    if config.backbone is None and kind == "encoder":
        raise ConfigError(
            "method.arm.source=generated needs a backbone that writes, and this run's is encoder-only: name a small "
            "one in method.writer.backbone.name, or choose method.arm.source=real"
        )
    if config.backbone is not None and load_codec(config.backbone, 1, 1).kind == "encoder":
        raise ConfigError(
            f"method.writer.backbone.name '{config.backbone.name}' is encoder-only and cannot write texts: expected an "
            "encoder-decoder or decoder-only backbone"
        )


class Writer:
    """Writes inputs like those of a stage."""

    def __init__(self, config: WriterConfig, backbone: Backbone, stack: AdapterStack | None, seed: int) -> None:
        """Take the run's backbone between two stages, or load the named one.

        Args:
            stack: over the linears of `backbone`, with nothing in training; None: it has none yet.
        """
        self.config, self.seed = config, seed
        self.backbone, own = backbone, stack
        if config.backbone is not None:
            codec = load_codec(config.backbone, 1, 1)
            self.backbone, own = load_backbone(config.backbone, codec, backbone.device, seed, trains=True), None
        self._borrowed = own
        model = self.backbone.model
        self.stack = own or AdapterStack(model, linear_names(model, config.targets))

    def write(self, rows: StageRows, fraction: float) -> PseudoSamples:
        """As many inputs of each task of the stage as `fraction` of its training rows, with its template.

        Raises:
            RunError: what the generator writes is empty, again and again.
        """
        prompts: list[list[int]] = []
        try:
            for number, table in enumerate(rows.tables("train")):
                texts = self._like(table.texts(range(len(table))), volume(fraction, len(table)), self.seed + number)
                prompts += rows.prompts(table.task, texts)
        finally:
            if self._borrowed is None:
                self.stack.detach()
        return PseudoSamples(prompts, [], [])

    def _like(self, texts: Sequence[str], count: int, seed: int) -> list[str]:
        config, backbone = self.config, self.backbone
        torch.manual_seed(seed)
        self.stack.begin_live({NAME: config.rank}, config.alpha / config.rank, _init, config.dropout)
        embedding = backbone.model.get_input_embeddings().weight
        token = nn.Parameter(embedding.detach().float().mean(0))
        own = [p for layer in self.stack.layers.values() for p in (layer.lora_A, layer.lora_B) if p is not None]
        for parameter in backbone.parameters():
            parameter.requires_grad_(False)
        for parameter in own:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
        try:
            self._train(texts, token, [token, *own], seed)
            return self._sampled(token, count)
        finally:
            self.stack.end_live()

    def _train(self, texts: Sequence[str], token: Tensor, parameters: list[nn.Parameter], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        ids = [row[: self.config.max_tokens] for row in self.backbone.codec.encode_target(texts)]
        optimizer = torch.optim.AdamW(parameters, lr=self.config.rate, weight_decay=0.0)
        self.backbone.train()
        for _ in range(self.config.steps):
            chosen = torch.randint(len(ids), (min(self.config.batch, len(ids)),), generator=draw).tolist()
            labels = _padded([ids[number] for number in chosen]).to(self.backbone.device)
            with self.stack.mixing(Mixture.same({NAME: 1.0}, len(labels))):
                loss = self._loss(labels, token) / int((labels != IGNORE).sum())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _loss(self, labels_BT: Tensor, token: Tensor) -> Tensor:
        """Summed cross-entropy of the texts behind [Gen]."""
        backbone = self.backbone
        start = self._start(token, len(labels_BT))
        with backbone.precision():
            if backbone.codec.kind == "encoder-decoder":
                logits = backbone.model(inputs_embeds=start, labels=labels_BT, use_cache=False).logits
                return summed_cross_entropy(logits, labels_BT)
            written = backbone.embedded(labels_BT.clamp(min=0)).to(start.dtype)
            mask = torch.cat([labels_BT.new_ones(len(labels_BT), 1), (labels_BT != IGNORE).long()], dim=1)
            inputs = torch.cat([start, written], dim=1)
            logits = backbone.model(inputs_embeds=inputs, attention_mask=mask, use_cache=False).logits
            return summed_cross_entropy(logits[:, :-1], labels_BT)

    def _start(self, token: Tensor, rows: int) -> Tensor:
        return token.to(self.backbone.dtype).expand(rows, 1, -1)

    @torch.no_grad()
    def _sampled(self, token: Tensor, count: int) -> list[str]:
        """`count` texts that are not empty, one after another by top-k sampling."""
        backbone, config, found = self.backbone.eval(), self.config, list[str]()
        for _ in range(TRIES):
            for start in range(0, count, config.batch):
                rows = min(config.batch, count - start)
                mixture = Mixture.same({NAME: 1.0}, rows)
                with self.stack.mixing(mixture), backbone.precision():
                    ids = backbone.model.generate(
                        inputs_embeds=self._start(token, rows),
                        attention_mask=torch.ones(rows, 1, dtype=torch.long, device=backbone.device),
                        max_new_tokens=config.max_tokens,
                        do_sample=True,
                        num_beams=1,
                        top_k=config.top_k,
                        repetition_penalty=config.repetition_penalty,
                        pad_token_id=backbone.codec.pad_id,
                        eos_token_id=backbone.codec.eos_id,
                    )
                found += [text for text in backbone.codec.decode(ids) if text]
            if len(found) >= count:
                return found[:count]
        raise RunError(
            f"the generator wrote {len(found)} texts that are not empty in {TRIES * count} tries, {count} are needed: "
            "raise method.writer.steps, or choose method.arm.source=real"
        )


def _init(low: Tensor, outputs: int) -> None:
    nn.init.kaiming_uniform_(low, a=math.sqrt(5))


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[IGNORE] * (width - len(row))] for row in rows])
