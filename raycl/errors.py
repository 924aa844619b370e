"""Every error a user can meet, as one tree.

    RayclError
    ├── ConfigError        an unknown key, a wrong value, settings that contradict each other
    │   └── PluginError         what another package adds cannot be used, or is not installed here
    ├── DataError          a file, a row or a label that cannot be used (names file and row)
    │   └── MissingTasksError   tasks of a named benchmark that are not on disk, all listed at once
    ├── BackboneError      a model or tokenizer that cannot be loaded or does not fit the task
    │   └── ConversationError   a conversation that the chat template cannot render
    ├── AdapterError       an adapter that does not fit the model, or a mixture that cannot be activated
    ├── RetrievalError     an encoder, keys or a query that cannot choose adapters
    ├── StorageError       a path or URI that cannot be read or written
    │   ├── AlreadyExistsError  exclusive creation failed: the file exists already
    │   ├── UnreachableError    a store that does not answer now, and may later
    │   ├── DamagedError        a record that was cut or changed after it was written
    │   └── FormatError         a record of a format that this version does not read
    ├── BankError          an adapter, snapshot or branch that is absent, damaged or not allowed
    │   └── BranchMovedError    a branch whose head is no ancestor of the snapshot that it should move to
    ├── LaunchError        the cluster cannot provide the resources of the run
    ├── WrongResultError   a benchmark's contender computed something else than its reference
    └── RunError           a run that cannot start, continue or be trusted
        ├── CheckpointError     a checkpoint that is damaged or incomplete; an older one may be whole
        ├── ResumeError         the run directory and the config do not belong together
        ├── DivergedError       a loss or a gradient that is not finite
        ├── StoppedError        a run that was stopped from outside and can be resumed as it is
        │   └── InterruptedRunError     the same, by Ctrl-C
        └── StaleAttemptError   a newer attempt owns the run; this one must stop

Each message states in one sentence: what was wrong, the value, what was expected, what to do.
Internal invariants are `assert` with a message, not these classes.
"""

import difflib
import re
from collections import abc


class RayclError(Exception):
    """Base of all errors meant for users; jobs print its text and exit with its status.

    Attributes:
        exit_status: 1, or 75 (EX_TEMPFAIL) where the same command, typed again, may continue; 130 after Ctrl-C.
    """

    exit_status = 1


class ConfigError(RayclError):
    """A configuration key or value is wrong; the message names its dotted path."""


class PluginError(ConfigError):
    """A method, router or the like of another package cannot be used here; the message names the package."""


class DataError(RayclError):
    """Input data cannot be used; the message names the file and, where there is one, the row."""


class MissingTasksError(DataError):
    """Tasks of a stream are missing on disk; the message lists all of them."""


class BackboneError(RayclError):
    """A backbone cannot be loaded, or does not support the task."""


class ConversationError(BackboneError):
    """A chat template cannot render a conversation or an answer to it.

    Attributes:
        index: position of the conversation among those that were given.
    """

    def __init__(self, problem: str, index: int = 0) -> None:
        super().__init__(problem, index)
        self.problem = problem
        self.index = index

    def __str__(self) -> str:
        return self.problem


class AdapterError(RayclError):
    """An adapter does not fit the model it is meant for, or a mixture names adapters that are not loaded."""


class RetrievalError(RayclError):
    """Keys, encoder or query cannot choose adapters: sizes that do not fit, values that are not finite."""


class StorageError(RayclError):
    """A path or URI cannot be reached, read or written."""


class AlreadyExistsError(StorageError):
    """Exclusive creation failed because the file exists: another writer was first."""


class UnreachableError(StorageError):
    """A store does not answer, after all tries; nothing is known to be wrong with what it holds."""

    exit_status = 75


class DamagedError(StorageError):
    """A record was cut or changed after it was written: its hash does not hold."""


class FormatError(StorageError):
    """A record has a format that this version does not read."""


class BankError(RayclError):
    """Content of the bank is absent or damaged, or the operation would put it at risk."""


class BranchMovedError(BankError):
    """A branch cannot move to a snapshot: another writer moved it elsewhere. The snapshot itself is stored."""


class LaunchError(RayclError):
    """The cluster cannot provide the resources that the run requests."""


class WrongResultError(RayclError):
    """A contender of a benchmark gave another result than the reference, so its time means nothing."""


class RunError(RayclError):
    """A run cannot start or continue."""


class CheckpointError(RunError):
    """A checkpoint is damaged or incomplete; an older one may be whole."""


class ResumeError(RunError):
    """A run directory cannot be continued with this config; the message names the keys that differ."""


class DivergedError(RunError):
    """A loss or a gradient is not finite."""


class StoppedError(RunError):
    """A run was stopped from outside (SIGTERM, a store that is away); the message gives the command that resumes it."""

    exit_status = 75


class InterruptedRunError(StoppedError):
    """A run was stopped by Ctrl-C; the message gives the command that resumes it."""

    exit_status = 130


class StaleAttemptError(RunError):
    """A newer attempt has claimed the run, so this one must not write any more."""


FEW = 12
"""A message lists up to this many names; of more, the three nearest."""


def meant(value: str, known: abc.Iterable[str]) -> str:
    """Return `did you mean 'lora'?` for messages about an unknown name, or else the expected names."""
    names = list(known)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    if len(names) <= FEW:
        return f"expected one of {', '.join(names)}"
    nearest = difflib.get_close_matches(value, names, n=3, cutoff=0.0)
    return f"expected one of {len(names)}, of which {', '.join(nearest)} are the nearest"


def counted(number: float, noun: str) -> str:
    """Return `1 file of tensors` or `1,000 files of tensors`; the plural adds an s to the first word."""
    first, *rest = noun.split(" ")
    return " ".join([f"{number:,g}" if number % 1 else f"{number:,.0f}", first if number == 1 else f"{first}s", *rest])


def some(names: list[str], most: int) -> str:
    """Return the first names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_UNPRINTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line feeds, separators of lines, changes of direction, halves of characters."""


def printable(text: str) -> str:
    """Return a text for a terminal: what would move its cursor, change its title or turn the line around is written as
    JSON writes it, `\\u001b`, since names and texts may come from a stranger."""
    return _UNPRINTED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
