"""A backbone's architecture from its config.json alone, for arithmetic; weights and tokenizer may be missing.

Large models of the papers and of `cluster/README.md` are known by their published sizes, so that nothing is fetched.
"""

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, T5Config

from raycl.backbone.base import Backbone
from raycl.backbone.codec import HFCodec, Kind
from raycl.backbone.load import BackboneConfig, known_kind, load_codec, load_skeleton, skeleton_of
from raycl.backbone.model_files import present_folder
from raycl.errors import BackboneError

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    # config.json of the hub ids; LLaMA: Touvron et al. 2023, table 2; T5: Raffel et al. 2020, section 3.7
    "google-t5/t5-large": ("t5", {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16}),
    "google-t5/t5-3b": ("t5", {"d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32}),
    "google/t5-v1_1-large": ("t5.1.1", {"d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16}),
    "google/t5-v1_1-xl": ("t5.1.1", {"d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32}),
    "google/t5-v1_1-xxl": ("t5.1.1", {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64}),
    "openlm-research/open_llama_3b": (
        "llama",
        {"hidden_size": 3200, "intermediate_size": 8640, "num_hidden_layers": 26, "num_attention_heads": 32},
    ),
    "meta-llama/Llama-2-7b-hf": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "meta-llama/Llama-2-7b-chat-hf": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    "meta-llama/Llama-2-13b-hf": (
        "llama",
        {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    ),
}
"""Hub id -> family and the sizes in its config.json. Every T5 here has 24 layers on each side."""


def known_sizes(name: str) -> PretrainedConfig | None:
    """Return the config of a model of `SIZES`, with a vocabulary of 32,000 (LLaMA) or 32,128 (T5); None for others."""
    family, sizes = SIZES.get(name, ("", {}))
    if family == "llama":
        positions = 2048 if name.startswith("openlm") else 4096
        return LlamaConfig(
            vocab_size=32_000, max_position_embeddings=positions, tie_word_embeddings=False, pad_token_id=0, **sizes
        )
    if family:
        gated = family == "t5.1.1"
        return T5Config(
            vocab_size=32_128,
            num_layers=24,
            feed_forward_proj="gated-gelu" if gated else "relu",
            decoder_start_token_id=0,
            **sizes,
        )
    return None


def architecture(config: BackboneConfig, source_tokens: int, target_tokens: int) -> Backbone:
    """Return the backbone on torch's meta device, as `load_skeleton` gives it.

    Args:
        source_tokens, target_tokens: limits of the codec.

    Raises:
        BackboneError: its config.json is not on this machine, and it is none of `SIZES`.
    """
    if present_folder(config.name, config.revision) is None:
        sizes = known_sizes(config.name)
        if sizes is None:
            raise BackboneError(
                f"config.json of backbone '{config.name}' is not on this machine: name a folder that has it, fetch it "
                f"(hf download {config.name} config.json), or use one of {', '.join(SIZES)}"
            )
        family: Kind = "encoder-decoder" if isinstance(sizes, T5Config) else "decoder"
        return skeleton_of(config, sizes, HFCodec(_no_words(), family, source_tokens, target_tokens))
    try:
        codec = load_codec(config, source_tokens, target_tokens)
    except BackboneError:
        if (kind := known_kind(config)) is None:
            raise
        codec = HFCodec(_no_words(), kind, source_tokens, target_tokens)
    return load_skeleton(config, codec)


def _no_words() -> PreTrainedTokenizerFast:
    special = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    ids = {token: number for number, token in enumerate(special.values())}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<unk>")), **special)
