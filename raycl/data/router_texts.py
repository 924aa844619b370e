"""The texts that routers read: inputs alone, or inputs in their tasks' prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.data.sources.cache import RowIndices
from raycl.data.sources.conversation import messages_of, plain_text, routed_turns
from raycl.data.stream import Stream
from raycl.data.tokens import TokenTable
from raycl.types import RouterText, Task, TextCodec


@dataclass(frozen=True)
class RouterTexts:
    """The texts or ids that a method's router reads of the rows of a stream, see `routed_turns`.

    Attributes:
        text: the setting; None: the method has no router that reads texts.
        by_backbone: it reads ids by the backbone; else texts by a sentence encoder.
    """

    stream: Stream
    codec: TextCodec
    text: RouterText | None = None
    by_backbone: bool = True

    @property
    def reads_input_ids(self) -> bool:
        """Return whether it reads ids of inputs, which batches have beside those of prompts."""
        return self.text == "input" and self.by_backbone

    def words(self, task: Task, text: str) -> str:
        """Return an input of a task for a sentence encoder."""
        text = self.routed(task, text)
        whole = self.text == "prompt" and not self.by_backbone
        return self.stream.prompt(task, self.codec).written(text) if whole else text

    def input_ids(self, task: Task, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of inputs without prompts, at least one each; of conversations all contents."""
        is_chat = self.stream.is_chat(task)
        plain = [plain_text(messages_of(self.routed(task, text))) for text in texts] if is_chat else texts
        limit = min(self.stream.token_limits[0], self.codec.max_source_tokens)
        return [ids or [self.codec.pad_id] for ids in fit_sources(plain, Prompt(), self.codec, limit)[0]]

    def ids(self, table: TokenTable, rows: RowIndices) -> list[list[int]]:
        """Return the ids of rows for a router that reads them by the backbone."""
        if self.reads_input_ids:
            return self.input_ids(table.task, table.texts(rows))
        ids = [row_ids.tolist() for row_ids in table.columns(rows).source_ids]
        texts = table.texts(rows) if self.stream.is_chat(table.task) else []
        for row, row_ids in self.shorter_ids(table.task, texts).items():
            ids[row] = row_ids
        return ids

    def reads_own_ids(self, task: Task) -> bool:
        """Return whether what it reads by the backbone of a task's rows may differ from their prompts."""
        return self.reads_input_ids or (self.text == "prompt" and self.by_backbone and self.stream.is_chat(task))

    def row_ids(self, rows: Sequence[tuple[Task, str]], prompts: Sequence[NDArray[np.int32]]) -> list[list[int]] | None:
        """Return the ids that it reads of rows of several tasks by the backbone; None: their prompts."""
        if self.reads_input_ids:
            return [self.input_ids(task, [text])[0] for task, text in rows]
        shorter = [self.shorter_ids(task, [text]).get(0) if self.reads_own_ids(task) else None for task, text in rows]
        if not any(shorter):
            return None
        return [ids or prompt.tolist() for ids, prompt in zip(shorter, prompts, strict=False)]

    def shorter_ids(self, task: Task, texts: Sequence[str]) -> dict[int, list[int]]:
        """Return index -> prompt ids of those inputs of which routers do not read all messages."""
        routed = {index: self.routed(task, text) for index, text in enumerate(texts)}
        shorter = {index: text for index, text in routed.items() if text != texts[index]}
        if not shorter:
            return {}
        prompt, limit = self.stream.prompt(task, self.codec), self.stream.limits(task, self.codec).source
        return dict(zip(shorter, fit_sources(list(shorter.values()), prompt, self.codec, limit)[0], strict=True))

    def routed(self, task: Task, text: str) -> str:
        """Return an input without what no router reads: of a conversation tools, and more turns than were learned."""
        return routed_turns(text, self.stream.user_turns(task)) if self.stream.is_chat(task) else text
