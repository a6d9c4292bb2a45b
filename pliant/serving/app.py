"""The server: OpenAI's API for one language model.

    POST /v1/completions         texts, or server-sent events with "stream": true
    POST /v1/chat/completions    the same for messages, by the model's chat template
    POST /v1/embeddings          refused: models from GGUF files here give logits alone
    GET  /v1/models              the one model
    GET  /metrics                for Prometheus
    GET  /health                 200 as long as requests are taken

A request that could never run under the memory limit is a 400 with the numbers, one
that finds too many waiting a 503. A client that goes gives its place free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pliant.errors import MemoryLimitError, PliantError, ShapeError
from pliant.language.batch import Batch
from pliant.language.model import LanguageModel
from pliant.serving.bodies import BodyError, Wanted, chat, completion, pieces
from pliant.serving.metrics import Metrics
from pliant.serving.worker import BusyError, ClientJob, TextPart, Worker

Parse = Callable[[object, LanguageModel], Wanted]
MOST_BODY = 16 << 20  # bytes
_REASONS = ("stop", "length")  # why a text ends that is complete


@dataclass(frozen=True, slots=True)
class ServerSettings:
    name: str
    max_new_tokens: int = 512  # of a request that does not say
    most_waiting: int = 1000


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an endpoint asks and answers."""

    parse: Parse
    prefix: str
    whole: str  # the object it answers with
    part: str
    is_chat: bool


_TEXT = _Kind(completion, "cmpl", "text_completion", "text_completion", False)
_CHAT = _Kind(chat, "chatcmpl", "chat.completion", "chat.completion.chunk", True)


