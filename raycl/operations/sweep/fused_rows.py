"""Rows of a comparison that train nothing: the adapters that another row's run published for its tasks, fused to one.

This is what merging after the stream would score, as `raycl bank fuse` does it with one bank.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from raycl.bank.branches import Branch, resolve
from raycl.config import Section, Tree, flatten
from raycl.config.trust import Permissions
from raycl.metrics.run_results import RESULT_FILE, fused_of, read_results
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
    density: float = Field(
        0.2, gt=0, le=1, description="ties, dare: share of an update's entries that is kept, the largest or drawn ones"
    )
    rank: int | None = Field(
        None, ge=1, description="rank of the fused adapter. null: ranks added up, and the largest rank with svd"
    )


def fused_run(row: FusedRow, config: "RunConfig", source: str) -> Tree:
    """Return the results of a row's run: those there are, or of the adapters that are fused and scored now.

    The branch of the run's name points at the fused snapshot.

    Args:
        config: of the run whose adapters are fused, with this row's folder as output. source: name of that run.

    Raises:
        RunError: it has no results. BankError: it published no adapters, or one for all tasks. AdapterError: they are
            no plain LoRAs. StorageError: a file cannot be read or written.
    """
    name, runs = str(config.output.name), Storage.at(str(config.output.dir))
    folder, run = runs.sub(name), runs.sub(source)
    if folder.exists(RESULT_FILE):
        return read_results(folder.address)
    from raycl.operations.banks.fusion import FusionSettings, fuse  # brings peft
    from raycl.operations.banks.unlearning import RecordedSources, evaluate  # brings the engine

    result = read_results(run.address)
    bank, published = bank_at(run.address)
    branch = Branch(bank, name)
    if (head := branch.head()) is None:
        settings = FusionSettings(row.how, row.density, row.rank, config.seed)
        snapshot = fuse(bank, resolve(bank, published), settings, {}, name).snapshot
        branch.advance(snapshot, f"fused by {row.how}")
    else:  # the run was stopped before it was scored
        snapshot = bank.open(head)
    own = config.backbone
    addresses = [value for value in flatten(result["config"]).values() if isinstance(value, str) and "://" in value]
    permissions = Permissions(own.trust_remote_code, own.allow_pickle)
    sources = RecordedSources(backbone=own.name, permissions=permissions, storage=addresses)
    scores = evaluate(bank, snapshot, sources=sources)
    fused = fused_of(result, row.how, {task: asdict(score) for task, score in scores.items()}, name)
    folder.write_json(RESULT_FILE, hashed(fused))
    return fused
