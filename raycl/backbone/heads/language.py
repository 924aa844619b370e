"""The masked-language-modelling head of an encoder-only model, apart from the encoder that it reads.

Hugging Face keeps encoder and head in one model, and every architecture has its own head; here adapters, pooling and
label heads use the bare encoder. So the full model is loaded too, and its encoder is replaced by a module that returns
the given states. The rest is the head, whatever its parts are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutput


class LanguageHead(nn.Module):
    """Maps states to scores over the vocabulary.

    Attributes:
        architecture: class of the full model. prefix: name of the encoder in it.
        is_fresh: the checkpoint has no such head, so some of its weights are random (the output words are always those
            of the input embeddings where the architecture ties them).
    """

    def __init__(self, full_model: Any, model: Any, is_fresh: bool) -> None:
        """Take the head from `full_model`.

        Args:
            model: the encoder that it will read.
        """
        super().__init__()
        self.architecture = type(full_model).__name__
        self.prefix = str(full_model.base_model_prefix)
        self.is_fresh = is_fresh
        if getattr(full_model.config, "tie_word_embeddings", True):
            full_model.get_output_embeddings().weight = model.get_input_embeddings().weight
        setattr(full_model, self.prefix, _Given())
        self.whole = full_model

    def forward(self, states_MD: Tensor) -> Tensor:
        """Map `[M, D]` to `[M, V]`."""
        logits: Tensor = self.whole(inputs_embeds=states_MD[None]).logits
        return logits[0]

    def exported(self, name: str) -> str:
        """Return the name in the full model's checkpoint of a parameter of encoder (`model.`) or head (`language.`)."""
        if name.startswith("model."):
            return f"{self.prefix}.{name.removeprefix('model.')}"
        return name.removeprefix("language.whole.")


class _Given(nn.Module):
    """Replaces the encoder: its inputs are already the states."""

    def forward(self, *nothing: Any, inputs_embeds: Tensor, **others: Any) -> BaseModelOutput:
        """Return `[1, M, D]` unchanged."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)
