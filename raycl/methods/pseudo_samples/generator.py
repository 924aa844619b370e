"""A generator of pseudo-samples: a LoRA or soft prompt that learns to write a task's inputs, and is then discarded.

SAPT, section 4.3. On the frozen backbone it reads one special token, [Gen], behind the soft prompt if there is one,
and writes a text to its end token. [Gen]'s embedding is trained with it; it is a vector of the generator's own, and
no vocabulary grows. Where this is not the paper's or its authors' way (methods.md, 2.5):
- By default it writes the input alone, and the task's real template is put around it, as around real data. Theirs
  writes instruction, separator and input (appendix E.1; `writes=instruction_and_input`): texts without the separator
  are thrown away, and one of the written instructions, drawn at random, goes into the template. It can come out wrong,
  as one in SAPT's table 12 does. Their separator is a new token; here it is one that no text of the task has.
- It writes just as many texts as are kept. Theirs writes one for each training row and keeps a random 2 % of them.
- It is trained. Theirs as released trains nothing: its LoRA is frozen.
- An epoch is so many steps on rows drawn at random; the prompt starts as random words of the vocabulary, and
  Adafactor's rate is not scaled by its size (LFPT5's code, which SAPT's 300 positions and rate are from).
A generator that fails costs no training, since it runs after its task was trained. If it produces too few texts, only
those are kept. If it produces none, stored training inputs are kept instead, as with method.arm.source=real. Both cases
are logged as a warning, and the second is recorded in the run's results (`fallback_samples`) and beside the samples. If
training inputs must never be kept, check that number, or provide texts (source `file`).
Every worker trains the same one: it is small, and no part of the stream's own training; what the first one wrote
counts (`raycl.methods.pseudo_samples.samples.same_everywhere`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from raycl.adapters import AdapterStack
from raycl.backbone import Backbone, BackboneConfig, BackboneOptions, load_backbone, load_codec, load_skeleton
from raycl.backbone.base import seed_all, summed_cross_entropy
from raycl.backbone.codec import HFCodec
from raycl.backbone.positions import decoder_inputs, logits_at
from raycl.backbone.roles import linear_names
from raycl.data.loader import padded
from raycl.data.tokens import drawn_rows
from raycl.errors import ConfigError
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import InputDropout, LoraSettings, TargetModules, kaiming
from raycl.methods.pseudo_samples.samples import PseudoSamples, Volume
from raycl.types import IGNORE, Mixture, Task

log: logging.Logger = logging.getLogger("raycl")

NAME = "generator"
TRIES = 4
"""Rounds of sampling, each of as many texts as are wanted."""

OWN: dict[str, tuple[str, ...]] = {
    "lora": (*LoraSettings.model_fields, "steps", "rate"),
    "prompt": ("prompt_length", "epochs", "prompt_rate"),
}
"""Value -> settings that only it has."""


class GeneratorConfig(LoraSettings):
    """The generator's settings (rank, steps, batch, rates: SAPT, appendix C; else the authors' scripts)."""

    value: Literal["lora", "prompt"] = Field("lora", description="what is trained beside the embedding of [Gen]")
    writes: Literal["input", "instruction_and_input"] = Field(
        "input",
        description="a text of the generator. input: the input, which gets the task's own instruction; "
        "instruction_and_input: both (SAPT, appendix E.1), and one of the written instructions stands for the task's",
    )
    backbone: BackboneConfig | None = Field(
        None, description="model that generates; null: the run's own backbone, which must not be encoder-only"
    )
    lora_dropout: InputDropout = 0.1
    target_modules: TargetModules = Field(
        ("attention.query", "attention.value"),
        description="linears, if `backbone` is set or method.value=prompt; else those of the tasks' adapters",
    )
    steps: int = Field(5000, ge=1, description="value=lora: optimizer steps for each task")
    rate: float = Field(1e-3, gt=0, description="value=lora: learning rate of AdamW, constant")
    prompt_length: int = Field(300, ge=1, description="value=prompt: positions of the soft prompt")
    epochs: int = Field(80, ge=1, description="value=prompt: passes over each task's rows")
    prompt_rate: float = Field(0.5, gt=0, description="value=prompt: learning rate of Adafactor, constant, unscaled")
    batch: int = Field(16, ge=1, description="training rows per optimizer step")
    max_tokens: int = Field(512, ge=1, description="tokens of a generated input at most")
    top_k: int = Field(20, ge=1, description="each token is drawn from so many likeliest ones")
    repetition_penalty: float = Field(
        2.5, gt=0, description="logits of tokens that were generated before are divided by this"
    )

    @model_validator(mode="after")
    def _settings_fit(self) -> GeneratorConfig:
        for value, names in OWN.items():
            defaults = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in names}
            given = [name for name, default in defaults.items() if getattr(self, name) != default]
            if value != self.value and given:
                raise ValueError(
                    f"method.generator.{given[0]} is of method.generator.value={value}, and value is {self.value}, "
                    f"which has {', '.join(OWN[self.value])}: leave it out, or choose value={value}"
                )
        return self

    @property
    def positions(self) -> int:
        """The positions that are read before a text is written: the prompt, if there is one, and [Gen]."""
        return 1 + (self.prompt_length if self.value == "prompt" else 0)

    def steps_for(self, rows: int) -> int:
        """Return optimizer steps for a task of so many rows."""
        return self.steps if self.value == "lora" else self.epochs * -(-rows // self.batch)


def check_generator(config: GeneratorConfig, backbone: Backbone, setting: str) -> None:
    """Check that a backbone can generate.

    Args:
        backbone: the run's own, with or without weights. setting: dotted name of the source.

    Raises:
        ConfigError: none can, or texts do not fit. BackboneError: the named backbone cannot be loaded.
    """
    if config.backbone is None:
        if backbone.capabilities.answers == "label":
            raise ConfigError(
                f"{setting}=generated needs a backbone that generates texts, and this one is encoder-only: name a "
                f"small one in method.generator.backbone.name, or choose {setting}=real"
            )
        _check_positions(config, backbone)
        return
    codec = load_codec(config.backbone, 1, 1)
    if codec.capabilities.answers == "label":
        raise ConfigError(
            f"method.generator.backbone.name '{config.backbone.name}' is encoder-only and cannot generate texts: "
            "expected an encoder-decoder or decoder-only backbone"
        )
    _check_positions(config, load_skeleton(config.backbone, codec))


def _check_positions(config: GeneratorConfig, backbone: Backbone) -> None:
    """Decoders read and write in the same positions, encoder-decoders apart; relative ones have no limit."""
    limit = backbone.max_positions
    read, written = config.positions, config.max_tokens
    wanted = max(read, written) if backbone.capabilities.separate_encoder else read + written
    if limit is not None and wanted > limit:
        prompt = "method.generator.prompt_length, " if config.value == "prompt" else ""
        raise ConfigError(
            f"the generator reads {read} positions and writes up to method.generator.max_tokens={written}, which is "
            f"more than the {limit} positions of its backbone: lower {prompt}method.generator.max_tokens"
        )


class Generator:
    """Generates inputs like those of a phase; the backbone is unchanged afterwards."""

    def __init__(self, config: GeneratorConfig, backbone: Backbone, stack: AdapterStack | None, seed: int) -> None:
        """Use the run's backbone between two phases, or load the named one.

        Args:
            stack: over `backbone`, perhaps with adapters in training, which stay as they are; over no linear at all,
                it is not used.
        """
        self.config = config
        self.seed = seed
        self.backbone, own = backbone, stack if stack is not None and stack.layers else None
        if config.backbone is not None:
            codec = load_codec(config.backbone, 1, 1)
            options, own = BackboneOptions(trains=True), None
            self.backbone = load_backbone(config.backbone, codec, backbone.device, seed, options)
        self._run_stack, self.stack = own, own
        model = self.backbone.model
        if config.value == "prompt":
            self.stack = None
        elif own is None:
            self.stack = AdapterStack(model, linear_names(model, config.target_modules))

    def write(self, context: TaskContext, volume: Volume) -> PseudoSamples:
        """Write as many inputs of each task of the phase as `volume` says, with its template.

        Fewer where the generator fails, stored ones where it writes none at all; both are logged.
        """
        prompts: list[list[int]] = []
        stored = 0
        try:
            for number, table in enumerate(context.tables("train")):
                task, count, seed = table.task, volume.of(len(table)), self.seed + number
                own = context.instruction(task) if self.config.writes == "instruction_and_input" else ""
                texts = Texts.of(self.backbone.codec, table.texts(range(len(table))), own, self.config.max_tokens)
                written = self._samples_like(texts, count, seed)
                self._warn_missing(task.name, len(written), count)
                if written:
                    instruction = _instruction(context, task, [first for first, _ in written], seed)
                    prompts += context.routed_samples(task, [text for _, text in written], instruction)
                else:
                    rows = drawn_rows(table, count, torch.Generator().manual_seed(seed))
                    prompts += context.router_texts.ids(table, rows)
                    stored += count
        finally:
            if self.stack is not None and self._run_stack is None:
                self.stack.detach()
        return PseudoSamples(prompts, [], [], stored)

    def _warn_missing(self, task: str, written: int, count: int) -> None:
        if written == count:
            return
        kept = "only these are kept" if written else "stored training inputs stand for the task instead"
        length, rate = OWN[self.config.value][-2:]
        log.warning(
            f"    the generator of task '{task}' wrote {written} of {count} texts in {TRIES * count} tries: {kept}; a "
            f"new run may train it longer (method.generator.{length}) or more gently (method.generator.{rate})"
        )

    def _samples_like(self, texts: Texts, count: int, seed: int) -> list[tuple[str, str]]:
        """Return `count` pairs of instruction ("" for none) and input like these, or fewer; none where it diverged."""
        backbone, was_training = self.backbone, self.backbone.training
        unfrozen = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        seed_all(seed, backbone.device)
        for parameter in unfrozen:
            parameter.requires_grad_(False)
        try:
            with nullcontext() if self.stack is None else self.stack.training_aside():
                start_PD = self._start()
                parameters = [start_PD, *self._trainable()]
                self._train(texts.ids, start_PD, parameters, seed)
                is_sound = all(bool(parameter.isfinite().all()) for parameter in parameters)
                return self._sample(start_PD, count, texts) if is_sound else []
        finally:
            for parameter in unfrozen:
                parameter.requires_grad_(True)
            backbone.train(was_training)

    def _start(self) -> nn.Parameter:
        """Return `[P, D]`: the prompt, initialized with random words, and [Gen], with the mean of all."""
        words = self.backbone.model.get_input_embeddings().weight.detach()
        chosen = torch.randint(len(words), (self.config.positions - 1,)).to(words.device)
        return nn.Parameter(torch.cat([words[chosen].float(), words.float().mean(0, keepdim=True)]))

    def _trainable(self) -> list[nn.Parameter]:
        """Return the LoRA in training; nothing with a prompt."""
        if self.stack is None:
            return []
        config = self.config
        self.stack.begin_training({NAME: config.r}, config.scaling, kaiming, config.lora_dropout)
        own = [p for layer in self.stack.layers.values() for p in (layer.lora_A, layer.lora_B) if p is not None]
        for parameter in own:
            parameter.data = parameter.data.float()
        return own

    def _activated(self, rows: int) -> AbstractContextManager[None]:
        """Activate the generator's LoRA alone; with a prompt, the bare backbone."""
        return nullcontext() if self.stack is None else self.stack.activate(Mixture.same({NAME: 1.0}, rows))

    def _optimizer(self, parameters: list[nn.Parameter]) -> Any:
        if self.config.value == "lora":
            return torch.optim.AdamW(parameters, lr=self.config.rate, weight_decay=0.0)
        from transformers.optimization import Adafactor  # brings peft: a third of a driver's start, which makes none

        return Adafactor(parameters, lr=self.config.prompt_rate, scale_parameter=False, relative_step=False)

    def _train(self, ids: list[list[int]], start_PD: Tensor, parameters: list[nn.Parameter], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        optimizer = self._optimizer(parameters)
        self.backbone.train()
        for _ in range(self.config.steps_for(len(ids))):
            chosen = torch.randint(len(ids), (min(self.config.batch, len(ids)),), generator=draw).tolist()
            labels = padded([ids[number] for number in chosen], IGNORE).to(self.backbone.device)
            with self._activated(len(labels)):
                loss = self._loss(labels, start_PD) / int((labels != IGNORE).sum())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _loss(self, labels_BT: Tensor, start_PD: Tensor) -> Tensor:
        """Return the summed cross-entropy of the texts behind [Gen]."""
        backbone, rows = self.backbone, len(labels_BT)
        start = self._read(start_PD, rows)
        with backbone.precision():
            if backbone.capabilities.separate_encoder:
                read: dict[str, Any] = {"inputs_embeds": start}
                if self.stack is None:  # all rows read the same, and nothing is dropped out of it: encoded once
                    encoded = backbone.model.get_encoder()(inputs_embeds=start[:1]).last_hidden_state
                    read = {"encoder_outputs": (encoded.expand(rows, -1, -1),)}
                read |= decoder_inputs(backbone.model, labels_BT)
                chosen = labels_BT != IGNORE
            else:
                written = backbone.embedded(labels_BT.clamp(min=0)).to(start.dtype)
                mask = torch.cat([labels_BT.new_ones(start.shape[:2]), (labels_BT != IGNORE).long()], dim=1)
                read = {"inputs_embeds": torch.cat([start, written], dim=1), "attention_mask": mask}
                chosen = nn.functional.pad(labels_BT != IGNORE, (len(start_PD) - 1, 1))
            logits_MV = logits_at(backbone.model, chosen, {**read, "use_cache": False})
        return summed_cross_entropy(logits_MV, labels_BT[labels_BT != IGNORE])

    def _read(self, start_PD: Tensor, rows: int) -> Tensor:
        return start_PD.to(self.backbone.dtype).expand(rows, -1, -1)

    @torch.no_grad()
    def _sample(self, start_PD: Tensor, count: int, texts: Texts) -> list[tuple[str, str]]:
        """Return `count` texts that are not empty, by top-k sampling; fewer if `TRIES` rounds give fewer."""
        backbone, config, samples = self.backbone.eval(), self.config, list[tuple[str, str]]()
        for _ in range(TRIES):
            for start in range(0, count, config.batch):
                rows = min(config.batch, count - start)
                with self._activated(rows), backbone.precision():
                    ids = backbone.model.generate(
                        inputs_embeds=self._read(start_PD, rows),
                        attention_mask=torch.ones(rows, len(start_PD), dtype=torch.long, device=backbone.device),
                        max_new_tokens=config.max_tokens,
                        do_sample=True,
                        num_beams=1,
                        top_k=config.top_k,
                        repetition_penalty=config.repetition_penalty,
                        pad_token_id=backbone.codec.pad_id,
                        eos_token_id=backbone.codec.eos_id,
                        remove_invalid_values=True,
                    )
                samples += texts.parted(ids)
            if len(samples) >= count:
                break
        return samples[:count]


@dataclass(frozen=True)
class Texts:
    """Texts that a generator learns to write.

    Attributes:
        ids: ids of each text, ending in the end-of-sequence id.
        separator: id between instruction and input, which no text has; None: the input stands alone.
    """

    codec: HFCodec
    ids: list[list[int]]
    separator: int | None = None

    @staticmethod
    def of(codec: HFCodec, inputs: Sequence[str], instruction: str, limit: int) -> Texts:
        """Return the texts of a task's inputs, each behind its instruction, if any, cut to `limit` tokens."""
        ids = codec.encode_target(inputs)
        if instruction:
            front = codec.encode_target([instruction])[0][:-1]
            used = {token for row in ids for token in row} | set(front) | codec.special_ids
            free = (token for token in range(codec.vocabulary) if token not in used)  # low ids are common: soon learned
            if (separator := next(free, None)) is not None:
                return Texts(codec, [[*front, separator, *row][:limit] for row in ids], separator)
        return Texts(codec, [row[:limit] for row in ids])

    def parted(self, ids_BT: Tensor) -> list[tuple[str, str]]:
        """Return instruction and input of generated rows, without those that lack one of them."""
        if self.separator is None:
            return [("", text) for text in self.codec.decode(ids_BT) if text]
        pairs = []
        for row in ids_BT.tolist():
            if self.separator in row:
                separator_index = row.index(self.separator)
                parts = [
                    self.codec.decode(torch.tensor([part]))[0]
                    for part in (row[:separator_index], row[separator_index + 1 :])
                    if part
                ]
                pairs += [(parts[0], parts[1])] if len(parts) == 2 and all(parts) else []
        return pairs


def _instruction(context: TaskContext, task: Task, written: Sequence[str], seed: int) -> str | None:
    """Return a written instruction, drawn from those that leave room for a text; None: the task's own."""
    order = torch.randperm(len(written), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = (written[number] for number in order if written[number])
    return next((instruction for instruction in drawn if context.takes_instruction(task, instruction)), None)
