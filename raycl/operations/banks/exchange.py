"""Adapters of the bank as folders that other libraries load, and back: PEFT both ways, merged Hugging Face models.

An adapter that was trained elsewhere becomes a task that the router selects, known by a few of its texts. Exported
folders become GGUF files by the converters of llama.cpp, which are programs of their own:

    convert_lora_to_gguf.py --outfile FILE [--base MODEL] ADAPTER     a LoRA in PEFT's layout
    convert_hf_to_gguf.py --outfile FILE MODEL                        a merged model

They are found on PATH. A LoRA in GGUF has one alpha, and llama.cpp scales each linear by alpha / rank: linears of
other ranks are padded with zeros first (`of_one_rank`).
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from raycl.adapters.card import METADATA, CardMetadata, CardTask, model_card
from raycl.adapters.experts import PATH, expert_shapes, fused_parameters
from raycl.adapters.peft import from_peft, to_peft
from raycl.adapters.state import NO_SUM, check_copies, check_fits, combine, fold
from raycl.backbone import BackboneConfig, identity, load_backbone, load_codec, load_skeleton
from raycl.backbone.codec import KINDS
from raycl.backbone.linears import untie
from raycl.backbone.model_files import published_name
from raycl.backbone.roles import linear_shapes
from raycl.bank import AdapterManifest, Bank, NewSnapshot, Snapshot
from raycl.bank.manifest import ModelInfo, TaskInfo
from raycl.bank.states import get_router, put_router
from raycl.data.prompts import Prompt
from raycl.errors import AdapterError, BankError
from raycl.methods.registry import method_config
from raycl.routing.router import Router
from raycl.routing.routers import make_router, routed_text, router_class
from raycl.serve.snapshots.parts import router_of
from raycl.storage import Storage
from raycl.training.records.hub import HEAD, TENSORS, HubAddress, on_hub
from raycl.types import AdapterState

CONFIG, LABELS, CARD = "adapter_config.json", "labels.json", "README.md"


def mixed(bank: Bank, snapshot: Snapshot, weights: Mapping[str, float], head: bool = True) -> AdapterState:
    """Return a fixed mixture of a snapshot's adapters as one adapter.

    Args:
        weights: adapter -> weight. head: False leaves label heads out.

    Raises:
        BankError: an adapter that the snapshot lacks. AdapterError: parts that do not add up.
    """
    entries = {name: snapshot.adapter(name) for name in weights}
    states = {name: bank.fetch(entry, snapshot.layouts[entry.layout]) for name, entry in entries.items()}
    if not head:
        states = {name: replace(held, labels=(), head_weight=None, head_bias=None) for name, held in states.items()}
    if list(weights.values()) == [1.0]:
        return next(iter(states.values()))  # as it was learned, not its scale folded into B
    return combine(weights, states, snapshot.router.settings.get("head_rule", "probability"))


def card_metadata(
    snapshot: Snapshot, weights: Mapping[str, float], backbone: BackboneConfig | None = None
) -> CardMetadata:
    """Return the metadata of a mixture's card: a task whose adapters have most weight comes first, as at the endpoint.

    Args:
        backbone: present location of the backbone; None: that of the snapshot's run.

    Raises:
        BankError: an adapter that the snapshot lacks, or a backbone of no known kind.
    """
    if snapshot.backbone.kind not in KINDS:
        raise BankError(
            f"snapshot {snapshot.number} has a backbone of kind '{snapshot.backbone.kind}', expected one of "
            f"{', '.join(KINDS)}: publish a snapshot with this version first"
        )
    shares: dict[str, float] = {}
    for name, weight in weights.items():
        for task in snapshot.adapter(name).tasks if weight else ():
            shares[task] = shares.get(task, 0.0) + weight
    known = {
        task.name: CardTask(task.name, task.prompt, task.labels, task.metric, task.chat_template, task.system)
        for task in snapshot.tasks
    }
    run = snapshot.provenance.get("config", {})
    settings = run.get("backbone", {"name": snapshot.backbone.name})
    limits = [snapshot.token_limits(task) for task in shares if task in known] or [snapshot.token_limits()]
    if backbone is not None:
        settings = backbone.model_dump()
    pooling = settings.get("pooling", "auto")
    return CardMetadata(
        kind=snapshot.backbone.kind,
        capabilities=KINDS[snapshot.backbone.kind],
        base=published_name(settings["name"]),
        revision=settings.get("revision"),
        sha256=snapshot.backbone.sha256,
        snapshot=snapshot.number,
        adapters=dict(weights),
        tasks=[known[task] for task in sorted(shares, key=lambda task: -shares[task]) if task in known],
        pooling="mean" if pooling == "auto" else pooling,
        source_tokens=max((source for source, _ in limits if source), default=None),
        target_tokens=max((target for _, target in limits if target), default=None),
        bos=settings.get("bos", "tokenizer"),
        quantization=settings.get("quantization", "none"),
        chat_template=settings.get("chat_template") or "",
    )


def export_peft(state: AdapterState, metadata: CardMetadata, folder: str) -> Storage:
    """Write what PEFT's `AutoPeftModel...from_pretrained` loads, a label head beside it, and the card of both.

    Raises:
        AdapterError: it is no plain LoRA. StorageError: the folder cannot be written.
    """
    tensors, config = to_peft(state, metadata.base, metadata.capabilities.task_type, metadata.revision)
    storage = empty_folder(folder)
    _describe(storage, state, metadata, merged=False)
    storage.write(TENSORS, save(tensors))
    storage.write_json(CONFIG, config)
    return storage


def _describe(storage: Storage, state: AdapterState, metadata: CardMetadata, merged: bool) -> None:
    if state.head_weight is not None and state.head_bias is not None:
        storage.write(HEAD, save({"weight": state.head_weight.contiguous(), "bias": state.head_bias.contiguous()}))
        storage.write_json(LABELS, list(state.labels))
    storage.write_json(METADATA, metadata.tree())
    storage.write(CARD, model_card(metadata, state.labels, merged).encode())


def export_merged(state: AdapterState, metadata: CardMetadata, backbone: BackboneConfig, folder: str) -> Storage:
    """Write a plain Hugging Face model folder with the adapter folded into the weights, and its card.

    Raises:
        AdapterError: it does not fit, or is no plain LoRA. BankError: the backbone is quantized. BackboneError: it
            shares weights that cannot be separated (`untie`).
    """
    if backbone.quantization != "none":
        raise BankError(
            f"the adapter was learned with backbone.quantization={backbone.quantization}, and an update cannot be "
            "folded into quantized weights: export the adapter itself, without --merged"
        )
    storage = empty_folder(folder)
    codec = load_codec(backbone, 1, 1)
    model = load_backbone(backbone, codec, torch.device("cpu"), 0)
    check_fits("the adapter", state, linear_shapes(model.model) | expert_shapes(model.model))
    is_untied = untie(model.model, [*(path for path in state.linears if not PATH.fullmatch(path)), *state.copies])
    fold(model.model, state)
    for file, data in model.model_files().items():
        storage.write(file, data)
    _describe(storage, state, metadata, merged=True)
    tied = set() if is_untied else set(getattr(model.model, "all_tied_weights_keys", None) or {})
    weights = {name: value.contiguous() for name, value in model.model.state_dict().items() if name not in tied}
    storage.write("model.safetensors", save(weights, metadata={"format": "pt"}))
    return storage


def import_peft(bank: Bank, folder: str, name: str, backbone: BackboneConfig, tasks: list[str]) -> AdapterManifest:
    """Publish a LoRA that PEFT wrote elsewhere.

    Raises:
        BankError, AdapterError: see `read_peft`.
    """
    where, source = peft_folder(folder)
    state, model = read_peft(where, name, backbone)
    return bank.publish(name, state, model, tasks, {"imported": source})


def peft_folder(address: str) -> tuple[Path, str]:
    """Return the folder of an adapter, and where it is from: a folder, or `hf://ORG/NAME[/FOLDER][@REVISION]`.

    Raises:
        BankError: the hub has no such repository, or does not answer.
    """
    if not on_hub(address):
        where = Path(address).absolute()
        return where, str(where)
    place = HubAddress.of(address)
    files = (TENSORS, CONFIG, HEAD, LABELS, METADATA)
    fetched = place.fetch([f"{place.folder}/{name}".lstrip("/") for name in files])
    return fetched / place.folder, str(replace(place, revision=fetched.name))


def read_peft(where: Path, name: str, backbone: BackboneConfig) -> tuple[AdapterState, ModelInfo]:
    """Return a LoRA that PEFT wrote, and the backbone that it fits.

    Args:
        name: the adapter's name in messages.

    Raises:
        BankError: the folder is not one of PEFT's. AdapterError: no plain LoRA, or not of this backbone.
    """
    try:
        config = json.loads((where / CONFIG).read_text())
        tensors = load_file(where / TENSORS)
        labels = json.loads((where / LABELS).read_text()) if (where / LABELS).exists() else []
        head = load_file(where / HEAD) if labels else {}
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise BankError(f"'{where}' is no PEFT adapter folder ({CONFIG} and {TENSORS}): {error}") from error
    codec = load_codec(backbone, 1, 1)
    skeleton = load_skeleton(backbone, codec).model
    shapes = linear_shapes(skeleton)
    modules = {path: module for path, module in skeleton.named_modules() if hasattr(module, "weight")}
    state = from_peft(tensors, config, shapes, modules, fused_parameters(skeleton))
    check_fits(name, state, shapes | expert_shapes(skeleton))
    check_copies(name, state, modules)
    if labels:
        _check_head(str(where), labels, head, int(skeleton.config.hidden_size))
        state = replace(state, labels=tuple(labels), head_weight=head["weight"], head_bias=head["bias"])
    return state, ModelInfo(name=backbone.name, sha256=identity(backbone), kind=codec.kind)


def _check_head(folder: str, labels: Any, head: Mapping[str, Tensor], width: int) -> None:
    """Check that `LABELS` and `HEAD` are a label head for hidden states of this width."""
    if not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
        raise BankError(f"{LABELS} of '{folder}' holds {labels!r:.80}: expected a list of labels")
    if len(set(labels)) < len(labels):
        raise BankError(f"{LABELS} of '{folder}' names a label twice: expected each once")
    shapes = {part: list(tensor.shape) for part, tensor in head.items()}
    expected = {"weight": [len(labels), width], "bias": [len(labels)]}
    if shapes != expected:
        raise BankError(f"{HEAD} of '{folder}' holds {shapes}: expected {expected} for its {len(labels)} labels")
    if not all(tensor.is_floating_point() and bool(torch.isfinite(tensor).all()) for tensor in head.values()):
        raise BankError(f"{HEAD} of '{folder}' holds values that are not finite numbers")


def empty_folder(folder: str) -> Storage:
    """Return the folder to export to.

    Raises:
        BankError: it holds files.
    """
    storage = Storage.at(folder)
    if storage.exists() and storage.list():
        raise BankError(f"'{folder}' is not empty: name a new folder")
    return storage


LORA, MODEL = "convert_lora_to_gguf.py", "convert_hf_to_gguf.py"
"""Converters of an adapter and of a model."""

FILES = {LORA: "adapter.gguf", MODEL: "model.gguf"}
"""Converter -> the file that it writes, in the exported folder."""


def converter(merged: bool) -> str:
    """Return the path of the converter.

    Raises:
        BankError: it is not installed.
    """
    name = MODEL if merged else LORA
    found = shutil.which(name)
    if found is None:
        raise BankError(
            f"--gguf needs {name} of llama.cpp, which is not on PATH: git clone https://github.com/ggml-org/llama.cpp, "
            "install its requirements.txt, make the script executable, and add the folder to PATH"
        )
    return found


def convert(program: str, folder: Path, base: Path | None = None) -> Path:
    """Write a GGUF file into an exported folder; returns the file.

    Args:
        program: `converter`. base: folder of the backbone of an adapter; None: a merged model.

    Raises:
        BankError: the converter failed; the exported folder stays.
    """
    file = folder / FILES[Path(program).name]
    words = [program, "--outfile", str(file), *(["--base", str(base)] if base else []), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not file.is_file():
        last = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise BankError(
            f"{Path(program).name} ended with status {done.returncode} and wrote no '{file}': {last:.300}; the "
            f"exported folder '{folder}' is complete: convert it yourself, or use a version of llama.cpp for this model"
        )
    return file


TEXT = "{text}"
"""Stands for the text in a prompt."""

_TASKS = TypeAdapter(list[TaskInfo])


def import_routed(
    bank: Bank,
    snapshot: Snapshot,
    address: str,
    name: str,
    backbone: BackboneConfig,
    texts: Sequence[str],
    prompt: str | None = None,
) -> tuple[Snapshot, list[str], int]:
    """Publish an adapter, and a snapshot whose router selects it for texts like the examples.

    Nothing of the snapshot's tasks changes. The new snapshot has no training state.

    Args:
        address: folder or `hf://` address of a LoRA in PEFT's layout. name: name of the task.
        texts: a handful of the task's texts.
        prompt: what stood around its texts, with `{text}` in it; None: what `raycl.json` beside the adapter says, or
            nothing.

    Returns:
        The snapshot with the task, names of its adapter in the bank, and how many examples the router gives to it.

    Raises:
        BankError: the router cannot take a task by examples, or has one of that name; another backbone; no examples.
        AdapterError: no plain LoRA.
    """
    if not texts:
        raise BankError("there are no examples: expected a handful of the task's texts, one a row")
    if name in [task.name for task in snapshot.tasks]:
        raise BankError(f"snapshot {snapshot.number} has a task '{name}' already: expected another --name")
    config = snapshot.provenance.get("config", {}).get("method")
    selects = config is not None and method_config(config).selects_router
    where, source = peft_folder(address)
    task = _task(where, name, prompt)
    before = router_of(bank, snapshot)
    if routed_text(snapshot.router) == "prompt":
        texts = [Prompt.of(task).written(text) for text in texts]
    queries_BC = before.encoder.embed(texts) if before.encoder is not None else torch.zeros(len(texts), 0)
    state, slots = router_class(snapshot.router).with_task(get_router(bank, snapshot), name, queries_BC, selects)
    adapter, model = read_peft(where, name, backbone)
    if adapter.is_alone:
        raise AdapterError(f"adapter '{name}' {NO_SUM}, and the router of snapshot {snapshot.number} may mix it")
    task = task if task.labels else task.model_copy(update={"labels": adapter.labels or None})
    fresh = [bank.publish(slot, adapter, model, [name], {"imported": source}) for slot in slots]
    info, encoder = put_router(bank, state)
    imported = [*snapshot.provenance.get("imported", []), {"task": name, "from": source}]
    new = bank.snapshot(
        NewSnapshot(
            [*fresh, *((entry, snapshot.layouts[entry.layout]) for entry in snapshot.adapters)],
            snapshot.backbone,
            info,
            [*snapshot.tasks, task],
            encoder,
            parent=snapshot.number,
            provenance={**snapshot.provenance, "imported": imported},
        )
    )
    owners = {entry.name: entry.tasks for entry in new.adapters}
    router = make_router(state, owners, [before.encoder] if before.encoder is not None else [])
    return new, slots, _found(router, owners, name, texts)


def _task(where: Path, name: str, prompt: str | None) -> TaskInfo:
    """Return the task's prompt, metric and chat template, as given or as `METADATA` has them."""
    if prompt is not None:
        before, found, behind = prompt.partition(TEXT)
        if not found:
            raise BankError(f"the prompt {prompt!r:.80} has no {TEXT}: expected it where the text stands")
        return TaskInfo(name=name, prompt=(before, behind))
    if not (where / METADATA).is_file():
        return TaskInfo(name=name)
    try:
        tasks = _TASKS.validate_python(json.loads((where / METADATA).read_text())["tasks"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ValidationError) as error:
        raise BankError(
            f"'{where / METADATA}' does not describe tasks as raycl does ({error}): give --prompt, or remove the file"
        ) from error
    return tasks[0].model_copy(update={"name": name}) if tasks else TaskInfo(name=name)


def _found(router: Router, owners: Any, name: str, texts: Sequence[str]) -> int:
    mixture = router.route(texts, None)
    tasks = [owners[adapter][0] for adapter in mixture.names]
    rows = [dict.fromkeys(tasks, 0.0) for _ in texts]
    for row, weights in zip(rows, mixture.weights.tolist(), strict=True):
        for task, weight in zip(tasks, weights, strict=True):
            row[task] += weight
    return sum(max(row, key=lambda task: row[task]) == name for row in rows)
