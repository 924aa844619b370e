"""Runs in their folders: a new one that is checked, one that continues, and one with more tasks."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from raycl import config as configs
from raycl.config import trust
from raycl.config.trust import announce
from raycl.data.settings import as_spec
from raycl.data.stream import Stream, open_stream
from raycl.errors import AlreadyExistsError, ConfigError, ResumeError, RunError
from raycl.storage import Storage
from raycl.storage.records import hashed
from raycl.training.definition.settings import EXEMPT
from raycl.training.definition.training_context import RunInfo
from raycl.training.records.journal import RunState, check_inputs, check_owner, last_attempt, read_state
from raycl.training.records.publish import open_bank
from raycl.training.records.results import build_results
from raycl.training.records.run_folder import CONFIG, resume_arguments, run_at
from raycl.training.setup import checks, run_config
from raycl.training.setup.fingerprints import inputs_of
from raycl.training.setup.run_config import RunConfig
from raycl.training.setup.snapshot_start import (
    MAY_DIFFER,
    OF_TASK,
    changes_beside_tasks,
    keep_for_others,
    name_of,
    recall_lengths,
)
from raycl.types import Phase


@dataclass(frozen=True)
class Prepared:
    """A validated run with its folder, ready to start or to continue.

    Attributes:
        replaces: fingerprint of the config that the folder's claims had when this one was compared with it.
    """

    config: RunConfig
    stream: Stream
    storage: Storage
    name: str
    singles: dict[str, float] | None
    replaces: str = ""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that are trained one after another."""
        return run_config.phases(self.config, self.stream)

    @property
    def info(self) -> RunInfo:
        return run_config.info_of(self.config, self.singles, self.replaces)

    @property
    def done(self) -> int:
        """Phases that are trained and evaluated."""
        return len(read_state(self.storage).phases)


def prepare(config: RunConfig) -> Prepared:
    """Validate a new run and give it a folder. The first worker's claim decides which run owns it.

    Raises:
        RayclError: bad input, or the folder holds a run already.
    """
    name = run_config.name_of(config)
    if name is not None:
        storage = run_config.directory(config).sub(name)
        if storage.exists(CONFIG) and last_attempt(storage):  # a run that never started holds nothing to lose
            if config.output.exists == "resume":
                return reopen(storage.address, config)
            raise RunError(
                f"'{storage.uri}' holds a run already: continue with {resume_line(storage, config)}, or choose another "
                "output.name"
            )
    stream, singles = checks.check_new_run(config)
    config = config.model_copy(update={"stream": stream.config})
    text = configs.to_yaml(config).encode()
    if name is None:
        storage, name = _new_folder(config, text)
    else:
        storage.write(CONFIG, text)
    return Prepared(config, stream, storage, name, singles)


def _new_folder(config: RunConfig, text: bytes) -> tuple[Storage, str]:
    """Create a new folder with the config; two runs that start at once get one each."""
    root = run_config.directory(config)
    for name in run_config.free_names(config):
        try:
            root.sub(name).create(CONFIG, text)
        except AlreadyExistsError:
            continue
        return root.sub(name), name
    raise AssertionError("there is always a free name")


def reopen(folder: str, wanted: RunConfig | None = None, overrides: tuple[str, ...] = ()) -> Prepared:
    """Go on with the run in `folder`.

    Args:
        wanted: the config that the caller has; None: the run's own, with `overrides`.

    Raises:
        ResumeError: there is no run, or a setting, data or a model that changes what is learned differs.
        ConfigError: the run requests what `overrides` do not allow (`raycl.config.trust`).
    """
    storage, old, state = run_in(folder)
    new = wanted or _allowed(_config_of(storage, state, overrides), overrides, storage)
    before, after = configs.as_tree(old), configs.as_tree(new)
    recall_lengths(before["stream"], after["stream"])
    _refuse(folder, configs.differences(before, after, without=EXEMPT))
    return _continued(configs.validate(RunConfig, after), storage, state)


def extend(folder: str, added: Sequence[str], overrides: tuple[str, ...] = ()) -> Prepared:
    """Go on with the run in `folder`, finished or not, with more tasks at the end of its stream.

    Args:
        added: see `with_tasks`.
        overrides: settings; those of `OF_TASK` are the added tasks' own.

    Raises:
        ResumeError: there is no run, its method takes no more tasks, or another setting differs.
        ConfigError, DataError: the tasks are not there.
    """
    storage, old, state = run_in(folder)
    learned = [str(record["times"]["phase"]) for record in state.phases]
    new = with_tasks(_allowed(_config_of(storage, state, overrides), overrides, storage), added, learned)
    fresh = [task if isinstance(task, str) else task.name for task in (new.stream.tasks or ())[-len(added) :]]
    before, after = configs.as_tree(old), configs.as_tree(new)
    for section in OF_TASK:
        keep_for_others(section, before[section], after[section], fresh)
    new = configs.validate(RunConfig, after)
    changed = changes_beside_tasks(before, configs.as_tree(new), fresh)
    bank = open_bank(old.bank, storage).storage.address
    _refuse(folder, changed, _start_with(f"{bank}@{old.bank.branch}", changed))
    continued = _continued(new, storage, state)
    checks.warn_of_mistakes(continued.stream, len(added))
    return continued


