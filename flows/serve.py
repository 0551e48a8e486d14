"""``textmill serve``: a model behind the part of OpenAI's HTTP API by which its clients complete texts and chat.

What may be asked for is in :mod:`flows.wanted`, the answers are made in :mod:`flows.reply`, and a chat becomes plain
text in :mod:`lm.dialog`.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from flows.console import latest_model
from flows.reply import Reply
from flows.wanted import Chat, Completion, Refused, encoded, parse
from lm.completion import check_vocabulary
from lm.errors import UserError
from lm.model import TransformerLM
from lm.scheduler import Busy, Scheduler
from lm.tokenizer import Tokenizer
from tasks.sample import load

_MAX_BODY = 1 << 20  # bytes
_MAX_WAITING = 256  # completions that wait for a row
_STOP_SECONDS = 5  # that clients have to take what is on its way when the server ends


class _Stream(StreamingResponse):
    """Events, until the client has them all or is gone."""

    def __init__(self, reply: Reply, scheduler: Scheduler) -> None:
        super().__init__(reply.stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._reply, self._scheduler = reply, scheduler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._reply, self._scheduler)


def _cancel(reply: Reply, scheduler: Scheduler) -> None:
    for choice in reply.choices:
        scheduler.cancel(choice.generation)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            raise Refused(413, f"The body is longer than {_MAX_BODY:,} bytes.")
    return bytes(body)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _whole(request: Request, reply: Reply, scheduler: Scheduler) -> Response:
    """The answer in one piece, or nothing to a client that has gone."""
    answer, gone = asyncio.ensure_future(reply.whole()), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(answer.result()) if answer.done() else Response(status_code=499)
    finally:
        answer.cancel()
        gone.cancel()
        _cancel(reply, scheduler)


def build_app(
    model: TransformerLM, tokenizer: Tokenizer, name: str, max_batch_size: int, max_waiting: int = _MAX_WAITING
) -> FastAPI:
    """The server of ``model``, called ``name`` in the API. Its scheduler is ``app.state.scheduler``. Raises UserError
    when the model and the tokenizer do not belong together."""
    check_vocabulary(model, tokenizer.size)
    scheduler = Scheduler(model, max_batch_size, max_waiting)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        scheduler.close()

    app = FastAPI(title="textmill", lifespan=lifespan, openapi_url=None)
    app.state.scheduler = scheduler

    async def answer(request: Request, kind: type[Completion] | type[Chat]) -> Response:
        wanted = parse(kind, await _body(request))
        if wanted.model is not None and wanted.model != name:
            asked = wanted.model[:80]
            raise Refused(404, f"There is no model {asked!r}; this is {name!r}.", "model", "model_not_found")
        wanted.model = name
        if wanted.logprobs:
            raise Refused(400, "Only completions have log-probabilities, with logprobs 0: no alternatives.", "logprobs")
        prompts = wanted.prompts()
        count = len(prompts) * (wanted.n or 1)
        if not 0 < count <= scheduler.capacity:
            raise Refused(400, f"{count} completions are asked for; 1 to {scheduler.capacity} can be at once.", "n")
        ids = await asyncio.to_thread(encoded, prompts, tokenizer)
        reply = Reply(wanted, ids, tokenizer, model.config.context_length)
        ends = {choice.generation: choice.end for choice in reply.choices}
        try:
            scheduler.submit(list(ends), lambda generation, error: ends[generation](error))
        except Busy as busy:
            raise Refused(429, str(busy)) from None
        except UserError as error:
            raise Refused(400, str(error), "prompt") from None
        return _Stream(reply, scheduler) if wanted.stream else await _whole(request, reply, scheduler)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, Completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, Chat)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "created": created, "owned_by": "textmill"}],
        }

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def no_such_page(_: Request, error: HTTPException) -> Response:
        return Refused(error.status_code, error.detail).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        return Refused(500, "The server failed; its log says how.").response()

    return app


def serve_command(root: str, host: str, port: int, max_batch_size: int, device: str) -> None:
    """Serve the model of the latest run below ``root`` until Ctrl-C."""
    found = latest_model(root)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"Cannot listen on {host}, port {port}: {error}. Choose others with --host and --port."
        ) from None
    with listener, suppress(KeyboardInterrupt):
        model, tokenizer = load(*found, device)
        app = build_app(model, tokenizer, "textmill", max_batch_size)
        name = f"[{host}]" if ":" in host else host
        print(f"Serving on http://{name}:{listener.getsockname()[1]}/v1 (model: textmill). Ctrl-C stops.", flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_STOP_SECONDS)
        uvicorn.Server(config).run(sockets=[listener])
