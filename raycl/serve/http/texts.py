"""The endpoints that answer with texts: OpenAI's chat and completions, whole or as a stream."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse

from raycl.backbone.codec import HFCodec
from raycl.errors import RayclError
from raycl.generation.requests import PromptLogprobs, ResponseMetadata, Started, TextDelta, TokenLogprob, TokenLogprobs
from raycl.serve.engine.multi_snapshot_model import LoadedSnapshot
from raycl.serve.errors import InvalidRequestError, PromptTooLongError, error_response
from raycl.serve.http.drift import record
from raycl.serve.http.request_selection import details_of, sampling_of, select
from raycl.serve.http.schema import ChatAnswer, ChatRequest, CompletionRequest, Generation, TextAnswer
from raycl.serve.http.tool_calls import CallParser, ToolCall
from raycl.serve.service.history import History
from raycl.serve.service.service import ServedAnswer, Service, take

EVENT: dict[str, Any] = {
    "type": "object",
    "description": "data is a chunk, in the shape of OpenAI's, an error, or [DONE]",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
STREAM: dict[str, Any] = {"text/event-stream": {"schema": EVENT}}
"""The response to `stream: true` in OpenAPI's terms: the schema of every event."""


@dataclass(frozen=True)
class GenerationOptions:
    """A checked request: what is to be answered, and in which words.

    Attributes:
        texts: one for each answer; a prompt stands there `request.answers` times. echoes: text before each answer.
        settings: settings of every request to the engine.
    """

    request: Generation
    texts: Sequence[str]
    echoes: Sequence[str]
    settings: dict[str, Any]
    chat: bool

    def head(self) -> dict[str, Any]:
        """Return how every answer and every chunk begins."""
        name = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.request.model}


def add_texts(app: FastAPI, service: Service, history: History) -> None:
    @app.post("/v1/chat/completions", response_model=None, responses={200: {"model": ChatAnswer, "content": STREAM}})
    async def chat(request: ChatRequest) -> Response:
        """Return the answer to the messages, with the prompt or chat template of the task that they belong to."""
        most = request.max_completion_tokens or request.max_tokens
        options = await _options(service, request, [request.prompt], most, chat=True)
        return await _answered(service, history, options)

    @app.post("/v1/completions", response_model=None, responses={200: {"model": TextAnswer, "content": STREAM}})
    async def completions(request: CompletionRequest) -> Response:
        """Return what follows each prompt, which is sent as it is."""
        options = await _options(service, request, request.texts, request.max_tokens, ids=request.token_ids)
        return await _answered(service, history, replace(options, echoes=options.texts) if request.echo else options)


async def _options(
    service: Service,
    request: Generation,
    prompts: Sequence[str],
    max_tokens: int | None,
    chat: bool = False,
    ids: Sequence[tuple[int, ...]] = (),
) -> GenerationOptions:
    """Return the options of a request.

    Args:
        ids: prompts as tokens, where they are no texts.
    """
    if service.capabilities.answers == "label":
        raise InvalidRequestError("this endpoint's backbone gives labels, not texts: use POST /v1/classify")
    sampling = await sampling_of(service, request, max_tokens)
    prompts = _written(service, request, ids) if ids else prompts
    service.check(prompts, request.answers, are_tokens=bool(ids))
    seeds = [(sampling.seed + number) % 2**63 for number in range(request.answers)]
    samplings = [replace(sampling, seed=seed) for _ in prompts for seed in seeds]
    texts, template = [prompt for prompt in prompts for _ in seeds], request.pins.template
    settings = {"sampling": samplings, "templated": chat if template is None else template, "is_chat": chat}
    if ids:
        settings["ids"] = [prompt for prompt in ids for _ in seeds]
    return GenerationOptions(request, texts, [""] * len(texts), settings, chat)


def _written(service: Service, request: Generation, ids: Sequence[tuple[int, ...]]) -> list[str]:
    """Return the texts that prompts of tokens stand for.

    Raises:
        InvalidRequestError: a token that the model does not have, or a prompt around tokens.
        PromptTooLongError: too many tokens.
    """
    codec, most = service.engine.codec, service.config.limits.prompt_tokens
    longest, largest = max(map(len, ids)), max(map(max, ids))
    if longest > most:
        raise PromptTooLongError(f"the prompt has {longest} tokens, this endpoint reads at most {most}: send less text")
    if largest >= codec.vocabulary:
        raise InvalidRequestError(f"prompt has token {largest}: expected ids from 0 to {codec.vocabulary - 1}")
    if request.pins.template:
        raise InvalidRequestError("raycl.template is true and the prompt is token ids: send its text instead")
    return [codec.shown(prompt) for prompt in ids]


