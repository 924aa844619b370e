"""Rows of a comparison that train nothing: the adapters that another row's run published for its tasks, fused to one.

This is what merging after the stream would score, as `raycl bank fuse` does it with one bank.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from raycl.bank.branches import Branch, resolve
from raycl.config import Section, Tree, flatten
from raycl.config.trust import Permissions
from raycl.errors import ResumeError
from raycl.metrics.run_results import RESULT_FILE, finished_results, fused_of, read_results
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.records.named_bank import bank_at

if TYPE_CHECKING:
    from raycl.training.setup.run_config import RunConfig


class FusedRow(Section):
    """The settings of `raycl bank fuse`."""

    of: str = Field(
        description="the row, listed before, whose runs publish an adapter for each task; its seeds are this row's"
    )
    how: Literal["average", "arithmetic", "ties", "dare", "svd"] = Field(description="how its adapters become one")
    density: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of an update's entries that is kept, the largest (ties) or drawn ones (dare). null: 0.2",
    )
    rank: int | None = Field(
        None, ge=1, description="rank of the fused adapter. null: ranks added up, and the largest rank with svd"
    )

    @model_validator(mode="after")
    def _density_acts(self) -> Self:
        if self.density is not None and self.how not in ("ties", "dare"):
            raise ValueError(f"density acts on ties and dare alone, and how is '{self.how}': leave it out")
        return self


def fused_run(row: FusedRow, config: "RunConfig", source: str) -> Tree:
    """Return the results of a row's run: those there are, or of the adapters that are fused and scored now.

    The branch of the run's name points at the fused snapshot.

    Args:
        config: of the run whose adapters are fused, with this row's folder as output. source: name of that run.

    Raises:
        RunError: the other run is not finished. ResumeError: there are results, or a fused snapshot, of other settings
            or of another run. BankError: it published no adapters, or one for all tasks. AdapterError: they are no
            plain LoRAs. StorageError: a file cannot be read or written.
    """
    name, runs = str(config.output.name), Storage.at(str(config.output.dir))
    folder, run = runs.sub(name), runs.sub(source)
    result = finished_results(run.address)
    bank, published = bank_at(run.address)
    source_snapshot = resolve(bank, published)
    fused = row.model_dump() | {"snapshot": source_snapshot.sha256, "seed": config.seed}
    if folder.exists(RESULT_FILE):
        known = read_results(folder.address)
        _check_same(name, known.get("fused"), fused, f"the folder '{folder.address}'")
        return known
    from raycl.operations.banks.fusion import FusionSettings, fuse  # brings peft
    from raycl.operations.banks.unlearning import RecordedSources, evaluate  # brings the engine

    branch = Branch(bank, name)
    if (head := branch.head()) is None:
        density = {} if row.density is None else {"density": row.density}
        settings = FusionSettings(row.how, rank=row.rank, seed=config.seed, record={"row": fused}, **density)
        snapshot = fuse(bank, source_snapshot, settings, {}, name).snapshot
        branch.advance(snapshot, f"fused by {row.how}")
    else:  # the run was stopped before it was scored
        snapshot = bank.open(head)
        made = snapshot.provenance.get("fused", {}).get("row")
        _check_same(name, made, fused, f"branch '{name}' of the bank '{bank.storage.address}'")
    own = config.backbone
    addresses = [value for value in flatten(result["config"]).values() if isinstance(value, str) and "://" in value]
    permissions = Permissions(own.trust_remote_code, own.allow_pickle)
    sources = RecordedSources(backbone=own.name, permissions=permissions, storage=addresses)
    scores = evaluate(bank, snapshot, sources=sources)
    tree = fused_of(result, fused, {task: asdict(score) for task, score in scores.items()}, name)
    folder.write_json(RESULT_FILE, hashed(tree))
    return tree


def _check_same(name: str, known: Tree | None, fused: Tree, where: str) -> None:
    if known is None:
        raise ResumeError(f"{where} is not of row '{name}': name the row otherwise, or remove it")
    if changed := [
        f"fused.{key} was {known.get(key)}, now {fused[key]}" for key in fused if known.get(key) != fused[key]
    ]:
        raise ResumeError(f"{where} has another fusion ({', '.join(changed)}): name the row otherwise, or remove it")
