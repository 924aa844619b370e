"""An adapter under PEFT's names on disk, both ways, for `peft.PeftModel.from_pretrained` and LoRA servers.

PEFT only warns about keys it does not know; here they are errors.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from torch import Tensor

from raycl.adapters.experts import NAMES, PATH, FusedParameter, ends_in, parameter_of
from raycl.adapters.state import check_increment
from raycl.errors import AdapterError
from raycl.types import COPY, MAGNITUDE, AdapterState

PREFIX = "base_model.model."
KEY = re.compile(rf"{re.escape(PREFIX)}(?P<path>.+)\.(lora_(?P<side>[AB])(\.default)?\.weight|lora_magnitude_vector)")
WRAPPED = ".base_layer"
"""PEFT's name of a module with fused parameters inside the wrapper of a further one."""
COPY_KEY = re.compile(rf"{re.escape(PREFIX)}(?P<path>.+)\.weight")
STARTS = ("gaussian", "orthogonal", True, False, None)
"""Values of `init_lora_weights` under which the adapter is an update of the plain backbone; others change its weights,
unless PEFT converted the adapter, which it then writes as one of these."""
READ = {
    "peft_type",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "modules_to_save",
    "use_dora",
    "target_parameters",
}
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
}
"""Settings of `adapter_config.json` that change nothing about what saved tensors add to a linear. All settings outside
these two sets are refused where they are set, also those that later versions of PEFT add."""
LITERAL = re.compile(r"\^?[\w.-]+")
"""Patterns of linears that contain no operators: a path or its end; with `^`, a complete path."""


