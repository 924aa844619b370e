"""A snapshot of a bank that answers texts in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Literal

from raycl import config as configs
from raycl.data.sources.conversation import conversation_of, text_of
from raycl.data.sources.fields import half_character
from raycl.errors import ConfigError, DataError, RunError
from raycl.serve.offline.model import OfflineModel, Prediction, settings_here
from raycl.serve.settings import ServeConfig
from raycl.training.records.named_bank import snapshot_at

Text = str | Sequence[Mapping[str, str]]
"""A text, or a conversation as messages with role and content."""


class Model:
    """A snapshot that answers texts in this process as an endpoint over it would; `raycl.load` opens it.

    Attributes:
        bank: Address of the bank.
        snapshot: Number of the snapshot.
        tasks: Names of the learned tasks.
        answers: `label` or `text`.

    Examples:
        >>> model = raycl.load("runs/first/bank")
        >>> model
        Model('...runs/first/bank@1', tasks=['orders'], answers='label')
    """

    bank: str
    snapshot: int
    tasks: tuple[str, ...]
    answers: Literal["label", "text"]

    def __init__(self, bank: str | PathLike[str], **settings: Any) -> None:
        if not isinstance(bank, str | PathLike):
            raise ConfigError(f"the bank is {bank!r}: expected its folder or URI, for example run.bank")
        opened, snapshot = snapshot_at(fspath(bank))
        config = configs.validate(ServeConfig, {**settings_here(opened), **with_texts(settings)})
        self._model: OfflineModel | None = OfflineModel.open(opened, snapshot, config)
        self.bank, self.snapshot = opened.storage.address, snapshot.number
        self.tasks = tuple(task.name for task in snapshot.tasks)
        self.answers = "label" if self._model.answers == "label" else "text"

    def predict(
        self, texts: Text | Sequence[Text], task: str | None = None, max_tokens: int | None = None
    ) -> list[Prediction]:
        """Return the answer to each text or conversation, with the weights of the tasks that gave it.

        Args:
            texts: One or several; a conversation is a list of messages, `{"role": "user", "content": ...}`.
            task: Task of all texts, where it is known.
            max_tokens: Most tokens of generated answers; None: as in training.

        Raises:
            BankError: There is no such task.
            RayclError: A text cannot be answered.

        Examples:
            >>> (prediction,) = model.predict("a cup of tea")
            >>> prediction.text in prediction.scores, list(prediction.tasks)
            (True, ['orders'])
        """
        return list(self._opened().predict(_several(texts), task, max_tokens))

    def generate(self, texts: Text | Sequence[Text], **settings: Any) -> list[str]:
        """Return the answers of `predict` without weights.

        Args:
            texts: One or several texts or conversations.
            settings: `task` and `max_tokens` of `predict`.

        Examples:
            >>> drink, food = model.generate(["a cup of tea", "a loaf of bread"])
        """
        return [prediction.text for prediction in self.predict(texts, **settings)]

    def route(self, texts: Text | Sequence[Text]) -> list[dict[str, float]]:
        """Return task -> weight for each text, the largest first; nothing is answered.

        Args:
            texts: One or several texts or conversations.

        Examples:
            >>> [list(weights) for weights in model.route(["a cup of tea", "a loaf of bread"])]
            [['orders'], ['orders']]
        """
        return self._opened().route(_several(texts))

    def stream(self, texts: Iterable[Text], **settings: Any) -> Iterable[Prediction]:
        """Yield the results of `predict` for more texts than fit into memory: texts are read as answers are taken.

        Args:
            texts: Texts or conversations.
            settings: `task` and `max_tokens` of `predict`.

        Examples:
            >>> lines = (f"{number} cups of tea" for number in range(1000))
            >>> len([prediction.text for prediction in model.stream(lines)])
            1000
        """
        return self._opened().predict(self._read_all(texts), **settings)

    def close(self) -> None:
        """Free the model's memory and thread; `with raycl.load(BANK) as model` does it at its end.

        Examples:
            >>> model.close()
            >>> model
            Model('...bank@1', tasks=['orders'], answers='label', closed)
        """
        if self._model is not None:
            self._model.close()
        self._model = None

    def _read_all(self, texts: Iterable[Text]) -> Iterator[Any]:
        for number, text in enumerate(texts, 1):
            self._opened()  # it may have been closed since the first text
            yield _read(text, number)

    def _opened(self) -> OfflineModel:
        if self._model is None:
            raise RunError(f"this model is closed: load it again with raycl.load('{self.bank}@{self.snapshot}')")
        return self._model

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self._model is None else ""
        return f"Model('{self.bank}@{self.snapshot}', tasks={list(self.tasks)}, answers='{self.answers}'{closed})"


def _several(texts: Text | Sequence[Text]) -> list[Any]:
    """Return one text or conversation, or several of them, in the engine's form."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        return [_read(texts, 1)]
    given = list(texts)
    alone = bool(given) and isinstance(given[0], Mapping)
    return [_read(text, number) for number, text in enumerate([given] if alone else given, 1)]


def _read(text: Any, number: int) -> Any:
    if isinstance(text, list | tuple) and text and all(isinstance(message, Mapping) for message in text):
        messages = conversation_of(text, f"conversation {number}")
        _refuse_half_characters(text_of(messages), number)
        return messages
    if not isinstance(text, str):
        raise DataError(
            f"text {number} is {text!r}: expected a string, or a conversation as a list of messages with role and "
            "content"
        )
    if not text.strip():
        raise DataError(f"text {number} is empty: expected at least one word")
    _refuse_half_characters(text, number)
    return text


def _refuse_half_characters(text: str, number: int) -> None:
    if problem := half_character(text):
        raise DataError(f"text {number}: {problem}")


def load(bank: str | PathLike[str], **settings: Any) -> Model:
    """Return a snapshot of a bank as a model.

    Args:
        bank: Folder or URI of a bank, or BANK@REF: a branch, a snapshot's number or hash; default: branch `main`.
        settings: Settings of serving: device, dtype, threads, max_batch, backbone (where it is now), max_loaded_rows.

    Raises:
        BankError: There is no such bank or snapshot, or it is damaged.
        BackboneError: The backbone is another one, or cannot be loaded.
        ConfigError: There is no such setting.

    Examples:
        >>> model = raycl.load("runs/first/bank@main")
        >>> model.tasks, model.answers
        (('orders',), 'label')
    """
    return Model(bank, **settings)


def with_texts(value: Any) -> Any:
    """Return settings of a Python program with the text of each path, as config files and records have it."""
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {key: with_texts(item) for key, item in value.items()}
    return list(map(with_texts, value)) if isinstance(value, list | tuple) else value
