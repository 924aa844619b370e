"""A model of ours as a model of EleutherAI's lm-eval: log-likelihoods and greedy answers, each under its own mixture.

A text is read as it is, without a prompt of the stream's tasks, as `/v1/completions` reads prompts. The router sees the
context of a request, never the answer that is scored, but for whole texts without a context; of a conversation it sees
the last message of the user. What stands beside a request in its batch changes neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from raycl.backbone.markup.chat_templates import turns
from raycl.data.loader import batch_of, padded
from raycl.errors import ConfigError
from raycl.generation.answer_batch import AnswerBatch, Prompts
from raycl.generation.batch_answers import answers_continuously, predict
from raycl.scoring.general_ability import RoutedModel
from raycl.types import IGNORE, Batch, Mixture

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Scored = tuple[float, bool]
"""The log-likelihood of a continuation in nats, and whether it is the model's greedy answer."""

NEW_TOKENS = 256
"""The most tokens of an answer where a task names no limit: the default of lm-eval's own models."""

LONGEST = 2048
"""Tokens of a text where the model has no limit of its own: likewise."""


class HarnessModel(TemplateLM):
    """The adapter: what lm-eval asks is answered by a `RoutedModel`.

    All workers make the same calls with the same requests, and all get all results.

    Attributes:
        unknown: task and number of a row -> whether its text counts as one of no learned task; rows whose router
            cannot tell are left out.
    """

    def __init__(self, model: RoutedModel) -> None:
        super().__init__()
        self.unknown: dict[tuple[str, int], bool] = {}
        self._model, self._backbone = model, model.backbone
        self._codec = model.backbone.codec
        self.tokenizer = self._codec.tokenizer
        self.backend = "seq2seq" if model.backbone.capabilities.separate_encoder else "causal"
        positions = model.backbone.max_positions
        self._room: int = LONGEST if positions is None else positions - model.reserved
        self._messages: dict[str, str] = {}

    # ---- texts and tokens ------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self._codec.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id in front of a text that has no context: its beginning, or else the end of the one before."""
        first = self._codec.tokenizer.bos_token_id
        return self._codec.eos_id if first is None else int(first)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: object) -> list[int]:
        """Return the ids of a text as the codec reads prompts.

        Args:
            add_special_tokens: false: a part of a text, which has none of the tokens around a text.
        """
        if self._messages:  # the chat template has written the special tokens
            return list(self._codec.tokenizer.encode(string, add_special_tokens=False))
        if add_special_tokens is False:
            return self._codec.encode_target([string])[0][:-1]
        return self._codec.encode_source([string])[0]

    @property
    def tokenizer_name(self) -> str:
        """The hash of the tokenizer, by which lm-eval would keep requests."""
        return self._codec.fingerprint

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return messages as the model's chat template writes them, up to where the assistant answers."""
        begun = "" if add_generation_prompt else chat_history[-1]["content"]  # of the answer
        messages = chat_history if add_generation_prompt else chat_history[:-1]
        conversation = [(message["role"], message["content"]) for message in messages]
        around, _ = next(turns(self._codec.chat_template, self.tokenizer.special_tokens_map, [conversation]))
        text = f"{around.prompt}{begun}"
        self._messages[text] = next((said for role, said in reversed(conversation) if role == "user"), text)
        return text

    # ---- what lm-eval asks -----------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Scored]:
        """Return the log-likelihood of each continuation behind its context."""
        self._requests = requests
        found: list[Scored] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each whole text, which is read in windows where it is too long."""
        self._requests = [request for request in requests for _ in self._windows(request.args[0])]
        windows = [((request.args[0], ""), *pair) for request in requests for pair in self._windows(request.args[0])]
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in self._windows(request.args[0])) for request in requests]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        ids = self.tok_encode(text, add_special_tokens=False)
        pairs = get_rolling_token_windows(ids, self.prefix_token_id, self._room - 1, 1)
        return [make_disjoint_window(pair) for pair in pairs]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **unused: object
    ) -> list[Scored]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        texts = [context or continuation for (context, continuation), _, _ in requests]
        # requests that differ in their last token alone, such as labels, are read once
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            alike.setdefault((texts[number], tuple(context), tuple(continuation[:-1])), []).append(number)
        groups = list(alike.values())
        found: dict[int, Scored] = {}
        backbone = self._backbone.eval()
        with backbone.inference():
            for chosen in self._shares([sum(map(len, pairs[first])) for first, *_ in groups]):
                firsts = [groups[index][0] for index in chosen]
                batch = batch_of([pairs[number][0] for number in firsts], self._codec.pad_id)
                targets = padded([pairs[number][1] for number in firsts], IGNORE)
                batch = replace(batch, target_ids=targets).to(backbone.device)
                mixture = self._routed(batch, [texts[number] for number in firsts], firsts)
                with self._model.activate(mixture):
                    guesses = backbone.guesses(batch)
                is_real_M = guesses.labels != IGNORE
                logits_MV, rows_M = guesses.logits[is_real_M].float(), guesses.rows[is_real_M]
                for row, index in enumerate(chosen):
                    logprobs_TV = logits_MV[rows_M == row].log_softmax(-1)
                    found |= {number: _score(logprobs_TV, pairs[number][1]) for number in groups[index]}
        return self._gathered(found)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the most likely answer to each prompt, up to the first of the texts that end it.

        Raises:
            ConfigError: a task draws its answers, or they have no room beside their prompts.
        """
        self._requests = requests
        answers: dict[int, str] = {}
        settings = [_generation(request) for request in requests]
        self._check_room(requests, settings)
        prompts = [self._prompt(request.args[0], most) for request, (_, most) in zip(requests, settings, strict=True)]
        backbone = self._backbone.eval()
        with backbone.inference():
            if answers_continuously(backbone):
                decoder = AnswerBatch(backbone, self._model.activate, self._model.batch_size)
                shares = self._shares(list(map(len, prompts)), settings, decoder.read_rows)
                read = (self._read(numbers, requests, prompts, settings) for numbers in shares)
                for answer in decoder.answers(read):
                    answers[answer.row] = self._text(answer.ids)
            else:
                for numbers in self._shares(list(map(len, prompts)), settings):
                    given = self._read(numbers, requests, prompts, settings)
                    with self._model.activate(given.mixture):
                        answers |= zip(numbers, predict(backbone, given.batch, given.max_tokens), strict=True)
        return [_before(answer, stops) for answer, (stops, _) in zip(self._gathered(answers), settings, strict=True)]

    def _read(
        self,
        numbers: Sequence[int],
        requests: Sequence[Instance],
        prompts: Sequence[list[int]],
        settings: Sequence[tuple[tuple[str, ...], int]],
    ) -> Prompts:
        """Return some prompts with one mixture each; all have the same settings."""
        batch = batch_of([prompts[number] for number in numbers], self._codec.pad_id)
        batch = replace(batch, rows=torch.tensor(numbers)).to(self._backbone.device)
        mixture = self._routed(batch, [requests[number].args[0] for number in numbers], numbers)
        stops, most = settings[numbers[0]]
        return Prompts("", batch, most, mixture, stop=stops)

    # ---- requests on workers ---------------------------------------------------------------------------------

    def _shares(
        self, lengths: Sequence[int], kinds: Sequence[object] | None = None, size: int | None = None
    ) -> Iterator[list[int]]:
        """Yield this worker's batches of requests, the longest first; all workers get equally many.

        Args:
            kinds: only requests of one kind share a batch.
        """
        size, (rank, workers) = size or self._model.batch_size, self._model.share
        groups: dict[object, list[int]] = {}
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            groups.setdefault(kinds[number] if kinds else None, []).append(number)
        batches = [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]
        batches += batches[-1:] * (-len(batches) % workers)
        yield from batches[rank::workers]

    def _gathered(self, found: Mapping[int, Any]) -> list[Any]:
        """Return the results of all workers in the order of the requests."""
        unknown: dict[tuple[str, int], bool] = {}
        results: dict[int, Any] = {}
        for known, share in self._model.gather((self.unknown, found)):
            unknown |= known
            results |= share
        self.unknown = unknown
        return [results[number] for number in range(len(results))]

    def _routed(self, batch: Batch, texts: Sequence[str], numbers: Sequence[int]) -> Mixture | None:
        """Return the mixture of texts that are of no known task, and note which of them count as unknown."""
        seen = tuple(self._messages.get(text, text) for text in texts)
        mixture = self._model.route(replace(batch, texts=seen, tasks=("",) * len(texts)))
        if mixture is not None and mixture.unknown is not None:
            for number, unknown in zip(numbers, mixture.unknown.tolist(), strict=True):
                request = self._requests[number]
                self.unknown.setdefault((str(request.task_name), int(request.doc_id)), unknown)
        return mixture

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return ids without those at the beginning for which the model has no room."""
        continuation = continuation[-(self._room - 1) :]
        room = self._room - len(continuation) * (self.backend == "causal")
        return context[-room:], continuation

    def _check_room(self, requests: Sequence[Instance], settings: Sequence[tuple[tuple[str, ...], int]]) -> None:
        """Check that a prompt of a token or more fits in front of each answer."""
        limit = self._room if self.backend == "causal" else self._backbone.max_answer_positions
        for request, (_, most) in zip(requests, settings, strict=True):
            if limit is not None and most >= limit:
                raise ConfigError(
                    f"task '{request.task_name}' of lm-eval has answers of up to {most} tokens (max_gen_toks), and the "
                    f"backbone has {limit} positions for prompt and answer: leave it out of general.tasks, or name a "
                    "task file with shorter answers in general.include_path"
                )

    def _prompt(self, text: str, most: int) -> list[int]:
        """Return the ids of a prompt with room for its answer."""
        return self.tok_encode(text)[-(self._room - most if self.backend == "causal" else self._room) :]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._codec.tokenizer.decode(list(ids), skip_special_tokens=True))


def _score(logprobs_TV: torch.Tensor, continuation: Sequence[int]) -> Scored:
    """Return the summed log probability of a continuation's tokens, and whether each is the most likely one."""
    ids_T = torch.tensor(continuation, device=logprobs_TV.device, dtype=torch.long)
    own_T = logprobs_TV.gather(1, ids_T[:, None])[:, 0]
    return float(own_T.double().sum()), bool((logprobs_TV.argmax(-1) == ids_T).all())


def _generation(request: Instance) -> tuple[tuple[str, ...], int]:
    """Return the texts that end an answer, and the most tokens of it.

    Raises:
        ConfigError: the answer would be drawn.
    """
    given = request.args[1]
    if given.get("do_sample") and given.get("temperature", 1.0) > 0:
        raise ConfigError(
            f"task '{request.task_name}' of lm-eval draws its answers (do_sample), and general ability is measured by "
            "the most likely one: expected a task with do_sample: false, or a task file in general.include_path"
        )
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    return stops, int(given.get("max_gen_toks") or given.get("max_new_tokens") or NEW_TOKENS)


def _before(answer: str, stops: Sequence[str]) -> str:
    for stop in filter(None, stops):
        answer = answer.partition(stop)[0]
    return answer
