"""The roles of a model's linear layers, so that `attention.query` means the same everywhere."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from torch import nn

from raycl.errors import BackboneError

_ATTENTION = r"(attentions?(\.\d+)?|Attention|attn)(\.(self|attention|attn|longformer_self_attn|\w*self_attention))?"
_FFN = r"(mlp|mlps\.\d+|mlp_block|ffn|feed_forward|experts\.\d+|shared_experts?)"
_PROJECTION = r"(_proj|_lin|_[ab]_proj|_global)?(\.linear)?"

ROLES: dict[str, tuple[str, ...]] = {
    "attention.query": (rf"{_ATTENTION}\.(q|query|Wq|project_q){_PROJECTION}",),
    "attention.key": (rf"{_ATTENTION}\.(k|key|Wk|project_k){_PROJECTION}",),
    "attention.value": (rf"{_ATTENTION}\.(v|value|Wv|project_v){_PROJECTION}",),
    "attention.qkv": (
        r"attn\.(c_attn|qkv_proj|Wqkv)",
        rf"{_ATTENTION}\.(query_key_value|in_proj)",
        rf"{_ATTENTION}\.kv(_proj|_a_proj_with_mqa|_b_proj)",
    ),
    "attention.out": (
        rf"{_ATTENTION}\.(output\.)?dense",
        rf"{_ATTENTION}\.(o|out|output|Wo|attention_out|c_proj|o_[ab]_proj){_PROJECTION}",
    ),
    "ffn.in": (
        r"intermediate\.dense",
        r"DenseReluDense\.wi\w*",
        rf"{_FFN}\.(gate|up|gate_up)_proj",
        r"mlp\.(c_fc|dense_h_to_4h|fc1|Wi)",
        r"(?<!mlp\.)fc1",
        rf"{_FFN}\.(w1|w3|intermediate|w_in\.w_\d|0)",
        r"(ffn|ffns\.\d+)\.lin1",
        r"(ff\.layer_1|\.ffn)",
    ),
    "ffn.out": (
        r"(?<!attention\.)output\.dense",
        r"DenseReluDense\.wo",
        rf"{_FFN}\.down_proj",
        r"mlp\.(c_proj|dense_4h_to_h|fc2|Wo)",
        r"(?<!mlp\.)fc2",
        rf"{_FFN}\.(w2|output|w_out|2)",
        r"(ffn|ffns\.\d+)\.lin2",
        r"(ff\.layer_2|\.ffn_output)",
    ),
}
"""Role -> ends of module paths (BERT, RoBERTa, DistilBERT, DeBERTa, MPNet, T5, BART, LLaMA, GPT-2, NeoX, Phi and
similar models). The first linears of a feed-forward block, which widen, are `ffn.in`; where it is gated there are two.
`attention.qkv`: linears of two or more of queries, keys and values, and both steps of a low-rank one (DeepSeek)."""

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": tuple(end for role, ends in ROLES.items() if role.startswith("attention.") for end in ends),
    "ffn": (
        *(end for role, ends in ROLES.items() if role.startswith("ffn.") for end in ends),
        r"DenseReluDense\.\w+",
        r"mlp\.\w+",
        r"fc\d",
    ),
}
"""All roles of one kind; `ffn` has linears of feed-forward blocks under other names too."""

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear but the head."""

POOLER = re.compile(r"(^|\.)pooler(\.|$)")
"""Linears of a pooler, which belongs to the head of the checkpoint; raycl pools hidden states by itself."""


def without_role(model: nn.Module) -> list[str]:
    """Return the linears in a model's layers that no role covers, `*` for each number: those under other names, and
    those that are slices of one tensor (experts), which no role covers."""
    head = _output_embeddings(model)
    ends = [re.compile(f"{end}$") for group in GROUPS.values() for end in group]
    paths: set[str] = set()
    for path, module in model.named_modules():
        if is_linear(module) and module is not head and not any(end.search(path) for end in ends):
            paths.add(path)
        elif not hasattr(module, "kernel_size"):
            parameters = module.named_parameters(path, recurse=False)
            paths |= {name for name, parameter in parameters if parameter.dim() == 3 and min(parameter.shape) > 1}
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in paths if re.search(r"\.\d+\.", name)})


def _output_embeddings(model: nn.Module) -> Any:
    return getattr(model, "get_output_embeddings", lambda: None)()


def linear_names(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the paths of the linear layers that `targets` select.

    Args:
        targets: `all-linear` (all but the head), roles (`attention.query`, `ffn.in`, ...), all roles of a kind
            (`attention`, `ffn`), or regular expressions for the end of a path (`layer\\.0\\..*query`).

    Raises:
        BackboneError: a target matches nothing; the message lists the linears there are.
    """
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    chosen = matching(list(linears), [target for target in targets if target != ALL_LINEAR])
    if ALL_LINEAR not in targets:
        return chosen
    head = _output_embeddings(model)
    return [name for name, module in linears.items() if name in chosen or not (module is head or POOLER.search(name))]


def matching(linears: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return those of the paths `linears` that `targets` select, in their order; see `linear_names`.

    Raises:
        BackboneError: a target matches nothing.
    """
    chosen: set[str] = set()
    for target in targets:
        patterns = GROUPS.get(target) or ROLES.get(target) or (rf"(^|\.)(?:{target})",)
        matched = {name for name in linears if _ends_in(name, patterns)}
        if not matched:
            kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in linears})
            roles = ", ".join((*ROLES, *GROUPS))
            raise BackboneError(
                f"target '{target}' matches no linear layer: expected a role ({roles}) or the end of one of "
                f"{', '.join(kinds)}"
            )
        chosen |= matched
    return [name for name in linears if name in chosen]


def query_of(model: nn.Module, path: str) -> str:
    """Return the path of the query projection that belongs to an attention's output projection at `path`.

    Raises:
        BackboneError: `path` is no output projection, or queries have no linear of their own with as many outputs.
    """
    shapes = linear_shapes(model)
    queries = [name for name in shapes if _ends_in(name, ROLES["attention.query"])]
    nearest = max(queries, key=lambda name: len(shared_parts(name, path)), default="")
    within = ".".join(shared_parts(nearest, path))
    if not _ends_in(path, ROLES["attention.out"]) or not re.search(r"(attention|attn)$", within, re.IGNORECASE):
        raise BackboneError(
            f"'{path}' is not the output projection of an attention layer with a query projection of its own: a prefix "
            "needs both (target attention.out, and no backbone that projects queries, keys and values in one)"
        )
    if shapes[nearest][1] != shapes[path][0]:
        raise BackboneError(
            f"'{nearest}' has {shapes[nearest][1]} outputs and '{path}' {shapes[path][0]} inputs: a prefix needs as "
            "many of both"
        )
    return nearest


def _ends_in(path: str, patterns: Sequence[str]) -> bool:
    return any(re.search(f"{pattern}$", path) for pattern in patterns)


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the path of every linear layer -> inputs and outputs."""
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif is_linear(module):
            inputs, outputs = module.weight.shape
            shapes[name] = (int(inputs), int(outputs))
    return shapes


def shared_parts(path: str, other: str) -> list[str]:
    """Return the leading parts that two paths share."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return [part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def last_feed_forward(model: nn.Module) -> nn.Module | None:
    """Return the feed-forward block of a decoder's last layer, where it is a module of its own (in OPT it is none)."""
    blocks = [module for path, module in model.named_modules() if path.endswith(".mlp")]
    return blocks[-1] if blocks else None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is one of the two kinds of linear: torch's, or Hugging Face's `Conv1D`."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
