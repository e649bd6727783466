"""The server's routes: OpenAI's chat and text completions, models, health, and how the scheduler stands."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from compute.serve.calls import Call
from compute.serve.errors import RequestRefused
from compute.serve.replies import Reply, chat_reply, completion_reply, error_body, status_of
from compute.serve.requests import Event, Failed, Finished, Queued, Reading, Request
from compute.serve.scheduler import Scheduler
from compute.serve.schema import ChatBody, CompletionBody, StreamOptions, decode
from compute.serve.text import Answer, Text
from protocol.errors import InvalidValue, KvdError

MOST_BODY_BYTES = 64 << 20
PROGRESS_S = 0.5
"""Seconds between two comments about a request's progress, at least."""
SILENCE_S = 10.0
"""Seconds without an event after which a comment keeps the connection alive."""
RETRY_AFTER_S = "2"


@dataclass
class Service:
    """What the routes serve. ``model`` is its public name; with an ``api_key`` it is asked of every ``/v1`` request."""

    scheduler: Scheduler
    text: Text
    model: str
    context: int
    fingerprint: str
    api_key: str | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    failure: str = ""
    """Why nothing is served any more."""


def application(service: Service) -> Starlette:
    """The ASGI application."""
    routes = _Routes(service)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completion, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.one_model),
            Route("/v1/sessions/{name:path}", routes.end_session, methods=["DELETE"]),
            Route("/healthz", routes.health),
            Route("/status", routes.status),
        ],
        exception_handlers={404: _not_found, 405: _not_found, Exception: _failed},
    )


class _Unauthorized(RequestRefused):
    code = "invalid_api_key"


class _UnknownModel(RequestRefused):
    code = "model_not_found"


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, http: HttpRequest) -> Response:
        return await self._answered(http, ChatBody)

    async def completion(self, http: HttpRequest) -> Response:
        return await self._answered(http, CompletionBody)

    async def models(self, http: HttpRequest) -> Response:
        try:
            self._authorize(http)
        except KvdError as error:
            return _error(error)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, http: HttpRequest) -> Response:
        try:
            self._authorize(http)
            self._require_model(http.path_params["model"])
        except KvdError as error:
            return _error(error)
        return JSONResponse(self._model())

    async def end_session(self, http: HttpRequest) -> Response:
        try:
            self._authorize(http)
            await asyncio.wrap_future(self._service.scheduler.end_session(http.path_params["name"]))
        except KvdError as error:
            return _error(error)
        return JSONResponse({"id": http.path_params["name"], "object": "session.deleted", "deleted": True})

    async def health(self, _: HttpRequest) -> Response:
        failure = self._service.failure
        return JSONResponse({"status": failure or "ok"}, 503 if failure else 200)

    async def status(self, http: HttpRequest) -> Response:
        try:
            self._authorize(http)
        except KvdError as error:
            return _error(error)
        return JSONResponse(asdict(self._service.scheduler.status()))

    async def _answered(self, http: HttpRequest, kind: type[ChatBody] | type[CompletionBody]) -> Response:
        try:
            self._authorize(http)
            body = decode(await _read(http), kind)
            self._require_model(body.model)
            request = await asyncio.to_thread(self._request, body)
            call = Call(self._service.scheduler, Answer(self._service.text.decoder(), body.stops))
            call.submit(request)
        except KvdError as error:
            return _error(error)
        except ClientDisconnect:
            return Response(status_code=499)
        make = chat_reply if isinstance(body, ChatBody) else completion_reply
        reply = make(self._service.model, self._service.fingerprint, request)
        events = call.events(lambda: _gone(http), every_s=SILENCE_S)
        try:
            first = await anext(events, None)  # what is refused at once has a status of its own
        except asyncio.CancelledError:
            call.cancel()
            raise
        if first is not None and isinstance(first[0], Failed):
            return _error(first[0].error)
        if body.stream:
            lines = _stream(reply, first, events, body.stream_options or StreamOptions())
            return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})
        return await _whole(reply, first, events)

    def _request(self, body: ChatBody | CompletionBody) -> Request:
        """Tokens and limits of a body; off the event loop, since texts may be long."""
        text = self._service.text
        continued: list[int] | None = None
        if isinstance(body, ChatBody):
            messages = body.conversation()
            prompt = text.of_messages(messages)
            if body.session is not None:
                continued = text.next_messages(messages)
        else:
            given = body.one_prompt()
            prompt = text.of_text(given) if isinstance(given, str) else given
            if body.session is not None:
                continued = text.more_text(given) if isinstance(given, str) else given
        return Request(
            prompt=prompt,
            max_tokens=body.most_tokens,
            session=body.session,
            continued=continued,
            sampling=body.sampling(secrets.randbits(63)),
            stop_tokens=frozenset() if body.ignore_eos else text.stop_tokens,
        )

    def _authorize(self, http: HttpRequest) -> None:
        key = self._service.api_key
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise _Unauthorized("the API key is not the server's")

    def _require_model(self, name: str | None) -> None:
        if name is not None and name != self._service.model:
            raise _UnknownModel(f"model {name!r} is not served; {self._service.model!r} is", model=name)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.model,
            "object": "model",
            "created": self._service.started,
            "owned_by": "kvd",
            "max_model_len": self._service.context,
        }