async def _answered(service: Service, history: History, options: GenerationOptions) -> Response:
    if not options.request.stream:
        return await _complete(service, history, options)
    pieces = _pieces(service, history, options)
    first = await anext(pieces)  # what cannot be answered fails here, before the stream begins
    headers = {"Cache-Control": "no-cache"}
    return StreamingResponse(_events(first, pieces), media_type="text/event-stream", headers=headers)


async def _complete(service: Service, history: History, options: GenerationOptions) -> Response:
    deadline = service.deadline
    async with (
        select(service, options.request) as (loaded, choice),
        service.submit(loaded, choice, options.texts, **options.settings) as queues,
    ):
        answers = [await service.complete(queue, deadline) for queue in queues]
    choices = []
    for number, answer in enumerate(answers):
        assert answer.metadata is not None, "an answer begins with how it is made"
        text = options.echoes[number] + answer.text
        content: dict[str, Any] = {"text": text}
        finish = answer.finish
        if options.chat:
            calls = _parser(service, options, loaded, answer.metadata)
            parts = await calls.parts(answer.text, True) if calls else [text]
            said, called = _separated(parts, _most_calls(options))
            said = said.strip() if called else said
            content = {"message": {"role": "assistant", "content": said or (None if called else "")}}
            if called:
                content["message"]["tool_calls"] = [call.tree() for call in called]
                finish = "tool_calls" if finish == "stop" else finish
        details = details_of(loaded, answer.metadata).model_dump()
        record(history, loaded, answer, details["tasks"], options.texts[number], service.is_active(loaded))
        logprobs = _logprobs(service, options, answer.logprobs, prompt=answer.prompt_logprobs)
        choices.append({"index": number, **content, "finish_reason": finish, "logprobs": logprobs, "raycl": details})
    kind = "chat.completion" if options.chat else "text_completion"
    body = {**options.head(), "object": kind, "choices": choices, "usage": usage(answers, options.request.answers)}
    return JSONResponse({**body, "raycl": choices[0]["raycl"]})


def _parser(
    service: Service, options: GenerationOptions, loaded: LoadedSnapshot, metadata: ResponseMetadata
) -> CallParser | None:
    """Return what finds calls of tools in an answer; None: no tools are offered."""
    request = options.request
    if not isinstance(request, ChatRequest) or not request.offered:
        return None
    prompt, codec = loaded.prompts.get(metadata.template), service.engine.codec
    template = prompt.chat_template if prompt else codec.chat_template
    return CallParser(codec, template, frozenset(tool.name for tool in request.offered), request.is_forced)


def _most_calls(options: GenerationOptions) -> int | None:
    """Return the most calls of an answer; None: any number."""
    is_single = isinstance(options.request, ChatRequest) and options.request.parallel_tool_calls is False
    return 1 if is_single else None


def _separated(parts: Iterable[str | ToolCall], most: int | None) -> tuple[str, list[ToolCall]]:
    """Return the text of a part of an answer, and its first calls."""
    known = list(parts)
    calls = [part for part in known if isinstance(part, ToolCall)]
    return "".join(part for part in known if isinstance(part, str)), calls[:most]


def _without_space(text: str, is_first: bool, has_calls: bool, is_last: bool) -> tuple[str, str]:
    """Return what of a stream's text is sent now, and the white space at its end, which waits for further text: around
    calls it is dropped.

    Args:
        is_first: nothing was sent before.
    """
    if is_last and not has_calls:
        return text, ""
    sent = text.rstrip()
    return (sent.lstrip() if is_first and has_calls else sent), text[len(sent) :]


