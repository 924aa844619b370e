"""MoRAM: a LoRA for each task, whose rows are keys and values of one growing memory, of which each token uses a few.

    z = A x,  s = z / |z|,  w = softmax over the top_k largest s of s / temperature,  y = W x + B (scale * w * z)

A and B hold the rows of all tasks so far, of which the newest task's are trained; no router and no task id chooses
among them, a token's own s does, in every linear. Outside of training, rows with s below `threshold` add nothing (Lu et
al. 2026, "Little by Little: Continual Learning via Incremental Mixture of Rank-1 Associative Memory Experts", ICML
2026, arXiv:2506.21035; code: TRACE/utils/my_peft/tuners/moram.py of Artificer-AI-Lab/MoRAM at aaa51d8, whose
outputs and gradients this gives). Rank 8, `top_k` 8, a temperature of 0.03 and a threshold of 0.2 are those of its
TRACE/runner_moram.sh, with alpha 16, a rate of 5e-4, a dropout of 0.1 and all four projections of attention; on images
the temperature is 0.01 and the rank 16. The method was compared with this code, not with the paper's text.

Deviations: the code multiplies the rows in training by alpha / r, but not those of tasks that have ended, so that what
a task has learned shrinks to half of it at its end; here the scale stays. At test the code's memory also holds keys
that it has drawn for the next task, with values of zero, which take a share of w; here there are none. Scores are
computed in float32. Alpha is 32, as for this project's other LoRAs. Dropout is an option and off, and drops inputs of
the new rows alone. The label head of encoder-only backbones, of which the paper has none, is a sum of increments as in
`inclora`.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from raycl.adapters.formula import SelfActivation
from raycl.methods.base import MethodConfig
from raycl.methods.lora.inclora import IncLora, IncLoraSettings
from raycl.methods.per_task_adapter import AdapterForm


class MoramConfig(IncLoraSettings):
    """MoRAM: LoRAs as one memory, whose keys choose themselves."""

    name: Literal["moram"] = "moram"
    top_k: int = Field(8, ge=2, description="rows of all adapters together that a token uses at most in a linear")
    temperature: float = Field(
        0.03, gt=0, description="divides the scores of rows before their softmax; small values choose fewer"
    )
    threshold: float = Field(
        0.2, ge=0, le=1, description="score below which a row adds nothing outside of training; 0: rows always add"
    )

    takes: ClassVar[tuple[str, ...]] = ("use_rslora", "init_lora_weights=gaussian")
    """Rows of all linears compete alike, so linears have one rank."""


class Moram(IncLora):
    """A growing memory of rank-1 adapters, of which only the newest are trained."""

    Config: ClassVar[type[MethodConfig]] = MoramConfig

    def _adapter_form(self, config: Any) -> AdapterForm:
        memory = SelfActivation(config.top_k, config.temperature, config.threshold)
        return AdapterForm(config.target_modules, config.scaling, "logit", str(memory))
