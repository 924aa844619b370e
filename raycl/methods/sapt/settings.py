"""SAPT's settings: its adapters', and by section its attention's, reflection's, generator's and selector's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from raycl.config import Size, Tree
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings, Rank
from raycl.methods.per_task_adapter import PromptFormSetting, StartSettings, StartThreshold
from raycl.methods.pseudo_samples.generator import GeneratorConfig
from raycl.methods.sapt.reflection import ReflectionConfig
from raycl.routing.attention import AttentionConfig, SelectorConfig

Name = Literal["none", "arm", "replay", "alignment", "shared_attention"]


@dataclass(frozen=True)
class Ablation:
    """The components that an ablation keeps (SAPT, section 6.3).

    Attributes:
        reflects: attentive reflection (ARM) adds its penalty.
        reads_samples: pseudo-samples are used, so generators are trained for them.
        replays: pseudo-samples are trained on as ordinary data.
        selects: a separate selector is trained on recorded weights and used at test.
        shares: all adapters of a text are trained and active together, by attention; else each alone.
    """

    reflects: bool = False
    reads_samples: bool = True
    replays: bool = False
    selects: bool = False
    shares: bool = True


ABLATIONS: dict[str, Ablation] = {
    "none": Ablation(reflects=True),
    "arm": Ablation(reads_samples=False),
    "replay": Ablation(replays=True),
    "alignment": Ablation(selects=True),
    "shared_attention": Ablation(selects=True, shares=False),
}
"""Name of `method.ablation` -> what is done."""


class SaptConfig(LoraSettings, StartSettings):
    """SAPT: an adapter for each task under shared attention (defaults: its appendix C, and the authors' scripts)."""

    name: Literal["sapt"] = "sapt"
    value: Literal["lora", "prompt"] = Field("lora", description="the adapter of a task: SAPT-LoRA or SAPT-Prompt")
    r: Rank = Field(8, description="the rank of the LoRA; the paper: 8 on T5's long sequences, else 4")
    r_by_task: dict[str, Size] = Field(default_factory=dict, description="task name -> r, where it differs")
    prompt_length: int = Field(10, ge=1, description="positions of a soft prompt, and of the weighted sum of all")
    prompt_length_by_task: dict[str, Size] = Field(
        default_factory=dict,
        description="task name -> prompt_length, where it differs; in the weighted sum shorter ones are zero in front",
    )
    prompt_form: PromptFormSetting = "plain"
    start_threshold: StartThreshold = 0.95
    train_nearest: bool = Field(
        False,
        description="keep the adapter of the known task whose texts are most similar, by start_threshold, in training "
        "beside the new one, each by its weight in the attention, so that a later task changes it too. The paper "
        "freezes all earlier adapters",
    )
    attention: AttentionConfig = AttentionConfig()
    attention_learning_rate: float | None = Field(
        None, gt=0, description="learning rate of the projection D and U (attn_lr); null: train.learning_rate"
    )
    arm: ReflectionConfig = ReflectionConfig()
    head_rule: Literal["probability", "logit"] = Field(
        "probability", description="how label heads of an encoder-only backbone are mixed"
    )
    stop_grad_old_blocks: bool = Field(
        False, description="stop gradients through earlier adapters into the layers below, as released"
    )
    ablation: Name = Field(
        "none",
        description="part that is left out (SAPT, section 6.3). arm: lambda is 0; replay: lambda is 0, and "
        "pseudo-samples are ordinary training data, with the model's own answers unless source=real; alignment: a "
        "separate selector is learned from "
        "recorded weights and used at test; shared_attention: each adapter is trained alone, and a "
        "separate selector chooses one",
    )
    selector: SelectorConfig = SelectorConfig()
    generator: GeneratorConfig = GeneratorConfig()

    unused_for_single_task: ClassVar[tuple[str, ...]] = (
        "router_text",
        *StartSettings.unused_in_first_phase,
        "train_nearest",
        "attention",
        "attention_learning_rate",
        "arm",
        "ablation",
        "selector",
        "generator",
        "stop_grad_old_blocks",
    )
    """A single adapter gets weight 1, and there is nothing to reflect on."""

    unused_in_first_phase: ClassVar[tuple[str, ...]] = (*StartSettings.unused_in_first_phase, "train_nearest")

    takes: ClassVar[tuple[str, ...]] = BY_LINEAR

    by_task: ClassVar[tuple[str, ...]] = ("r_by_task", "prompt_length_by_task")

    label_head: ClassVar[tuple[str, ...]] = ("head_rule",)
    needs_texts: ClassVar[bool] = True  # evaluation reports attention by task
    publishes_samples: ClassVar[bool] = True  # later runs reflect on them
    chooses_task: ClassVar[bool] = True

    @model_validator(mode="after")
    def _samples_have_what_is_read(self) -> Self:
        if self.router_text == "input" and ABLATIONS[self.ablation].replays:
            raise ValueError(
                "ablation=replay trains on pseudo-samples, which are kept as whole prompts, and router_text=input "
                "routes texts without their prompts: expected router_text=prompt, or another ablation"
            )
        return self

    @model_validator(mode="after")
    def _nearest_can_be_trained(self) -> Self:
        others = {
            "value=prompt": self.value == "prompt",
            "start_from=nearest": self.start_from == "nearest",
            "r_by_task": bool(self.r_by_task),
            "ablation=shared_attention": not ABLATIONS[self.ablation].shares,
        }
        if self.train_nearest and any(others.values()):
            name = next(name for name, is_set in others.items() if is_set)
            raise ValueError(
                f"train_nearest trains two LoRAs of one size under the attention, which {name} excludes: expected one "
                "of them"
            )
        return self

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rate of the projection; keys and layer norm learn at the main one, as released (`trans_input` there)."""
        rate = self.attention_learning_rate
        return {} if rate is None else dict.fromkeys(("attention.down", "attention.up"), rate)

    @property
    def generates_samples(self) -> bool:
        return self.arm.source == "generated"

    @property
    def sample_generator(self) -> GeneratorConfig:
        return self.generator

    @property
    def keeps_data(self) -> bool:
        return ABLATIONS[self.ablation].reads_samples

    def prompt_positions(self, tasks: int) -> int:
        return max(self.prompt_length, *self.prompt_length_by_task.values(), 0) if self.value == "prompt" else 0

    @property
    def sample_share(self) -> tuple[str, float] | None:
        """The share of pseudo-samples, where something reads them."""
        return ("arm.fraction", self.arm.fraction) if self.keeps_data else None

    def cache_key(self, index: int, tasks: Sequence[str], learns_texts: bool = False) -> Tree:
        """Return the settings that matter; in the first task there is nothing to reflect on."""
        settings = super().cache_key(index, tasks, learns_texts)
        if index == 0:
            kept = ("source", "fraction", "max_samples", "files", "abar_split")
            settings["arm"] = {name: settings["arm"][name] for name in kept}
        return settings

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield settings of the other kind of adapter, of a component that is left out, or of another source."""
        for name, reason in super().unused_settings():
            if name != "start_threshold" or not self.train_nearest:
                yield name, reason
        prompt = ("prompt_length", "prompt_length_by_task", "prompt_form")
        others = (*LoraSettings.model_fields, "r_by_task") if self.value == "prompt" else prompt
        yield from ((name, f"value={self.value}") for name in others)
        if self.value == "prompt" or not ABLATIONS[self.ablation].shares:
            alone = "value=prompt" if self.value == "prompt" else f"ablation={self.ablation}"
            yield "stop_grad_old_blocks", alone  # nothing is trained below prompts, or no earlier adapter is active
        reflection = ("weight", "batch", "every", "skip_steps", "kl_reduction", "kl_scale_with_accum")
        if not ABLATIONS[self.ablation].reflects:
            yield from ((f"arm.{name}", f"ablation={self.ablation}") for name in reflection)
        elif self.arm.weight == 0:
            yield from ((f"arm.{name}", "arm.weight=0") for name in reflection[1:])
        if not ABLATIONS[self.ablation].selects:
            yield "selector", f"ablation={self.ablation}"
        reads = ABLATIONS[self.ablation].reads_samples
        if self.arm.source != "generated" or not reads:
            yield "generator", f"ablation={self.ablation}" if not reads else f"arm.source={self.arm.source}"
        if self.arm.source != "file":
            yield "arm.files", f"arm.source={self.arm.source}"

    def unused_with(self, has_label_head: bool, reason: str) -> Iterator[tuple[str, str]]:
        """Yield the pruning threshold where label heads' scores are added, since all are evaluated then."""
        yield from super().unused_with(has_label_head, reason)
        if has_label_head and self.head_rule == "logit":
            yield "attention.pruning_threshold", f"method.head_rule=logit and {reason}"
