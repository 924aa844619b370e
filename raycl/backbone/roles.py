"""Which linear layers of a model play which role, so that `attention.query` means the same everywhere.

What it does not know: what will be attached to the layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from raycl.errors import BackboneError

ROLES: dict[str, str] = {
    "attention.query": r"(attention\.self\.query|attention\.q_lin|Attention\.q|attn\.q_proj|attention\.query)",
    "attention.key": r"(attention\.self\.key|attention\.k_lin|Attention\.k|attn\.k_proj|attention\.key)",
    "attention.value": r"(attention\.self\.value|attention\.v_lin|Attention\.v|attn\.v_proj|attention\.value)",
    "attention.qkv": r"(attn\.c_attn|attn\.qkv_proj|attention\.query_key_value|attn\.Wqkv|self_attention\.query_key_value)",
    "attention.out": r"(attention\.output\.dense|attention\.out_lin|Attention\.o|attn\.o_proj|attn\.out_proj|attn\.c_proj|attention\.dense|self_attention\.dense)",
    "ffn": r"(intermediate\.dense|(?<!attention\.)output\.dense|DenseReluDense\.\w+|mlp\.\w+|ffn\.lin[12]|fc[12])",
}
"""Role -> regular expression for the end of a module's path (BERT, RoBERTa, DistilBERT, T5, LLaMA, GPT-2, NeoX, Phi)."""


def linear_names(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Paths of the linear layers that `targets` select.

    Args:
        targets: roles (`attention.query`, ... `attention` for all of attention, `ffn`) or regular expressions
            for the end of a path (`layer\\.0\\..*query`).

    Raises:
        BackboneError: a target matches nothing; the message lists the linears there are.
    """
    linears = [name for name, module in model.named_modules() if _is_linear(module)]
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in linears if any(re.search(f"{pattern}$", name) for pattern in _patterns(target))}
        if not found:
            kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in linears})
            raise BackboneError(
                f"target '{target}' matches no linear layer: expected a role ({', '.join(ROLES)}) or the end of one of "
                f"{', '.join(kinds)}"
            )
        chosen |= found
    return [name for name in linears if name in chosen]


def _patterns(target: str) -> list[str]:
    if target == "attention":
        return [pattern for role, pattern in ROLES.items() if role.startswith("attention.")]
    return [ROLES.get(target, rf"(^|\.){target}")]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