async def _pieces(
    service: Service, history: History, options: GenerationOptions
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield chunks of a stream; answers to several prompts, or n > 1, follow one after another."""
    deadline, head = service.deadline, options.head()
    if options.request.includes_usage:
        head["usage"] = None  # until the last chunk, as OpenAI sends it
    answers: list[ServedAnswer] = []
    async with (
        select(service, options.request) as (loaded, choice),
        service.submit(loaded, choice, options.texts, **options.settings) as queues,
    ):
        for number, queue in enumerate(queues):
            answer, began, tasks, offset = ServedAnswer(), time.perf_counter(), {}, 0
            calls, called, space, is_first = None, 0, "", True
            async for event in service.events(queue, deadline):
                take(answer, event, began)
                if isinstance(event, Started):
                    details = details_of(loaded, event.metadata).model_dump()
                    tasks = details["tasks"]
                    calls = _parser(service, options, loaded, event.metadata)
                    yield _chunk(options, head, number, options.echoes[number], None, first=True) | {"raycl": details}
                    continue
                found = event.logprobs if isinstance(event, TextDelta) else ()
                prompt = event if isinstance(event, PromptLogprobs) else None
                logprobs = _logprobs(service, options, found, offset, prompt)
                if logprobs and "tokens" in logprobs:
                    offset += sum(map(len, logprobs["tokens"]))
                if isinstance(event, TextDelta) and calls is not None:
                    most = _most_calls(options)
                    parts = await calls.parts(event.text, event.finish is not None)
                    text, written = _separated(parts, None if most is None else most - called)
                    has_calls = bool(called or written)
                    text, space = _without_space(space + text, is_first, has_calls, event.finish is not None)
                    is_first = is_first and not text
                    if text and written:  # clients take an answer's text to come before its calls
                        yield _chunk(options, head, number, text, None, logprobs)
                        text, logprobs = "", None
                    for call in written:
                        yield _chunk(options, head, number, "", None, call={"index": called, **call.tree()})
                        called += 1
                    finish = "tool_calls" if called and event.finish == "stop" else event.finish
                    if text or finish or logprobs:
                        yield _chunk(options, head, number, text, finish, logprobs)
                elif isinstance(event, TextDelta):
                    yield _chunk(options, head, number, event.text, event.finish, logprobs)
                else:
                    yield _chunk(options, head, number, "", None, logprobs)
            service.observe(answer)
            record(history, loaded, answer, tasks, options.texts[number], service.is_active(loaded))
            answers.append(answer)
    if options.request.includes_usage:
        yield {**head, "object": _kind(options), "choices": [], "usage": usage(answers, options.request.answers)}


def _kind(options: GenerationOptions) -> str:
    return "chat.completion.chunk" if options.chat else "text_completion"


def _logprobs(
    service: Service,
    options: GenerationOptions,
    found: Sequence[TokenLogprobs],
    offset: int = 0,
    prompt: PromptLogprobs | None = None,
) -> dict[str, Any] | None:
    """Return log probabilities as the endpoint sends them; None: none are wanted, or there are none."""
    if options.request.top is None:
        return None
    codec = service.engine.codec
    return chat_logprobs(codec, found) if options.chat else text_logprobs(codec, found, offset, prompt)


def _chunk(
    options: GenerationOptions,
    head: dict[str, Any],
    number: int,
    text: str,
    finish: str | None,
    logprobs: dict[str, Any] | None = None,
    first: bool = False,
    call: dict[str, Any] | None = None,
) -> dict[str, Any]:
    delta: dict[str, Any] = {"role": "assistant"} if first else {}
    if text or first:
        delta["content"] = text
    if call is not None:
        delta["tool_calls"] = [call]
    content = {"delta": delta} if options.chat else {"text": text}
    choice = {"index": number, **content, "finish_reason": finish, "logprobs": logprobs}
    return {**head, "object": _kind(options), "choices": [choice]}


async def _events(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    """Yield server-sent events; what fails after the first one is the last."""

    def written(tree: dict[str, Any]) -> str:
        return f"data: {json.dumps(tree, ensure_ascii=False)}\n\n"

    async with aclosing(rest):
        yield written(first)
        try:
            async for piece in rest:
                yield written(piece)
        except RayclError as error:
            yield written(error_response(error)[1])
            return
        yield "data: [DONE]\n\n"


def usage(answers: Sequence[ServedAnswer], n: int = 1) -> dict[str, int]:
    """Return tokens of answers, n to each prompt, which counts once."""
    prompt = sum(answer.metadata.prompt_tokens for answer in answers[::n] if answer.metadata)
    completion = sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


LEAST = -9999.0
"""Sent instead of smaller ones, since JSON has no infinity; vLLM's value."""


def chat_logprobs(codec: HFCodec, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return `logprobs` of a choice or a chunk of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": codec.token_text(token), "logprob": max(logprob, LEAST), "bytes": codec.token_bytes(token)}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(*other) for other in one.top]} for one in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    codec: HFCodec, logprobs: Sequence[TokenLogprobs], offset: int = 0, prompt: PromptLogprobs | None = None
) -> dict[str, Any]:
    """Return `logprobs` of a choice or a chunk of a completion.

    Args:
        offset: characters of the choice before these tokens.
        prompt: those of the prompt, where it is echoed before them.
    """
    found = [*(prompt.logprobs if prompt else ()), *logprobs]
    tokens = [*([codec.token_text(prompt.first)] if prompt else []), *(codec.token_text(one.token) for one in found)]
    chances: list[float | None] = [*([None] if prompt else []), *(max(one.logprob, LEAST) for one in found)]
    top: list[dict[str, float] | None] = [*([None] if prompt else []), *(_top(codec, one) for one in found)]
    offsets = [offset + sum(map(len, tokens[:number])) for number in range(len(tokens))]
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": top, "text_offset": offsets}


def _top(codec: HFCodec, one: TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens at a place, the chosen one among them."""
    own = TokenLogprob(one.token, one.logprob)
    texts = {codec.token_text(token): max(logprob, LEAST) for token, logprob in (*reversed(one.top), own)}
    return dict(sorted(texts.items(), key=lambda pair: -pair[1]))