class Server:
    """A model, its batch and its worker, behind an ASGI application."""

    def __init__(self, batch: Batch, settings: ServerSettings) -> None:
        self.batch, self.settings, self.lm = batch, settings, batch.lm
        self.metrics = Metrics(batch)
        self.worker = Worker(batch, self.metrics.watch, settings.most_waiting)
        self._began = int(time())
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/embeddings", self.embed, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/metrics", self.show_metrics),
                Route("/health", self.health),
            ],
            exception_handlers={Exception: _failed},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(self.worker.stop)

    # ---- what is told

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self.settings.name:
            return self._unknown(http.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.settings.name,
            "object": "model",
            "created": self._began,
            "owned_by": "pliant",
        }

    async def show_metrics(self, http: HttpRequest) -> Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return Response(self.metrics.text(), headers=headers)

    async def health(self, http: HttpRequest) -> Response:
        if self.worker.broken is not None:
            return JSONResponse({"status": self.worker.broken}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def embed(self, http: HttpRequest) -> Response:
        message = f"{self.settings.name} gives no embeddings"
        return _refused(*_error_body(400, message, code="no_embeddings"))

    # ---- texts

    async def complete(self, http: HttpRequest) -> Response:
        return await self._answer(http, _TEXT)

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answer(http, _CHAT)

    async def _answer(self, http: HttpRequest, kind: _Kind) -> Response:
        jobs: list[ClientJob] = []
        try:
            wanted = kind.parse(await _body(http), self.lm)
            if wanted.model not in (None, self.settings.name):
                return self._unknown(str(wanted.model))
            default, context = self.settings.max_new_tokens, self.batch.context
            for request in wanted.requests(self.lm, default, context):
                jobs.append(self.worker.start(request, pieces(wanted, self.lm)))
            for job in jobs:
                await job.accepted()
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except (Exception, asyncio.CancelledError) as error:
            for job in jobs:
                job.leave()
            if not isinstance(error, BusyError | PliantError):
                raise
            return _refused(*_error_of(error))
        answer = _Answer(kind, self.settings.name, wanted, jobs)
        if wanted.stream:
            return _Events(answer)
        return await answer.whole(http)

    def _unknown(self, name: str) -> Response:
        message = f"there is no model {name!r} here, but {self.settings.name!r}"
        found = _error_body(404, message, param="model", code="model_not_found")
        return _refused(*found)


class _Answer:
    """The texts of one request, all of them or part by part."""

    def __init__(
        self, kind: _Kind, model: str, wanted: Wanted, jobs: Sequence[ClientJob]
    ) -> None:
        self.kind, self.wanted, self.jobs = kind, wanted, jobs
        self._head = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "created": int(time()),
            "model": model,
        }

    def leave(self) -> None:
        for job in self.jobs:
            job.leave()

    def usage(self) -> dict[str, int]:
        read = sum(len(prompt) for prompt in self.wanted.prompts)
        made = sum(len(job.request.made) for job in self.jobs)
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
        }

    async def whole(self, http: HttpRequest) -> Response:
        """All texts at once; nothing is left running if the client goes."""
        made = asyncio.ensure_future(self._all())
        gone = asyncio.ensure_future(_gone(http))
        try:
            await asyncio.wait((made, gone), return_when=asyncio.FIRST_COMPLETED)
            if not made.done():
                return Response(status_code=499)  # nobody reads it
            choices: list[dict[str, Any]] = []
            for index, (text, last) in enumerate(await made):
                if last.finish not in _REASONS:
                    return _refused(*_unfinished(last))
                choices.append(self._choice(index, text, last.finish))
            head = {**self._head, "object": self.kind.whole}
            return JSONResponse({**head, "choices": choices, "usage": self.usage()})
        finally:
            self.leave()
            made.cancel()
            gone.cancel()

    async def _all(self) -> list[tuple[str, TextPart]]:
        return [await _text_of(job) for job in self.jobs]

    def _choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.kind.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        return {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": finish,
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: parts of all texts as they come."""
        parts: asyncio.Queue[tuple[int, TextPart]] = asyncio.Queue()

        async def follow(index: int, job: ClientJob) -> None:
            async for part in job.parts():
                parts.put_nowait((index, part))

        tasks = [asyncio.ensure_future(follow(*item)) for item in enumerate(self.jobs)]
        try:
            if self.kind.is_chat:
                for index in range(len(self.jobs)):
                    yield self._event(index, {"role": "assistant", "content": ""})
            left = len(self.jobs)
            while left:
                index, part = await parts.get()
                if part.finish not in (None, *_REASONS):
                    yield _event(_unfinished(part)[1])
                    return
                if part.text:
                    yield self._event(index, self._new(part.text))
                if part.finish is not None:
                    nothing = {} if self.kind.is_chat else self._new("")
                    yield self._event(index, nothing, part.finish)
                    left -= 1
            if self.wanted.usage:
                head = {**self._head, "object": self.kind.part}
                yield _event({**head, "choices": [], "usage": self.usage()})
            yield b"data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    def _new(self, text: str) -> dict[str, Any]:
        return {"content": text} if self.kind.is_chat else {"text": text}

    def _event(
        self, index: int, new: dict[str, Any], finish: str | None = None
    ) -> bytes:
        choice = {
            "index": index,
            **({"delta": new} if self.kind.is_chat else new),
            "logprobs": None,
            "finish_reason": finish,
        }
        return _event({**self._head, "object": self.kind.part, "choices": [choice]})


@dataclass(frozen=True, slots=True)
class _Events:
    """A stream that gives its places free, however it ends: as early as its head."""

    answer: _Answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = StreamingResponse(
            self.answer.events(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
        try:
            await stream(scope, receive, send)
        finally:
            self.answer.leave()


async def _failed(http: HttpRequest, error: Exception) -> Response:
    """Of a bug: its traceback is in the server's log."""
    return _refused(*_error_body(500, f"{type(error).__name__}: {error}"))


async def _text_of(job: ClientJob) -> tuple[str, TextPart]:
    text = ""
    async for part in job.parts():
        text += part.text
    return text, part


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _body(http: HttpRequest) -> object:
    data = b""
    async for part in http.stream():
        data += part
        if len(data) > MOST_BODY:
            raise BodyError(f"the body has more than {MOST_BODY} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BodyError("the body is no JSON") from None


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _unfinished(last: TextPart) -> tuple[int, dict[str, Any]]:
    """Of a text that did not come to its end."""
    if last.finish == "cancelled":
        return _error_body(503, "the server stops", code="stopping")
    return _error_body(500, f"{type(last.error).__name__}: {last.error}")


def _error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    match error:
        case BusyError():
            return _error_body(503, str(error), code="busy")
        case MemoryLimitError():
            status, body = _error_body(400, str(error), code="memory_limit_exceeded")
            body["error"] |= {"limit": error.limit, "least": error.least}
            return status, body
        case BodyError():
            return _error_body(400, str(error), param=error.param)
        case ShapeError():
            return _error_body(400, str(error), code="context_length_exceeded")
        case _:
            return _error_body(400, str(error))


def _error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> tuple[int, dict[str, Any]]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return status, {"error": error}


def _refused(status: int, body: dict[str, Any]) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(body, status_code=status, headers=headers)