async def _read(http: HttpRequest) -> bytes:
    """The body; raises `InvalidValue` for one that is too long, before all of it is here."""
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > MOST_BODY_BYTES:
            raise InvalidValue("body", f"more than {MOST_BODY_BYTES} bytes", f"at most {MOST_BODY_BYTES} bytes")
    return bytes(data)


async def _gone(http: HttpRequest) -> None:
    """Return when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


Step = tuple[Event, str] | None


async def _stream(
    reply: Reply, first: Step, events: AsyncIterator[Step], options: StreamOptions
) -> AsyncIterator[bytes]:
    """Server-sent events: text as it comes, comments about progress if wanted, and ``[DONE]``."""
    told = 0.0
    try:
        opening = reply.opening()
        async for step in _with_first(first, events):
            if step is None:
                if options.include_progress:
                    yield b": waiting\n\n"
                continue
            event, text = step
            is_due = options.include_progress and time.monotonic() - told >= PROGRESS_S
            if is_due and isinstance(event, Queued | Reading):
                told = time.monotonic()
                yield f": {_progress(event)}\n\n".encode()
            if text:
                if opening is not None:
                    yield _event(opening)
                    opening = None
                yield _event(reply.piece(text))
            if isinstance(event, Failed):
                yield _event(error_body(event.error))
                return
            if isinstance(event, Finished):
                if opening is not None:
                    yield _event(opening)
                yield _event(reply.last_piece(event))
                if options.include_usage:
                    yield _event(reply.usage_piece(event))
                yield b"data: [DONE]\n\n"
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def _whole(reply: Reply, first: Step, events: AsyncIterator[Step]) -> Response:
    texts: list[str] = []
    async for step in _with_first(first, events):
        if step is None:
            continue
        event, text = step
        texts.append(text)
        if isinstance(event, Failed):
            return _error(event.error)
        if isinstance(event, Finished):
            return JSONResponse(reply.whole("".join(texts), event))
    return Response(status_code=499)  # the client has gone: nobody reads this


async def _with_first(first: Step, events: AsyncIterator[Step]) -> AsyncIterator[Step]:
    yield first
    if first is None or not isinstance(first[0], Finished | Failed):
        async for step in events:
            yield step


def _progress(event: Queued | Reading) -> str:
    if isinstance(event, Queued):
        return f"queued, place {event.place}" + (f": {event.reason}" if event.reason else "")
    return f"prompt, {event.done} of {event.total} tokens read, {event.cached} cached"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _error(error: Exception) -> JSONResponse:
    status = status_of(error)
    headers = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else {"x-should-retry": "false"}
    return JSONResponse(error_body(error), status, headers)


async def _failed(_: HttpRequest, error: Exception) -> Response:
    """What nobody expected, in the shape that clients read; it is raised on, and logged."""
    return _error(error)


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refused = RequestRefused(f"{http.method} {http.url.path} is not served", path=http.url.path)
    return JSONResponse(error_body(refused), status)
