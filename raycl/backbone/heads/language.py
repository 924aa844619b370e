"""The masked-language-modelling head of an encoder-only model, apart from the encoder that it reads.

Hugging Face keeps encoder and head in one model, each architecture with a head of its own making; here adapters,
poolings and label heads live on the bare encoder. So the whole model is loaded too, and where its encoder was stands
something that hands states through: what remains is the head, whatever its parts are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutput


class LanguageHead(nn.Module):
    """States to scores over the vocabulary.

    Attributes:
        architecture: class of the whole model. prefix: name of the encoder in it.
        is_fresh: the checkpoint has no such head, so some of its weights are random (the output words are always those
            of the input embeddings where the architecture ties them).
    """

    def __init__(self, whole: Any, model: Any, is_fresh: bool) -> None:
        """Take the head from `whole`.

        Args:
            model: the encoder that it will read.
        """
        super().__init__()
        self.architecture = type(whole).__name__
        self.prefix = str(whole.base_model_prefix)
        self.is_fresh = is_fresh
        if getattr(whole.config, "tie_word_embeddings", True):
            whole.get_output_embeddings().weight = model.get_input_embeddings().weight
        setattr(whole, self.prefix, _Given())
        self.whole = whole

    def forward(self, states_MD: Tensor) -> Tensor:
        """Return `[M, D]` to `[M, V]`."""
        logits: Tensor = self.whole(inputs_embeds=states_MD[None]).logits
        return logits[0]

    def exported(self, name: str) -> str:
        """Return the name in the whole model's checkpoint of a parameter of encoder (`model.`) or head
        (`language.`)."""
        if name.startswith("model."):
            return f"{self.prefix}.{name.removeprefix('model.')}"
        return name.removeprefix("language.whole.")


class _Given(nn.Module):
    """In the encoder's place: what it is given are the states already."""

    def forward(self, *nothing: Any, inputs_embeds: Tensor, **others: Any) -> BaseModelOutput:
        """Return `[1, M, D]` as they are."""
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)
