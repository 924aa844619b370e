"""The texts that routers read: inputs alone, or inputs in their tasks' prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.data.sources.cache import RowIndices
from raycl.data.sources.conversation import messages_of, plain_text
from raycl.data.stream import Stream
from raycl.data.tokens import TokenTable
from raycl.types import RouterText, Task, TextCodec


@dataclass(frozen=True)
class RouterTexts:
    """The texts or ids that a method's router reads of the rows of a stream.

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
        whole = self.text == "prompt" and not self.by_backbone
        return self.stream.prompt(task, self.codec).written(text) if whole else text

    def input_ids(self, task: Task, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of inputs without prompts, at least one each; of conversations all contents."""
        plain = [plain_text(messages_of(text)) for text in texts] if self.stream.is_chat(task) else texts
        limit = min(self.stream.token_limits[0], self.codec.max_source_tokens)
        return [ids or [self.codec.pad_id] for ids in fit_sources(plain, Prompt(), self.codec, limit)[0]]

    def ids(self, table: TokenTable, rows: RowIndices) -> list[list[int]]:
        """Return the ids of rows for a router that reads them by the backbone."""
        if self.reads_input_ids:
            return self.input_ids(table.task, table.texts(rows))
        return [ids.tolist() for ids in table.columns(rows).source_ids]
