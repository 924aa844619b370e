"""A snapshot for vLLM: a PEFT folder for each adapter, and the config of `ray.serve.llm` that serves them.

vLLM gives a whole request one adapter of weight 1, so that two kinds of snapshots can be served: a fixed mixture, which
is one LoRA whose ranks are concatenated, exactly; and top-1 choice, where each adapter is a model of its own name.
Limits of vLLM (0.22, `vllm.config.lora`, `vllm.lora.peft_helper`): one rank for all linears of an adapter, of which the
largest is one of `RANKS`; no soft prompts, no heads; decoder-only models. A record names the snapshot for the router
in front (`raycl.serve.upstream`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from torch import Tensor
from torch.nn.functional import pad

from raycl.adapters.card import CardMetadata
from raycl.adapters.experts import PATH
from raycl.adapters.peft import to_peft
from raycl.backbone.codec import capabilities_of
from raycl.bank import Bank, Snapshot
from raycl.errors import AdapterError, BankError
from raycl.operations.banks.exchange import card_metadata, empty_folder, export_peft, mixed
from raycl.progress import counted_off
from raycl.serve.upstream.export import ExportRecord
from raycl.storage import Storage
from raycl.types import AdapterState

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM takes."""

TOGETHER = 8
"""Adapters of one batch at most: each takes memory of `max_lora_rank`, used or not."""

REMOTE = ("s3://", "gs://", "abfss://", "azure://")
"""Addresses from which `ray.serve.llm` loads adapters."""

CONFIG, MIXTURE, TEMPLATE = "serve.yaml", "mixture", "chat_template.jinja"


@dataclass(frozen=True)
class Exported:
    """The written files.

    Attributes:
        folder: contains a folder for each adapter. models: adapter -> name in requests. rank: `max_lora_rank`.
        config: written to `serve.yaml`; None: the folder is not where Ray could load it from.
    """

    folder: Storage
    models: dict[str, str]
    rank: int
    config: dict[str, Any] | None


def export_vllm(
    bank: Bank,
    snapshot: Snapshot,
    mixtures: Mapping[str, Mapping[str, float]],
    folder: str,
    served_from: str | None = None,
    accelerator: str | None = None,
) -> Exported:
    """Write adapters, and where they can be loaded from, the config.

    Args:
        mixtures: name -> adapter -> weight: what each exported adapter is made of.
        served_from: URI that the folder will be copied to; None: it is served from where it is written.
        accelerator: Ray's name of the GPU (`H100`); None: any.

    Raises:
        BankError: vLLM cannot serve it, or the folder is not empty. AdapterError: it is no plain LoRA.
    """
    if not capabilities_of(snapshot.backbone.kind).one_sequence:
        raise BankError(
            f"snapshot {snapshot.number} has a backbone of kind {snapshot.backbone.kind}, and vLLM serves decoder-only "
            "models: serve it with `raycl serve`"
        )
    uri = served_from or folder
    if served_from is not None and not served_from.startswith(REMOTE):
        raise BankError(f"--served-from is '{served_from}', and Ray loads adapters from {', '.join(REMOTE)} only")
    states = {name: of_one_rank(mixed(bank, snapshot, parts, head=False)) for name, parts in mixtures.items()}
    rank = allowed_rank({name: state.rank for name, state in states.items()})
    storage = empty_folder(folder)
    cards = {name: card_metadata(snapshot, parts) for name, parts in mixtures.items()}
    for state in states.values():
        to_peft(state, "", "")  # refused before anything is written
    for name, state in counted_off(states.items(), "exporting adapters"):
        export_peft(state, cards[name], storage.sub(name).address)
    base = next(iter(cards.values()))
    model = base.base.rstrip("/").rpartition("/")[2]
    config = serve_config(base, model, list(states), rank, uri, accelerator) if uri.startswith(REMOTE) else None
    if config is not None:
        storage.write(CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
    rendered = {task.chat_template for card in cards.values() for task in card.tasks}
    templates = (rendered or {card.chat_template for card in cards.values()}) - {""}
    if len(templates) == 1:
        storage.write(TEMPLATE, next(iter(templates)).encode())
    models = {name: f"{model}:{name}" for name in states}
    parts = {name: dict(weights) for name, weights in mixtures.items()}
    ExportRecord(snapshot=snapshot.number, sha256=snapshot.sha256, base=model, models=models, mixtures=parts).write(
        storage
    )
    return Exported(storage, models, rank, config)


def of_one_rank(state: AdapterState) -> AdapterState:
    """Return the same update with as many rows in each linear, those that are added zero: vLLM reads no
    `rank_pattern`.

    Raises:
        AdapterError: it is more than a plain LoRA.
    """
    if state.is_alone or any(PATH.fullmatch(path) for path in state.linears):
        raise AdapterError(
            "the adapter is a DoRA (use_dora), has copies of modules (modules_to_save) or adapts experts "
            "(target_parameters), and vLLM and llama.cpp serve plain LoRAs of linears: write a merged model with "
            "--merged"
        )

    def widened(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        missing = state.rank - len(pair[0])
        return pad(pair[0], (0, 0, 0, missing)), pad(pair[1], (0, missing))

    return replace(state, linears={path: widened(pair) for path, pair in state.linears.items()})


def allowed_rank(ranks: Mapping[str, int]) -> int:
    """Return the smallest `max_lora_rank` that holds all of these adapters.

    Raises:
        BankError: one has more than any.
    """
    name = max(ranks, key=lambda accelerator: ranks[accelerator])
    fitting = [rank for rank in RANKS if rank >= ranks[name]]
    if not fitting:
        raise BankError(
            f"'{name}' has rank {ranks[name]}, and vLLM takes at most {RANKS[-1]}: mix fewer adapters, or write a "
            "merged model (--merged)"
        )
    return fitting[0]


def serve_config(
    card: CardMetadata, model: str, adapters: Sequence[str], rank: int, uri: str, accelerator: str | None
) -> dict[str, Any]:
    """Return a config for `serve deploy`.

    Args:
        model: name of the backbone in requests; `model:adapter` names an adapter.
    """
    together = min(len(adapters), TOGETHER)
    engine: dict[str, Any] = {"enable_lora": True, "max_loras": together, "max_lora_rank": rank}
    engine |= {"max_cpu_loras": len(adapters)}
    if card.source_tokens and card.target_tokens:
        engine["max_model_len"] = card.source_tokens + card.target_tokens
    if card.revision:
        engine["revision"] = card.revision
    settings: dict[str, Any] = {
        "model_loading_config": {"model_id": model, "model_source": card.base},
        "lora_config": {"dynamic_lora_loading_path": uri.rstrip("/"), "max_num_adapters_per_replica": len(adapters)},
        "engine_kwargs": engine,
    }
    if accelerator:
        settings["accelerator_type"] = accelerator
    application = {
        "name": "raycl-vllm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [settings]},
    }
    return {"applications": [application]}