class _LoraSettings(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    lora_alpha: FiniteFloat | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = Field(None, max_length=100_000)
    use_rslora: bool | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None

    def scale(self, path: str, rank: int) -> float:
        """Return `alpha / r`, or `alpha / sqrt(r)` with rank-stabilised LoRA, with this linear's own alpha if it has
        one.

        The first pattern that matches counts, as in PEFT.
        """
        alphas = (value for key, value in (self.alpha_pattern or {}).items() if _matches(path, key))
        alpha = next(alphas, rank if self.lora_alpha is None else self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _matches(path: str, key: str) -> bool:
    return path == key[1:] if key.startswith("^") else ends_in(path, key)


def to_peft(
    state: AdapterState, base: str, task_type: str, revision: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors by PEFT's names and the content of `adapter_config.json`.

    Ranks and scales of single linears are in `rank_pattern` and `alpha_pattern`, however they were configured.

    Args:
        base: hub id or folder of the backbone, which `AutoPeftModel...` loads. revision: commit of the hub id.
        task_type: PEFT's task type, which selects the class that loads it.

    Raises:
        AdapterError: it has no LoRA, a soft prompt, or a non-linearity.
    """
    if not state.linears or state.prompt is not None:
        raise AdapterError("a soft prompt has no LoRA to export: PEFT's LoRA folder holds updates of linears only")
    check_increment("the adapter", state)
    tensors = {}
    fused = _fused(state)
    linears = {path: pair for path, pair in state.linears.items() if not PATH.fullmatch(path)}
    for path, (a, b) in (linears | _nested(fused)).items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = b.contiguous()
    tensors |= {f"{PREFIX}{path}{MAGNITUDE}": norms.contiguous() for path, norms in state.magnitudes.items()}
    tensors |= {f"{PREFIX}{path}.weight": weight.contiguous() for path, weight in state.copies.items()}
    ranks = {parameter_of(path): int(a.shape[0]) for path, (a, _) in state.linears.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    odd = {path: other for path, other in ranks.items() if other != rank}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": state.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": list(linears),
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": base,
        "revision": revision,
        "task_type": task_type,
    }
    if fused:
        config["target_parameters"] = list(fused)
    if state.magnitudes:
        config["use_dora"] = True
    if state.copies:
        config["modules_to_save"] = list(state.copies)
    if odd:
        config["rank_pattern"] = odd
        config["alpha_pattern"] = {path: state.scale * other for path, other in odd.items()}
    return tensors, config


def _fused(state: AdapterState) -> dict[str, tuple[Tensor, Tensor]]:
    """Return path of a fused parameter -> A and B of all its experts, as PEFT puts them together.

    Raises:
        AdapterError: an expert is left out, or experts differ in their ranks.
    """
    experts: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for path, pair in state.linears.items():
        if match := PATH.fullmatch(path):
            experts.setdefault(match["parameter"], {})[int(match["number"])] = pair
    fused = {}
    for parameter, pairs in experts.items():
        if set(pairs) != set(range(len(pairs))) or len({len(a) for a, _ in pairs.values()}) > 1:
            raise AdapterError(
                f"the adapter adapts {len(pairs)} experts of '{parameter}': expected all, with one rank, as PEFT "
                "stores them in one tensor"
            )
        ordered = [pairs[number] for number in range(len(pairs))]
        b_OrE = torch.stack([b for _, b in ordered], dim=-1)
        fused[parameter] = torch.cat([a for a, _ in ordered]), b_OrE.flatten(1)
    return fused


def _nested(fused: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the same under PEFT's paths: the parameters of one module are wrapped one after another."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for parameter, pair in fused.items():
        module, _, name = parameter.rpartition(".")
        outer = [other for other in NAMES[NAMES.index(name) + 1 :] if f"{module}.{other}" in fused]
        pairs[module + WRAPPED * len(outer)] = pair
    return pairs


def _targeted(path: str, settings: _LoraSettings, experts: Collection[FusedParameter]) -> FusedParameter | None:
    """Return the fused parameter to which the tensors at a path belong; None: they are a linear's."""
    module = path.replace(WRAPPED, "")
    of_module = [fused for fused in experts if fused.module in (module, module.partition(".")[2])]
    chosen = [
        fused for fused in of_module if any(ends_in(fused.path, name) for name in settings.target_parameters or ())
    ]
    depth = path.count(WRAPPED)
    return chosen[-1 - depth] if depth < len(chosen) else None


def _split(fused: FusedParameter, a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return path of an expert's linear -> its A and B.

    Raises:
        AdapterError: the ranks are not those of so many experts.
    """
    if len(a) % fused.experts or len(a) != b.shape[1]:
        raise AdapterError(
            f"'{fused.path}' has lora_A {list(a.shape)} and lora_B {list(b.shape)}: expected a multiple of "
            f"{fused.experts} experts in both"
        )
    b_OrE = b.reshape(len(b), -1, fused.experts)
    parts = zip(fused.linears, a.chunk(fused.experts), b_OrE.unbind(-1), strict=True)
    return {path: (low, high.contiguous()) for path, low, high in parts}


def names_in_bank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `to_peft` by the names of `AdapterState.tensors`; those of other names are left out."""
    names = {}
    for key, tensor in tensors.items():
        if match := KEY.fullmatch(key):
            names[match["path"] + (f".lora_{match['side']}" if match["side"] else MAGNITUDE)] = tensor
        elif match := COPY_KEY.fullmatch(key):
            names[match["path"] + COPY] = tensor
    return names


def from_peft(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    linears: Collection[str],
    modules: Collection[str] = (),
    experts: Collection[FusedParameter] = (),
) -> AdapterState:
    """Return an adapter that PEFT wrote.

    Args:
        linears: paths of the model's linears. A path that a task head put in front (`bert.`) is dropped.
        modules: paths of embeddings and linears, of which it may have copies.
        experts: parameters that experts share.

    PEFT executes the keys of `alpha_pattern` as regular expressions; here a key that is no name is an error, since its
    match may never end.

    Raises:
        AdapterError: neither a plain LoRA nor a DoRA, unknown or missing tensors, or a linear that the model does not
            have.
    """
    if not isinstance(config, Mapping):
        raise AdapterError(f"adapter_config.json holds a {type(config).__name__}: expected an object of settings")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is '{config.get('peft_type')}': only plain LoRA adapters can be imported")
    for key in sorted(set(config) - READ - WITHOUT_EFFECT):
        if config[key]:
            raise AdapterError(f"adapter_config.json sets {key}={config[key]!r:.80}: only plain LoRA can be imported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"adapter_config.json sets bias='{config['bias']}': only bias='none' can be imported")
    if config.get("init_lora_weights") not in STARTS:
        raise AdapterError(
            f"adapter_config.json sets init_lora_weights={config['init_lora_weights']!r:.80}, which changed the "
            "weights of the backbone: save it with PEFT's path_initial_model_for_weight_conversion, and import that"
        )
    settings = _settings(config)
    sides: dict[str, dict[str, Tensor]] = {}
    copies = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        copy = COPY_KEY.fullmatch(key) if match is None else None
        if copy and any(ends_in(copy["path"], name) for name in settings.modules_to_save or ()):
            copies[_known(copy["path"], modules)] = tensor.float()
            continue
        if match is None:
            raise AdapterError(f"tensor '{key}' is no part of a plain LoRA: expected {PREFIX}<linear>.lora_A|B.weight")
        sides.setdefault(match["path"], {})[match["side"] or MAGNITUDE] = tensor
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    magnitudes = {}
    for path, pair in sides.items():
        norms = pair.pop(MAGNITUDE, None)
        if (norms is not None) != bool(config.get("use_dora")):
            raise AdapterError(
                f"adapter_config.json has use_dora={bool(config.get('use_dora'))}, and '{path}' has "
                f"{'no ' if norms is None else ''}lora_magnitude_vector: the file is not what it was saved as"
            )
        if set(pair) != {"A", "B"}:
            raise AdapterError(f"'{path}' has lora_{next(iter(pair))} but not its counterpart: the file is incomplete")
        if any(tensor.dim() != 2 or 0 in tensor.shape for tensor in pair.values()):
            shapes = " and ".join(f"lora_{side} {list(pair[side].shape)}" for side in "AB")
            raise AdapterError(f"'{path}' has {shapes}: expected two matrices of rank 1 or more")
        if fused := _targeted(path, settings, experts):
            scale = settings.scale(fused.path, len(pair["A"]) // fused.experts)
            pairs |= _split(fused, pair["A"].float(), pair["B"].float() * scale)
            continue
        scale = settings.scale(path, len(pair["A"]))
        pairs[_known(path, linears)] = (pair["A"].float(), pair["B"].float() * scale)
        if norms is not None:
            magnitudes[_known(path, linears)] = norms.float()
    if not pairs:
        raise AdapterError("the adapter holds no tensors: expected lora_A and lora_B of at least one linear")
    return AdapterState(pairs, magnitudes=magnitudes, copies=copies)


def _known(path: str, linears: Collection[str]) -> str:
    for candidate in (path, path.partition(".")[2]):
        if candidate in linears:
            return candidate
    raise AdapterError(
        f"the backbone has no linear '{path}', and no experts that share parameters there: the adapter was made for "
        "another model, or adapts what raycl does not"
    )


def _settings(config: Mapping[str, Any]) -> _LoraSettings:
    try:
        settings = _LoraSettings.model_validate(config)
    except ValidationError as error:
        problem = error.errors()[0]
        setting = ".".join(map(str, problem["loc"]))
        raise AdapterError(f"adapter_config.json has {setting}={problem['input']!r:.80}: {problem['msg']}") from error
    for key in settings.alpha_pattern or ():
        if not LITERAL.fullmatch(key):
            raise AdapterError(
                f"adapter_config.json has the pattern {key!r:.80} in alpha_pattern: expected names of linears, such as "
                "v_proj or model.layers.0.self_attn.v_proj; write each out"
            )
    return settings
