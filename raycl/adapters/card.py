"""The model card of an exported adapter: its metadata, and lines that use it without raycl, as the endpoint would.

Tensors and a config do not contain the prompt around a text, how states are pooled, or the labels of a head. The same
metadata is kept as `raycl.json`, which the printed lines read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raycl.types import Capabilities

METADATA = "raycl.json"
TEXT = "stocks fell again"
"""The card's example."""

CLASSES = {
    "CAUSAL_LM": "ModelForCausalLM",
    "SEQ_2_SEQ_LM": "ModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "ModelForFeatureExtraction",
}
"""PEFT's `task_type` -> the names of its and Transformers' automatic classes after `AutoPeft` and `Auto`."""

QUANTIZED = {
    "nf4": '`BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)`',
    "int8": "`BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)`",
}
"""Type of the backbone's stored weights -> Transformers' name for it."""

PIPELINES = {"label": "text-classification", "text": "text-generation"}
"""Kind of answers -> the hub's name for such a model."""


@dataclass(frozen=True)
class CardTask:
    """A task that an adapter was trained on.

    Attributes:
        prompt: the text before and after its inputs.
        chat_template: Jinja source that renders them, with `prompt` around them, as a user's messages, behind the
            message `system`; "": none does.
    """

    name: str
    prompt: tuple[str, str] = ("", "")
    labels: tuple[str, ...] | None = None
    metric: str = ""
    chat_template: str = ""
    system: str = ""


@dataclass(frozen=True)
class CardMetadata:
    """The content of an adapter's card.

    Attributes:
        kind: name of the backbone's kind. capabilities: what the backbone can do.
        base: hub id or folder of the backbone. revision: commit of the hub id. sha256: hash of its files, "" if
            unknown.
        adapters: name and version -> weight in the mixture that was exported.
        tasks: the tasks; that whose prompt the mixture gets comes first.
        pooling: mean or cls, for encoders.
        source_tokens, target_tokens: limits of prompts and of answers.
        bos: whether the tokenizer's first token stood in front of inputs ("tokenizer" or "none").
        quantization: type of the backbone's weights in training ("none", "nf4" or "int8").
        chat_template: Jinja source that a setting gave the backbone; "": the tokenizer's own.
    """

    kind: str
    capabilities: Capabilities
    base: str
    revision: str | None = None
    sha256: str = ""
    snapshot: int | None = None
    adapters: Mapping[str, float] = field(default_factory=dict)
    tasks: Sequence[CardTask] = ()
    pooling: str = "mean"
    source_tokens: int | None = None
    target_tokens: int | None = None
    bos: str = "tokenizer"
    quantization: str = "none"
    chat_template: str = ""

    @property
    def on_hub(self) -> bool:
        """Return whether `base` is a name that others can load."""
        return not self.base.startswith(("/", "."))

    def tree(self) -> dict[str, Any]:
        """Return the same for scripts: the content of `raycl.json`."""
        fields = {**asdict(self), "tasks": [asdict(task) for task in self.tasks]}
        del fields["capabilities"]  # they follow from the kind
        return fields


