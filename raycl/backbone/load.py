"""Loading a backbone by name: the packaged default, a hub id, or a local folder.

Every `from_pretrained` of the project is here, with the two rules that protect users: weights come from safetensors and
remote code never runs, unless the settings allow otherwise. Transformers is imported where a model is read, so that
settings are checked before it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field
from torch import nn

from raycl.backbone.base import Attention, Backbone, checkpoint_activations, seed_all
from raycl.backbone.causal import CausalBackbone
from raycl.backbone.codec import KINDS, Bos, HFCodec, Kind
from raycl.backbone.encoder import EncoderBackbone, LanguageHead
from raycl.backbone.linears import Quantization, make_consistent, prefers_onednn, quantized, warn_of_slow_bfloat16
from raycl.backbone.markup.chat_templates import template_source
from raycl.backbone.model_files import (
    CONFIG,
    ONE_AT_A_TIME,
    FetchedFiles,
    commit_of,
    folder_of,
    present_folder,
    resolve_path,
    unused_revision,
)
from raycl.backbone.model_hashes import fingerprint_of
from raycl.backbone.positions import check_limits, join_last_states
from raycl.backbone.roles import POOLER
from raycl.backbone.seq2seq import Seq2SeqBackbone
from raycl.config import Section
from raycl.errors import BackboneError, counted
from raycl.types import Capabilities

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log: logging.Logger = logging.getLogger("raycl")

FAILURES = (ArithmeticError, AttributeError, ImportError, KeyError, OSError, TypeError, ValueError)
"""What Transformers raises, among others, where a file of a model is missing, damaged or not its own."""

DROPOUT = re.compile("dropout|pdrop")
"""Matches the names under which Hugging Face configs keep dropout rates, but not those of whole layers (layerdrop)."""

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
"""The fields that are read from a model's generation_config.json."""


