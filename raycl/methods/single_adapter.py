"""Methods with one adapter that all tasks train in turn: a LoRA, bottleneck adapters or a soft prompt.

The adapter is active for every text with weight 1, the backbone is frozen, and the label head of encoder-only backbones
is trained with it. Where tasks begin and end need not be known, and no task id is needed at test.
"""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field

from raycl.adapters import AdapterStack
from raycl.adapters.soft_prompts import ADDED_UP, MixedPrompts, UseOf, formed
from raycl.backbone import Backbone
from raycl.backbone.base import seed_all
from raycl.backbone.roles import linear_names
from raycl.methods.base import Learned, Method, MethodConfig, phase_labels, under
from raycl.methods.context import TaskContext
from raycl.methods.lora_settings import BY_LINEAR, LoraSettings, TargetModules, kaiming
from raycl.methods.trained_adapters import is_trainable
from raycl.types import Batch, Mixture, Phase


class SingleAdapter(Method):
    """The frozen backbone with one adapter that every task overwrites.

    Subclasses attach the stack and begin its training in their constructor.

    Class attributes:
        adapter: name of the one adapter.
    """

    adapter: ClassVar[str]
    stack: AdapterStack

    def begin_task(self, phase: Phase, context: TaskContext) -> None:
        """Adapter and label head are trained, the backbone is frozen."""
        self.backbone.learn_labels(phase_labels(phase))
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(is_trainable(name, parameter))

    def route(self, batch: Batch) -> Mixture:
        return Mixture.same({self.adapter: 1.0}, len(batch))

    def end_task(self, context: TaskContext) -> Learned:
        """Return the adapter with the label head."""
        tensors, head = context.parameters, self.backbone.head
        state = self.stack.trainable_states(tensors)[self.adapter]
        if isinstance(self.backbone.prefix, MixedPrompts):
            state = replace(state, prompt=formed(under("prefix.", tensors))[0].clone())
        if head is not None and head.labels:
            labels = tuple(head.labels)
            state = replace(state, labels=labels, head_weight=tensors["head.weight"], head_bias=tensors["head.bias"])
        return Learned({self.adapter: state})


class LoraConfig(LoraSettings, MethodConfig):
    """One LoRA that is trained on all tasks in turn (SeqLoRA)."""

    name: Literal["lora"] = "lora"

    task_id_in_training: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = (
        *BY_LINEAR,
        "init_lora_weights=pissa",
        "init_lora_weights=olora",
        "use_dora",
        "modules_to_save",
    )


class Lora(SingleAdapter):
    """One LoRA trained on the tasks in turn (SeqLoRA in SAPT, "LoRA" in MIGU): the lower reference for adapters.

    Rank 8, alpha 32, query and value projections are the settings of the code of O-LoRA and MIGU, and of SAPT's on the
    long-sequence benchmark; their dropout of 0.1 (MIGU, O-LoRA) is an option here and off, so that N workers equal one.
    """

    Config: ClassVar[type[MethodConfig]] = LoraConfig
    adapter = "lora"
    compiles = True

    def __init__(self, config: LoraSettings, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack = AdapterStack(backbone.model, config.adapted(backbone.model))
        seed_all(seed, backbone.device)
        config.begin_training(self.stack, [self.adapter])


class SeqAdapterConfig(MethodConfig):
    """One set of bottleneck adapters that is trained on all tasks in turn (SeqAdapter)."""

    name: Literal["adapter"] = "adapter"
    reduction: int = Field(16, ge=1, description="the backbone's hidden width divided by that of the bottlenecks")
    target_modules: TargetModules = ("attention.out", "ffn.out")

    task_id_in_training: ClassVar[bool] = False


class SeqAdapter(SingleAdapter):
    """One set of bottleneck adapters trained on the tasks in turn (SeqAdapter; NCL-Adapter in ContinualLM).

        y = W x + B relu(A x),  A [k, D], B [O, k],  k = hidden width // reduction

    The bottlenecks of Houlsby et al. 2019 ("Parameter-Efficient Transfer Learning for NLP", section 2.1) at both places
    of a layer, after attention and after the feed-forward block, each k = D / 16 wide (`reduction_factor` in
    ContinualLM's `config.py`). B begins at zero, so that the first forward pass is the backbone's. Where this differs
    from both: the bottlenecks stand in parallel to the output projections and read what these read (He et al. 2022,
    "parallel adapter"), they have no biases, and the backbone's layer norms stay frozen (Houlsby et al. train them).
    ContinualLM has bottlenecks behind feed-forward blocks alone (utils/model.py; `target_modules=[ffn.out]`), draws B
    with a deviation of 0.02 as it draws A (networks/adapters/modeling.py), and trains the language head's dense layer,
    norm and bias too, which are frozen here.
    """

    Config = SeqAdapterConfig
    adapter = "adapter"
    compiles = True

    def __init__(self, config: SeqAdapterConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        paths = linear_names(backbone.model, config.target_modules)
        self.stack = AdapterStack(backbone.model, paths, activation="relu")
        width = max(1, int(backbone.model.config.hidden_size) // config.reduction)
        seed_all(seed, backbone.device)
        self.stack.begin_training({self.adapter: width}, 1.0, kaiming)


class SeqPromptConfig(MethodConfig):
    """One soft prompt that is trained on all tasks in turn (SeqPrompt)."""

    name: Literal["prompt"] = "prompt"
    prompt_length: int = Field(10, ge=1, description="positions of the soft prompt in front of every text")

    task_id_in_training: ClassVar[bool] = False

    def prompt_positions(self, tasks: int) -> int:
        return self.prompt_length


class SeqPrompt(SingleAdapter):
    """One soft prompt trained on the tasks in turn (SeqPrompt): the lower reference of methods with prompts.

        input [P; x],  P [length, D],  everything else frozen

    The prompt begins as the embeddings of tokens that are drawn from the vocabulary, and every task trains it on
    (Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning", section 2, for one task). Prompts
    need larger learning rates than weights: the papers use 0.3. Where published rows differ: the code of Progressive
    Prompts with `--progressive 0` draws the prompt anew for every task and selects its epoch by the mean dev score of
    all tasks (`train_one_task` of `T5_codebase/t5_continual.py`). SLM's table of T5 has a row "Prompt" that equals its
    row "Finetune" in every order (18.9, 24.9, 41.7), which makes it a doubtful target.
    """

    Config = SeqPromptConfig
    adapter = "prompt"

    def __init__(self, config: SeqPromptConfig, backbone: Backbone, seed: int) -> None:
        super().__init__(config, backbone, seed)
        self.stack = AdapterStack(backbone.model, [])
        self.stack.begin_training({self.adapter: 0}, 1.0)
        backbone.prefix = drawn_prompts(backbone, self.stack, config.prompt_length, seed)


def drawn_prompts(
    backbone: Backbone, stack: AdapterStack, length: int, seed: int, use_of: UseOf = ADDED_UP
) -> MixedPrompts:
    """Return prompts in training for a stack's adapters in training, as the embeddings of tokens that are drawn."""
    words = backbone.model.get_input_embeddings().weight.detach()
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(words), (len(stack.trainable), length), generator=draw)
    prompts = MixedPrompts(stack, int(words.shape[1]), use_of)
    prompts.begin_training(words[rows.to(words.device)].float())
    return prompts