def model_card(metadata: CardMetadata, labels: Sequence[str], merged: bool) -> str:
    """Return Markdown with one Python block that works in the card's own folder.

    Args:
        labels: labels of the label head; () where there is none. merged: the folder is a complete model.
    """
    known = metadata.capabilities
    front = {"base_model": metadata.base} if metadata.on_hub else {}
    front |= {"library_name": "transformers" if merged else "peft", "pipeline_tag": PIPELINES[known.answers]}
    lines = [f"{name}: {value}" for name, value in front.items()]
    title = f"{' + '.join(metadata.adapters) or 'adapter'} {'folded into' if merged else 'for'} {metadata.base}"
    code = [
        *_loading(metadata, bool(labels), merged),
        *_input_code(metadata),
        *(_scoring(metadata, bool(labels)) if known.answers == "label" else _generation(metadata, merged)),
    ]
    parts = [
        "\n".join(["---", *lines, "tags: [lora, continual-learning]", "---", f"# {title}"]),
        _what(metadata, labels),
        f"## Use\n\n{_before(metadata)}\n\n```python\n{chr(10).join(code)}```",
        _tasks(metadata),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(metadata: CardMetadata, labels: Sequence[str]) -> str:
    mixture = ", ".join(f"{name} x {weight:g}" for name, weight in metadata.adapters.items())
    lines = [f"Adapters and weights: {mixture}." if mixture else "One adapter."]
    if metadata.snapshot is not None:
        lines.append(f"From snapshot {metadata.snapshot} of a raycl bank.")
    base = f"Base model: `{metadata.base}`" + (f" at revision `{metadata.revision}`" if metadata.revision else "")
    lines.append(f"{base}, SHA-256 over its files `{metadata.sha256}`." if metadata.sha256 else f"{base}.")
    if metadata.quantization in QUANTIZED:
        lines.append(
            f"It was trained on the base model with quantized weights: for the same outputs, pass "
            f"{QUANTIZED[metadata.quantization]} as `quantization_config` to `from_pretrained`."
        )
    if not metadata.on_hub:
        lines.append(
            "That is a folder of the machine it was trained on: elsewhere write where the base model lies into "
            "`base_model_name_or_path` of `adapter_config.json`."
        )
    if labels:
        lines.append(f"Labels of the head in `label_head.safetensors`, by row: {', '.join(labels)} (`labels.json`).")
    return " ".join(lines)


def _before(metadata: CardMetadata) -> str:
    lines = ["Run in this folder; `folder` may also be its name on the hub, downloaded first."]
    if metadata.source_tokens:
        lines.append(
            f"Prompts had at most {metadata.source_tokens} tokens in training: shorten the end of a longer text, not "
            "the template."
        )
    if metadata.tasks:
        lines.append("Name another task for its template.")
    return " ".join(lines)


def _loading(metadata: CardMetadata, head: bool, merged: bool) -> list[str]:
    known = metadata.capabilities
    has_texts = known.answers == "text"
    kind = f"Auto{'' if merged else 'Peft'}{CLASSES[known.task_type]}" if has_texts or not merged else "AutoModel"
    theirs = ["AutoTokenizer"] + ([kind] if merged else []) + (["GenerationConfig"] if has_texts else [])
    config = 'model.peft_config["default"]'
    tokenizer = (
        ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
        if merged
        else [
            f"base = {config}.base_model_name_or_path",
            f"tokenizer = AutoTokenizer.from_pretrained(base, revision={config}.revision)",
        ]
    )
    return [
        "import json",
        "from pathlib import Path",
        "",
        "import torch",
        *([] if merged else [f"from peft import {kind}"]),
        *(["from safetensors.torch import load_file"] if head else []),
        f"from transformers import {', '.join(sorted(theirs))}",
        "",
        'folder = "."',
        f'about = json.loads(Path(folder, "{METADATA}").read_text())',
        f"model = {kind}.from_pretrained(folder, dtype=torch.float32).eval()",
        "",
        *tokenizer,
    ]


def _input_code(metadata: CardMetadata) -> list[str]:
    without_bos = ["inputs = {name: held[:, 1:] for name, held in inputs.items()}  # trained without its first token"]
    cut = without_bos if metadata.bos == "none" else []
    if metadata.capabilities.one_sequence:
        cut = [
            *cut,
            'if inputs["input_ids"][0, -1] == tokenizer.eos_token_id:  # texts end here, prompts do not',
            "    inputs = {name: held[:, :-1] for name, held in inputs.items()}",
        ]
    start = ["", f"text = {json.dumps(TEXT)}"]
    if not metadata.tasks:
        plain = ['inputs = tokenizer(text, return_tensors="pt")', *cut]
        if metadata.capabilities.answers == "label":
            return [*start, *plain]
        template = 'about["chat_template"] or tokenizer.get_chat_template()'
        chat = _chat_code('{"role": "user", "content": text}', template, metadata)
        condition = 'if about["chat_template"] or tokenizer.chat_template:  # a chat model reads a turn of the user'
        return [*start, condition, *_indented(chat), "else:", *_indented(plain)]
    first = metadata.tasks[0]
    start.append(f'task = next(task for task in about["tasks"] if task["name"] == {json.dumps(first.name)})')
    if not first.chat_template:
        prompt = 'inputs = tokenizer(task["prompt"][0] + text + task["prompt"][1], return_tensors="pt")'
        return [*start, prompt, *cut]
    system = ['{"role": "system", "content": task["system"]}'] if first.system else []
    user = 'task["prompt"][0] + text + task["prompt"][1]' if any(first.prompt) else "text"
    messages = ", ".join([*system, f'{{"role": "user", "content": {user}}}'])
    return [*start, *_chat_code(messages, 'task["chat_template"]', metadata)]


def _chat_code(messages: str, template: str, metadata: CardMetadata) -> list[str]:
    """Return lines that render messages: all that a chat template writes before an answer is prompt
    (`raycl.backbone.markup`).

    Args:
        messages, template: expressions for the messages and the Jinja source.
    """
    special_tokens = not metadata.capabilities.one_sequence
    return [
        f"messages = [{messages}]",
        f'settings = {{"chat_template": {template}, "tokenize": False}}',
        "before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)",
        'answered = [*messages, {"role": "assistant", "content": "\\uf8ff"}]  # all before any answer is prompt',
        'start = tokenizer.apply_chat_template(answered, **settings).rpartition("\\uf8ff")[0]',
        'prompt = start.rstrip(" ") if start[len(before) :].strip() else before',
        f'inputs = tokenizer(prompt, add_special_tokens={special_tokens}, return_tensors="pt")',
    ]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _generation(metadata: CardMetadata, merged: bool) -> list[str]:
    start = "inputs['input_ids'].shape[1]" if metadata.capabilities.one_sequence else "0"
    arguments = ["decoder_start_token_id", "forced_bos_token_id"] if metadata.capabilities.separate_encoder else []
    return [
        "",
        "own = model.generation_config  # its penalties and the like were never used in training",
        "ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]",
        "special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}",
        f"model.generation_config = {'' if merged else 'model.get_base_model().generation_config = '}GenerationConfig(",
        *[f"    {name}=own.{name}," for name in arguments],
        "    do_sample=False,",
        f"    max_new_tokens={metadata.target_tokens or 64},",
        "    eos_token_id=sorted({tokenizer.eos_token_id} | special.intersection(ends)),",
        "    pad_token_id=tokenizer.eos_token_id,",
        ")",
        "with torch.no_grad():",
        '    ids = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])',
        f"print(tokenizer.decode(ids[0, {start} :], skip_special_tokens=True).strip())",
        "",
    ]


def _scoring(metadata: CardMetadata, head: bool) -> list[str]:
    pooled = (
        ["pooled = states[:, 0]"]
        if metadata.pooling == "cls"
        else ['mask = inputs["attention_mask"].unsqueeze(-1)', "pooled = (states * mask).sum(1) / mask.sum(1)"]
    )
    scores = [
        'head = load_file(Path(folder, "label_head.safetensors"))',
        'labels = json.loads(Path(folder, "labels.json").read_text())',
        'scores = (pooled @ head["weight"].float().T + head["bias"].float()).softmax(-1)[0].tolist()',
        "for score, label in sorted(zip(scores, labels), reverse=True):",
        '    print(label, f"{score:.4f}")',
    ]
    return [
        "",
        "with torch.no_grad():",
        '    states = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state',
        *pooled,
        *(scores if head else ["print(pooled.shape)"]),
        "",
    ]


def _tasks(metadata: CardMetadata) -> str:
    if not metadata.tasks:
        return ""
    rows = [
        f"| {task.name} | {_before_text(task)} | "
        f"{_cell(task.prompt[1])} | {', '.join(task.labels or ())} | {task.metric} |"
        for task in metadata.tasks
    ]
    head = "| task | before the text | behind it | labels | metric |\n|---|---|---|---|---|"
    return "\n".join(["## Tasks and their templates", "", head, *rows])


def _before_text(task: CardTask) -> str:
    parts = ["chat template" if task.chat_template else "", _cell(task.prompt[0])]
    return " ".join(part for part in parts if part)


def _cell(text: str) -> str:
    """Return code for a table, on one line."""
    written = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("|", "\\|").replace("`", "'")
    return f"`{written}`" if written else ""
