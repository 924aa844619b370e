"""Chat templates with the traits of public models' ones, and tokenizers of every family that reads them."""

from __future__ import annotations

from collections.abc import Callable

from data_samples import minilm_file
from tiny import WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from raycl.backbone.codec import HFCodec
from raycl.testing.tiny_models import word_tokenizer

TEMPLATES = {
    "trims": (
        "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m['role'] + '<|head|>\n\n' + (m['content'] | trim) + "
        "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant<|head|>\n\n' }}{% endif %}"
    ),
    "no-system": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{{ '<|turn|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
        "(m['content'] | trim) + '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>model\n' }}"
        "{% endif %}"
    ),
    "thinks": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|turn|>assistant\n' }}"
        "{% if loop.last and '</think>' not in m['content'] %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ (m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\n')) + '<|end|>\n' }}"
        "{% else %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    ),
    "in-lines": (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% elif m['role'] == 'system' %}{{ m['content'] }}{% else %}"
        "{{ ' ' + (m['content'] | trim) + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
}
"""A llama3-like, a gemma-like, a qwen3-like and a llama2-like one."""

TOOL_TEMPLATES = {
    "in-tags": (
        "{% if tools %}<|turn|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call one so: <tool_call>"
        "</tool_call><|end|>\n{% endif %}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% for call in m['tool_calls'] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    ),
    "in-lines": (
        "{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m['role'] == 'user' %}{% if tools and m == asked[-1] %}"
        "{{ '[TOOLS] ' + (tools | tojson) }}{% endif %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% elif m['role'] == 'tool' %}{{ '[RESULT] ' + m['content'] + m['tool_call_id'] }}"
        "{% elif m['tool_calls'] %}{% if m['tool_calls'][0]['id'] | length != 9 %}{{ raise_exception('nine letters') }}"
        "{% endif %}{{ '[CALLS] ' + (m['tool_calls'] | tojson) + eos_token }}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
}
"""One in the form of Qwen's and Hermes', and a mistral-like one."""

CONTROL = ["<|turn|>", "<|head|>", "<|end|>"]
ROLES = ("system", "user", "assistant", "model")
TEXTS = (" ".join(WORDS), "<think>\n\n</think>\n\nthe sky is blue", "[INST] a b </s> <s> [/INST]", *ROLES)


def _words() -> PreTrainedTokenizerFast:
    return word_tokenizer("llama", (*WORDS, *ROLES))


def _pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer as SentencePiece's: a space before the first word, and special strings that are pieces too."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _wordpiece() -> PreTrainedTokenizerFast:
    """MiniLM's, whose special tokens are words of its vocabulary, with an end behind each text."""
    loaded = Tokenizer.from_file(minilm_file())
    return PreTrainedTokenizerFast(tokenizer_object=loaded, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "words": _words,
    "pieces": _pieces,
    "bytes": _bytes,
    "wordpiece": _wordpiece,
}


def chat_codec(tokenizer: str | PreTrainedTokenizerFast, template: str, kind: str = "decoder") -> HFCodec:
    """Return a codec with one of the templates, whose control tokens its tokenizer has.

    Args:
        tokenizer: a name of `TOKENIZERS`, or one itself. template: a name of `TEMPLATES` or `TOOL_TEMPLATES`.
    """
    result = TOKENIZERS[tokenizer]() if isinstance(tokenizer, str) else tokenizer
    result.add_special_tokens({"additional_special_tokens": CONTROL})
    result.add_tokens(["<think>", "</think>"])
    result.chat_template = (TEMPLATES | TOOL_TEMPLATES)[template]
    return HFCodec(result, kind, 200, 40)
