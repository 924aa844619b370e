"""The texts that routers read: inputs alone, or inputs in their tasks' prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from raycl.data.prepare import fit_sources
from raycl.data.prompts import Prompt
from raycl.data.sources.cache import RowIndices
from raycl.data.sources.conversation import has_tool_turns, messages_of, plain_text, without_tool_turns
from raycl.data.stream import Stream
from raycl.data.tokens import TokenTable
from raycl.types import RouterText, Task, TextCodec


@dataclass(frozen=True)
class RouterTexts:
    """The texts or ids that a method's router reads of the rows of a stream: without tools, calls of them and results.

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
        text = without_tool_turns(text) if self.stream.is_chat(task) else text
        whole = self.text == "prompt" and not self.by_backbone
        return self.stream.prompt(task, self.codec).written(text) if whole else text

    def input_ids(self, task: Task, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of inputs without prompts, at least one each; of conversations all contents."""
        is_chat = self.stream.is_chat(task)
        plain = [plain_text(messages_of(without_tool_turns(text))) for text in texts] if is_chat else texts
        limit = min(self.stream.token_limits[0], self.codec.max_source_tokens)
        return [ids or [self.codec.pad_id] for ids in fit_sources(plain, Prompt(), self.codec, limit)[0]]

    def ids(self, table: TokenTable, rows: RowIndices) -> list[list[int]]:
        """Return the ids of rows for a router that reads them by the backbone."""
        if self.reads_input_ids:
            return self.input_ids(table.task, table.texts(rows))
        ids = [row_ids.tolist() for row_ids in table.columns(rows).source_ids]
        texts = table.texts(rows) if self.stream.is_chat(table.task) else []
        used = [row for row, text in enumerate(texts) if has_tool_turns(text)]
        if used:
            prompt, limits = self.stream.prompt(table.task, self.codec), self.stream.limits(table.task, self.codec)
            plain = fit_sources([without_tool_turns(texts[row]) for row in used], prompt, self.codec, limits.source)[0]
            for row, row_ids in zip(used, plain, strict=True):
                ids[row] = row_ids
        return ids