class BackboneConfig(Section):
    """The pretrained model and its loading."""

    name: Annotated[str, AfterValidator(resolve_path)] = Field(
        "minilm", description="'minilm' (packaged), a hub id, or the path of a local folder"
    )
    revision: str | None = Field(None, description="commit or tag of a hub id")
    kind: Literal["auto"] | Kind = Field("auto", description="kind of the model; auto: from its config")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="computing precision; auto: bfloat16 on GPUs that support it, else float32"
    )
    quantization: Quantization = Field(
        "none",
        description="how frozen weights of linears are stored. nf4: 4 bits; int8: 8 bits (extra `quantization`, "
        "bitsandbytes). dtype is what they compute in; adapters are trained in float32",
    )
    pooling: Literal["auto", "mean", "cls"] = Field("auto", description="pooling of encoder-only backbones; auto: mean")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="value of all dropout rates of the model; with 0, N workers equal one"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    attention: Literal["auto", Attention] = Field(
        "auto",
        description="implementation of attention while a run trains and evaluates; flash_attention_2 needs the package "
        "flash-attn, a GPU and bfloat16; auto: sdpa where the model has it, eager in bfloat16 on CPUs",
    )
    chat_template: Annotated[str | None, AfterValidator(template_source)] = Field(
        None, description="template for conversations: a Jinja file, or chatml; null: that of the tokenizer"
    )
    bos: Bos = Field(
        "tokenizer",
        description="begin-of-sequence token in front of the inputs of a decoder-only model. tokenizer: as its "
        "tokenizer puts it; none: left out, as SAPT's released code does for LLaMA (its prompts are tokenized without "
        "special tokens)",
    )
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model; only the command line may set it"
    )
    allow_pickle: bool = Field(
        False,
        description="accept weights that are not safetensors (pickles can run code); only the command line may set it",
    )

    def unused_settings(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that only encoder-only models' label heads read, those of decoder-only models, and of the
        hub."""
        yield from unused_revision(self.name)
        known = known_capabilities(self)
        if known is not None and known.answers == "text":
            yield "pooling", because_of_kind(self)
        if known is not None and not known.one_sequence:
            yield "bos", f"{_named_kind(self)}, and only decoder-only models read inputs without it"


def known_kind(config: BackboneConfig) -> Kind | None:
    """Return the kind of the model, if its config.json is on this machine.

    Returns:
        None if it is unknown before the hub is read or code of the model runs, or if it cannot be read at all,
        which `load_codec` reports.
    """
    if config.kind != "auto":
        return config.kind
    folder = present_folder(config.name, config.revision)
    try:
        status = (folder / CONFIG).stat() if folder is not None else None
    except OSError:
        return None
    return _kind_in(str(folder), status.st_ino, status.st_size, status.st_mtime_ns) if status else None


@lru_cache(maxsize=64)
def _kind_in(folder: str, inode: int, size: int, written: int) -> Kind | None:
    """Return the kind of the model in a folder, cached while its config.json is unchanged: every trial asks."""
    try:
        with _explained(folder):
            return _kind(_settings(folder, trusts=False))
    except BackboneError:
        return None


def known_capabilities(config: BackboneConfig) -> Capabilities | None:
    """Return the capabilities of the model; None: see `known_kind`."""
    kind = known_kind(config)
    return None if kind is None else KINDS[kind]


def because_of_kind(config: BackboneConfig) -> str:
    """Return why settings for another kind of model act on nothing, as a path from the backbone's section and a
    reason."""
    lacks = "generates no text" if known_kind(config) == "encoder" else "has no label head"
    return f"{_named_kind(config)}, which {lacks}"


def _named_kind(config: BackboneConfig) -> str:
    kind = known_kind(config)
    called = {"encoder": "an encoder-only", "decoder": "a decoder-only"}.get(str(kind), "an encoder-decoder")
    return f"kind={kind}" if config.kind != "auto" else f"name={config.name}, {called} model"


def load_codec(config: BackboneConfig, max_source_tokens: int, max_target_tokens: int) -> HFCodec:
    """Load the tokenizer alone (the driver validates data without weights); only a model can check the limits.

    Raises:
        BackboneError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    with _explained(config.name):
        where = _folder(config, weights=False)
        settings = _settings(where, config.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=config.trust_remote_code)
    kind = _kind(settings) if config.kind == "auto" else config.kind
    return HFCodec(tokenizer, kind, max_source_tokens, max_target_tokens, config.chat_template or "", config.bos)


@dataclass(frozen=True)
class BackboneOptions:
    """Options of loading a backbone.

    Attributes:
        learns_texts: texts themselves will be learned: encoder-only models come with the head that guesses hidden
            words.
        trains: there will be backward passes, for which torch's fused attention in bfloat16 on a CPU is not made: it
            takes 4 to 9 times the time of plain products, which need more memory. Inference has it (`inference`).
        on_host: the weights stay in mapped files, in the dtype of the checkpoint: an engine will move and convert them
            layer by layer.
    """

    learns_texts: bool = False
    trains: bool = False
    on_host: bool = False


FOR_INFERENCE = BackboneOptions()


def load_backbone(
    config: BackboneConfig, codec: HFCodec, device: torch.device, seed: int, use: BackboneOptions = FOR_INFERENCE
) -> Backbone:
    """Return weights on `device` in evaluation-ready state; `seed` fixes the weights of a head that the checkpoint
    lacks.

    Weights of a checkpoint of the dtype that computes are memory-mapped, as safetensors does it, and on a CPU they stay
    so: all processes of a node have the same pages, but for those that they write to. Moved to a GPU, they leave no
    copy behind.

    Raises:
        BackboneError: the model cannot be loaded, or the codec's texts do not fit it.
    """
    kind = codec.kind
    with _explained(config.name), ONE_AT_A_TIME:
        where = _folder(config)
        settings = _settings(where, config.trust_remote_code)
        set_dropout(settings, config.dropout)
        dtype = pick_dtype(config.dtype, device)
        if device.type == "cpu" and dtype == torch.bfloat16:
            warn_of_slow_bfloat16(config.name)
        avoids_fused = use.trains and device.type == "cpu" and dtype == torch.bfloat16
        if avoids_fused:
            settings._attn_implementation = "eager"
        options = {
            "config": settings,
            "dtype": "auto" if use.on_host else dtype,
            "use_safetensors": None if config.allow_pickle else True,
            "trust_remote_code": config.trust_remote_code,
            **quantized(config.quantization, dtype, device),
        }
        seed_all(seed, device)
        model, found = _loader(kind).from_pretrained(
            where, **options, output_loading_info=True, ignore_mismatched_sizes=True
        )
        _check_complete(f"backbone '{config.name}'", found)
        make_consistent(model, dtype)
        head = _language_head(model, where, options) if use.learns_texts and kind == "encoder" else None
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    backbone = _wrap(kind, model, codec, config, head)
    backbone.dtype = dtype
    if avoids_fused and getattr(model, "_supports_sdpa", False):
        backbone.inference_attention = "sdpa"
    backbone.inference_by_onednn = device.type == "cpu" and dtype == torch.float32 and prefers_onednn()
    return backbone if use.on_host else backbone.to(device)


def _check_complete(model: str, found: Mapping[str, Any]) -> None:
    """Check that a checkpoint holds all weights of the model, which otherwise would be drawn at random.

    Args:
        model: the model's name in messages. found: Transformers' account of the loading. A pooler may be missing, since
            it is not read.

    Raises:
        BackboneError: it lacks some, or has them in other shapes.
    """
    missing = sorted(key for key in found["missing_keys"] if not POOLER.search(key))
    if missing:
        others = sorted(found["unexpected_keys"])
        instead = f", and have others, such as '{others[0]}'" if others else ""
        raise BackboneError(
            f"the weights of {model} lack {counted(len(missing), 'tensor')} of the model that config.json "
            f"describes, such as '{missing[0]}'{instead}: expected a whole checkpoint, save the model again by "
            "save_pretrained"
        )
    for key, stored, wanted in sorted(found["mismatched_keys"]):
        raise BackboneError(
            f"the weights of {model} have '{key}' with the shape {list(stored)}, and config.json describes "
            f"{list(wanted)}: expected the config.json that these weights were saved with"
        )


@lru_cache(maxsize=16)
def check_weights(kind: Any, folder: str, identity: str, model: str, allow_pickle: bool) -> None:
    """Check that a folder holds all weights of a model that another library loads, once for each identity in a process.

    Args:
        kind: Transformers' class. identity: hash of the model's files, by which the check is kept. model: its name in
            messages.

    Raises:
        BackboneError: it lacks some, or has them in other shapes.
    """
    with ONE_AT_A_TIME:
        whole = {"use_safetensors": None if allow_pickle else True, "output_loading_info": True}
        _, found = kind.from_pretrained(folder, ignore_mismatched_sizes=True, **whole)
    _check_complete(model, found)


def _language_head(model: nn.Module, where: str, options: dict[str, Any]) -> LanguageHead:
    """Return the checkpoint's own, or a new one over the tied embeddings; logs which."""
    from transformers import AutoModelForMaskedLM

    full_model, loading_info = AutoModelForMaskedLM.from_pretrained(where, output_loading_info=True, **options)
    missing = [name for name in loading_info["missing_keys"] if not name.startswith(f"{full_model.base_model_prefix}.")]
    if missing:
        log.info(
            "the backbone comes without a language head: %s starts at random (its output words are the input "
            "embeddings), so the first scores mean little",
            ", ".join(sorted(missing)),
        )
    return LanguageHead(full_model, model, bool(missing))


def load_skeleton(config: BackboneConfig, codec: HFCodec) -> Backbone:
    """Return the architecture without weights (on torch's meta device), to check in a moment what a method wants of it.

    Raises:
        BackboneError: the config cannot be loaded, or the codec's texts do not fit the model.
    """
    with _explained(config.name):
        folder = _folder(config, weights=False)
        return skeleton_of(config, _settings(folder, config.trust_remote_code), codec)


def skeleton_of(config: BackboneConfig, settings: PretrainedConfig, codec: HFCodec) -> Backbone:
    """Return the same for a model's config in memory."""
    with ONE_AT_A_TIME, torch.device("meta"):
        model = _loader(codec.kind).from_config(settings, trust_remote_code=config.trust_remote_code)
        return _wrap(codec.kind, model, codec, config)


def wrap_model(model: nn.Module, tokenizer: Any, max_source_tokens: int, max_target_tokens: int) -> Backbone:
    """Return a backbone around a model in memory; its kind is that of the model's class."""
    settings: Any = model.config
    kind = _kind(settings, [type(model).__name__])
    return _wrap(kind, model, HFCodec(tokenizer, kind, max_source_tokens, max_target_tokens), BackboneConfig())


def identity(config: BackboneConfig) -> str:
    """Return the SHA-256 over a backbone's config, tokenizer and weight files, wherever they are.

    Raises:
        BackboneError: it cannot be found.
    """
    with _explained(config.name):
        return fingerprint_of(config.name, config.revision, config.allow_pickle)


def at_commit(config: BackboneConfig) -> BackboneConfig:
    """Return the config with the current commit of the hub's name and revision, which all workers of a run load.

    Raises:
        BackboneError: it cannot be found.
    """
    with _explained(config.name):
        return config.model_copy(update={"revision": commit_of(config.name, config.revision)})


def _folder(config: BackboneConfig, weights: bool = True) -> str:
    files = FetchedFiles(weights, config.allow_pickle, config.trust_remote_code)
    return str(folder_of(config.name, config.revision, files))


def _settings(folder: str, trusts: bool) -> PretrainedConfig:
    from transformers import AutoConfig

    settings: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
    parts = [name for name in settings.sub_configs if re.search("text|vision|audio", name)]
    if parts:
        raise BackboneError(
            f"backbone '{folder}' is a multimodal model ({settings.model_type}: {', '.join(sorted(parts))}), and texts "
            "alone are learned here: name a text model, or a folder with its language model saved by itself"
        )
    return settings


def set_dropout(settings: Any, rate: float) -> None:
    """Set all dropout rates of a model's config, and of the configs in it (T5Gemma's sides, MPT's attention)."""
    for name, value in list(vars(settings).items()):
        if name in settings.sub_configs and value is not None:
            set_dropout(value, rate)
        elif DROPOUT.search(name) and isinstance(value, int | float) and not isinstance(value, bool) and value != rate:
            setattr(settings, name, rate)


def _loader(kind: str) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return {"encoder": AutoModel, "encoder-decoder": AutoModelForSeq2SeqLM, "decoder": AutoModelForCausalLM}[kind]


def _wrap(
    kind: str, model: Any, codec: HFCodec, config: BackboneConfig, language: LanguageHead | None = None
) -> Backbone:
    check_limits(model, codec)
    if kind == "encoder":
        return EncoderBackbone(model, codec, "mean" if config.pooling == "auto" else config.pooling, language)
    defaults = getattr(model, "generation_config", None)
    if defaults is not None:  # else the model cannot generate, which only evaluation of answers needs
        # answers are greedy, generators sample as configured: a penalty of the folder would not act in serving
        model.generation_config = type(defaults)(**{name: getattr(defaults, name, None) for name in SPECIAL_TOKENS})
    join_last_states(model)
    return Seq2SeqBackbone(model, codec) if kind == "encoder-decoder" else CausalBackbone(model, codec)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights: bfloat16 only where configured or where the GPU computes in it."""
    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if has_bf16 else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _kind(settings: PretrainedConfig, classes: Sequence[str] | None = None) -> Kind:
    """Return the kind of a model of these classes; None: those of its config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = " ".join(getattr(settings, "architectures", None) or [] if classes is None else classes)
    if getattr(settings, "is_encoder_decoder", False):
        return "encoder-decoder"
    if "MaskedLM" in architectures or settings.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "encoder"
    return "decoder" if "CausalLM" in architectures or "LMHead" in architectures else "encoder"


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn the library's errors into one sentence, and silence its logs while loading."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    logger = logging.getLogger("transformers")
    level = logger.level
    if level < logging.ERROR:  # to set a level costs milliseconds: every logger forgets what it is enabled for
        logger.setLevel(logging.ERROR)
    disable_progress_bar()
    try:
        yield
    except (*FAILURES, StrictDataclassError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            raise BackboneError(
                f"backbone '{name}' cannot be loaded: it brings code of its own, which runs only where the command "
                "allows it: add backbone.trust_remote_code=true (raycl serve: trust_remote_code=true, "
                "raycl bank: --trust-remote-code) if you trust its author"
            ) from error
        raise BackboneError(
            f"backbone '{name}' cannot be loaded: {reason}; expected 'minilm', a hub id or a folder with "
            "config.json, tokenizer.json and safetensors weights"
        ) from error
    finally:
        if level < logging.ERROR:
            logger.setLevel(level)
