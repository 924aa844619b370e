"""A snapshot of a bank that answers texts in this process.

What it does not know: how anything was learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from raycl import config as configs
from raycl.data.sources.chats import conversation_of
from raycl.run.banks import snapshot_at
from raycl.serve.offline import OfflineModel, Prediction, settings_here
from raycl.serve.settings import ServeConfig

Text = str | Sequence[Mapping[str, str]]
"""A text, or a conversation as messages with role and content."""


class Model:
    """Answers as an endpoint over the same snapshot would.

    Attributes:
        bank: address of the bank. snapshot: number of the snapshot.
        tasks: names of the learned tasks.
        answers: `label` or `text`.
    """

    def __init__(self, bank: str, **settings: Any) -> None:
        """See `load`."""
        opened, snapshot = snapshot_at(bank)
        config = configs.validate(ServeConfig, {**settings_here(opened), **settings})
        self._model = OfflineModel(opened, snapshot, config)
        self.bank, self.snapshot = opened.storage.address, snapshot.number
        self.tasks = tuple(task.name for task in snapshot.tasks)
        self.answers: Literal["label", "text"] = "label" if self._model.answers == "label" else "text"

    def predict(
        self, texts: Text | Sequence[Text], task: str | None = None, max_tokens: int | None = None
    ) -> list[Prediction]:
        """The answer to each text or conversation, with the weights of the tasks that gave it.

        Args:
            texts: one or several; a conversation is a list of messages, `{"role": "user", "content": ...}`.
            task: of all texts, where it is known. max_tokens: of generated answers; None: as in training.

        Raises:
            ConfigError: no such task. RayclError: a text cannot be answered.
        """
        return list(self._model.predict(_several(texts), task, max_tokens))

    def generate(self, texts: Text | Sequence[Text], **settings: Any) -> list[str]:
        """As `predict`, the answers alone."""
        return [prediction.text for prediction in self.predict(texts, **settings)]

    def route(self, texts: Text | Sequence[Text]) -> list[dict[str, float]]:
        """Task -> weight for each text, the largest first; nothing is answered."""
        return self._model.route(_several(texts))

    def stream(self, texts: Iterable[Text], **settings: Any) -> Iterable[Prediction]:
        """As `predict`, for more texts than fit into memory: they are read as answers are taken."""
        return self._model.predict(map(_read, texts), **settings)

    def close(self) -> None:
        """Free its memory and its thread."""
        self._model.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model('{self.bank}@{self.snapshot}', tasks={list(self.tasks)})"


def _several(texts: Text | Sequence[Text]) -> list[Any]:
    """One text or conversation, or several of them, as the engine reads them."""
    alone = isinstance(texts, str) or (bool(texts) and isinstance(texts[0], Mapping))
    return [_read(text) for text in ([texts] if alone else texts)]  # type: ignore[arg-type]


def _read(text: Text) -> Any:
    return text if isinstance(text, str) else conversation_of(text)


def load(bank: str, **settings: Any) -> Model:
    """A snapshot of a bank as a model.

    Args:
        bank: folder or URI of a bank, or BANK@REFERENCE: a branch, a snapshot's number or hash; default: branch `main`.
        settings: of serving: device, dtype, threads, max_batch, backbone (where it is now), max_loaded_rows.

    Raises:
        BankError: no such bank or snapshot, or it is damaged. BackboneError: the backbone is another one, or cannot be
            loaded. ConfigError: no such setting.
    """
    return Model(bank, **settings)