def with_tasks(config: RunConfig, added: Sequence[str], learned: Collection[str] = ()) -> RunConfig:
    """Return the config with tasks at the end of its stream.

    A task that is added is learned as if it had been there from the start: order, draws and seeds of a phase depend on
    its place and its own name alone, so the matrix is the one of a run that knew all tasks (a property test). The
    exception is a modifier that leaves the first task unmasked (`skip_first_task`): the only task of a run was masked.

    Args:
        added: names below the stream's root, or tasks of your own, by path or YAML (`{name: mail, path: data/mail}`).
        learned: tasks that the run has learned. Others that are in its stream already, because an earlier attempt to
            add them has failed, may be added again as they are.

    Raises:
        ConfigError: no such task, or it is no YAML. ResumeError: the method cannot take more tasks.
    """
    checks.check_takes_more_tasks(config)
    tree = configs.as_tree(config)
    given = tree["stream"]["tasks"]
    known = given if given is not None else [task.name for task in open_stream(config.stream, config.seed).tasks]
    new = list(map(task_of, added))
    names = list(map(name_of, new))
    if list(map(name_of, known[-len(new) :])) == names and not set(names) & set(learned):
        tree["stream"]["tasks"] = [*known[: -len(new)], *new]
        if configs.validate(RunConfig, tree) == config:
            return config
    tree["stream"]["tasks"] = [*known, *new]
    return configs.validate(RunConfig, tree)


def task_of(text: str) -> Any:
    """Return a task as it was written on the command line.

    Raises:
        ConfigError: it is neither a name, nor a path, nor YAML.
    """
    try:
        return as_spec(yaml.safe_load(text))
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"'{text}' is neither a task's name nor YAML such as '{{name: tickets, path: data/tickets}}': {reason}"
        ) from error


def _continued(config: RunConfig, storage: Storage, state: RunState) -> Prepared:
    """Return the run with a config that may follow that of `state`; the next claim records it."""
    stream = checks.check(config)
    config = config.model_copy(update={"stream": stream.config})
    singles = checks.read_singles(config)
    check_inputs(storage, state, inputs_of(config, stream))
    return Prepared(config, stream, storage, storage.root.rsplit("/", 1)[-1], singles, state.fingerprint)


def run_in(folder: str) -> tuple[Storage, RunConfig, RunState]:
    """Return the folder, config and state of a run (`ResumeError`: there is none); its data is not looked at."""
    storage = run_at(folder)
    state = read_state(storage)
    config = _config_of(storage, state)
    announce(configs.as_tree(config), storage.address)
    return storage, config, state


def _refuse(folder: str, changed: dict[str, tuple[Any, Any]], mend: str = "start a new run instead") -> None:
    if changed:
        listed = "; ".join(f"{key} was {before!r}, now {after!r}" for key, (before, after) in changed.items())
        raise ResumeError(f"'{folder}' cannot continue with a changed config: {listed}; {mend}")


def _start_with(bank: str, changed: Collection[str]) -> str:
    """Return the run that takes these settings for added tasks."""
    if all(key.startswith(MAY_DIFFER) for key in changed):
        return f"a new run that starts from its bank takes them: raycl train bank.start={bank} 'stream.tasks=[TASK]'"
    return "start a new run instead"


def _allowed(config: RunConfig, overrides: tuple[str, ...], storage: Storage) -> RunConfig:
    """Return the config, if these overrides allow what it requests (`raycl.config.trust`)."""
    trust.require(trust.requested(configs.as_tree(config)), overrides, f"the run '{storage.uri}'")
    return config


def resume_line(storage: Storage, config: RunConfig) -> str:
    """Return arguments of the job that resume a run."""
    return resume_arguments(storage, configs.as_tree(config))


def _config_of(storage: Storage, state: RunState, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Return the config that the run's claims recorded; before the first, and of older versions, its file."""
    tree: dict[str, Any] = copy.deepcopy(state.config) or configs.from_yaml(
        storage.read_text(CONFIG), f"{storage.uri}/{CONFIG}"
    )
    for override in overrides:
        configs.apply_override(tree, override)
    return configs.validate(RunConfig, tree)


def finish(prepared: Prepared) -> dict[str, Any]:
    """Return results from the journal, written to `results.json`.

    Raises:
        ResumeError: the journal belongs to another run.
    """
    state = read_state(prepared.storage)
    check_owner(prepared.storage, state, prepared.info)
    results = build_results(prepared.info, prepared.stream, prepared.phases, state)
    prepared.storage.write_json("results.json", hashed(results))
    return results
