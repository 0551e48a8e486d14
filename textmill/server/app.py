"""``textmill serve``: an HTTP server for a model with the completion and chat endpoints of OpenAI's API."""

import asyncio
import hashlib
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from lm.common.errors import UserError
from lm.hardware.device import explain_out_of_memory
from lm.inference.chat_format import PLAIN_NOTICE, ChatFormat
from lm.inference.completion import check_vocabulary
from lm.inference.config import Pooling, Quantization
from lm.inference.generation_request import Generation
from lm.inference.scheduler import QueueFull, Scheduler, SchedulerClosed
from lm.model.flops import parameter_count
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer
from tasks.runs.models import ResolvedModel
from textmill.server.access import AccessControl, RequestTimeout, parse_origin
from textmill.server.disconnects import CLIENT_CLOSED_REQUEST, EventStream, cancel, until_disconnect
from textmill.server.embeddings import Embedder, EmbeddingRequest
from textmill.server.kv_memory import describe_kv_memory, free_bytes
from textmill.server.logprobs import TokenNames
from textmill.server.metrics import CountRequests, ServerMetrics
from textmill.server.openapi import openapi_document
from textmill.server.page import page_response
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest, parse_request
from textmill.server.responses import GenerationResponse
from textmill.server.special_texts import SpecialTextNotice
from textmill.server.structured_output import ConstraintFactory
from textmill.server.tokens import DetokenizeRequest, TokenizeRequest

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20
_MAX_SCORES = 1 << 18  # log-probabilities of a response: about 10 MB; json keeps the other threads waiting meanwhile
_SHUTDOWN_SECONDS = 5  # time for open responses when the server stops
_ALIAS = "textmill"  # a name that every served model answers to
R = TypeVar("R", bound=CompletionRequest | ChatRequest | EmbeddingRequest | TokenizeRequest | DetokenizeRequest)
_METHODS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/embeddings": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/openapi.json": "GET",
    "/health": "GET",
    "/metrics": "GET",
    "/": "GET",
}
"""The endpoints of the server, and the method of each."""


def build_app(
    model: TransformerLM,
    tokenizer: TextTokenizer,
    name: str,
    max_batch_size: int,
    max_waiting: int = 256,
    prefix_cache_bytes: int = 0,
    api_key: str | None = None,
    max_requests_per_client: int = 0,
    speculative_tokens: int = 0,
    identity: str = "",
    is_private: bool = False,
    is_post_trained: bool = False,
    allowed_origins: Collection[str] = (),
    pooling: Pooling = "last",
    max_context: int | None = None,
    kv_bytes: int | None = None,
) -> FastAPI:
    """Return the web application for ``model``, which clients call ``name`` or ``textmill``.

    ``app.state.scheduler`` is its scheduler. ``api_key``, ``max_requests_per_client``, ``is_private`` and
    ``allowed_origins`` are those of :class:`textmill.server.access.AccessControl`; pages of these origins may also read
    the answers. ``pooling`` is that of embeddings. ``speculative_tokens`` is that of
    :class:`lm.inference.config.SampleConfig`. ``identity`` is a text that changes with the model. A request has at most
    ``max_context`` tokens, with those that it generates, by default the model's context; keys and values take at most
    ``kv_bytes``, by default what ``max_batch_size`` such requests need. The page opens on the chat if the model
    ``is_post_trained`` or has a chat template.
    Raises UserError if the model and the tokenizer do not match, if ``max_context`` is longer than the model's context,
    and if ``kv_bytes`` or ``prefix_cache_bytes`` are too small for 16 tokens.
    """
    check_vocabulary(model, tokenizer.size)
    model_context = model.config.context_length
    if max_context is not None and max_context > model_context:
        raise UserError(f"--max_context is {max_context:,}; this model has a context of {model_context:,} tokens.")
    chat_format = ChatFormat(tokenizer)
    if not chat_format.has_template:
        log.warning(PLAIN_NOTICE)
    token_names, constraints, notice = TokenNames(tokenizer), ConstraintFactory(tokenizer), SpecialTextNotice(tokenizer)
    scheduler = Scheduler(model, max_batch_size, max_waiting, prefix_cache_bytes, max_context, kv_bytes)
    context_length = scheduler.max_seq_len
    metrics = ServerMetrics(scheduler)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        scheduler.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # FastAPI's pages of its document load scripts from elsewhere
    for error_type in (ApiError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error_type, _error_response)
    app.state.scheduler = scheduler
    app.add_middleware(
        AccessControl,
        api_key=api_key,
        max_requests_per_client=max_requests_per_client,
        is_private=is_private,
        allowed_origins=allowed_origins,
    )
    app.add_middleware(CountRequests, metrics=metrics, endpoints=frozenset(_METHODS))  # outside: it counts refusals too
    if allowed_origins:
        # The outermost one: a browser's preflight request has no key, and a page may read why it is refused.
        origins, methods = tuple(allowed_origins), ("GET", "POST")
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=methods,
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )

    def check_model(requested: str) -> None:
        if requested not in (name, _ALIAS):
            message = f"There is no model {requested[:80]!r}; this is {name!r}."
            raise ApiError(404, message, "model", "model_not_found")

    async def read_request(http_request: Request, request_type: type[R]) -> R:
        body = bytearray()
        async for part in http_request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise ApiError(413, f"The body is longer than {_MAX_BODY_BYTES:,} bytes.")
        request = parse_request(request_type, bytes(body))
        if request.model is not None:
            check_model(request.model)
        return request

    async def generate(http_request: Request, request_type: type[CompletionRequest] | type[ChatRequest]) -> Response:
        request = await read_request(http_request, request_type)
        request.model = name
        count = request.count_prompts() * request.completions_per_prompt
        if not 0 < count <= scheduler.capacity:
            raise ApiError(400, f"{count} completions are requested; 1 to {scheduler.capacity} are possible.", "n")
        prompts = await asyncio.to_thread(request.encode_prompts, chat_format)
        await asyncio.to_thread(notice.check, request)
        constraint = await constraints.make(request)
        response = GenerationResponse(
            request,
            prompts,
            chat_format,
            token_names,
            context_length,
            speculative_tokens,
            constraint,
            is_limited=context_length < model_context,
        )
        choices = {choice.generation: choice for choice in response.choices}
        if response.has_logprobs and (num_scores := sum(map(_count_scores, choices))) > _MAX_SCORES:
            message = f"{num_scores:,} log-probabilities are requested; at most {_MAX_SCORES:,} are possible."
            raise ApiError(400, message, "logprobs")

        def on_finish(generation: Generation, error: Exception | None) -> None:
            metrics.record_completion(choices[generation])
            choices[generation].finish(error)

        try:
            scheduler.submit(list(choices), on_finish)
        except QueueFull as busy:
            raise ApiError(429, str(busy)) from None
        except SchedulerClosed:
            raise ApiError(503, "The server is stopping.") from None
        except UserError as error:
            raise ApiError(400, str(error), "prompt") from None
        if request.stream:
            return EventStream(response, scheduler)
        try:
            return await until_disconnect(http_request, response.whole())
        finally:
            cancel(response, scheduler)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generate(request, ChatRequest)

    embedder = Embedder(model, tokenizer, name, scheduler, pooling)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read_request(request, EmbeddingRequest)
        return await until_disconnect(request, embedder.respond(body))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_request(request, TokenizeRequest)
        ids = await asyncio.to_thread(body.encode, chat_format)
        return {"tokens": ids, "count": len(ids), "max_model_len": context_length}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        return {"prompt": (await read_request(request, DetokenizeRequest)).decode(chat_format)}

    model_json = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "textmill"}
    # Not OpenAI's; textmill evaluate and the page read them.
    model_json |= {"aliases": [_ALIAS] if name != _ALIAS else [], "identity": identity}
    model_json |= {"has_chat_template": chat_format.has_template, "special_tokens": list(tokenizer.special_ids)}
    model_json["num_parameters"] = parameter_count(model.config)["total"]
    model_json["max_model_len"] = context_length  # vLLM's name

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_json]}

    @app.get("/v1/models/{model_id:path}")
    async def model_info(model_id: str) -> dict[str, Any]:
        check_model(model_id)
        return model_json

    page = page_response("chat" if is_post_trained or chat_format.has_template else "completion")

    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return page

    @app.get("/openapi.json", include_in_schema=False)
    async def show_openapi() -> dict[str, Any]:
        return openapi_document(app.routes)

    @app.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> Response:
        if scheduler.is_running:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "The thread that runs the model has ended."}, 503)

    @app.get("/metrics", include_in_schema=False)
    async def show_metrics() -> Response:
        return metrics.response()

    return app


def _count_scores(generation: Generation) -> int:
    """Return the most log-probabilities that the response has for a completion."""
    echoed = len(generation.prompt) if generation.wants_prompt_logprobs else 0
    return (echoed + generation.max_new_tokens) * (1 + generation.num_alternatives)


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(error, HTTPException):
        headers, error = error.headers, _routing_error(request, error)
        error.headers = headers
    elif not isinstance(error, ApiError):
        error = ApiError(500, "The server failed; see its log.")
    return error.response()


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """Return the error for a path or a method that the server does not have. The codes are OpenAI's."""
    requested = f"{request.method} {request.url.path[:80]}"
    if error.status_code == 404:
        endpoints = ", ".join(f"{method} {path}" for path, method in _METHODS.items())
        return ApiError(404, f"Unknown request URL: {requested}. This server has {endpoints}.", code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError(405, f"{requested} is not possible; the method is {allowed}.", code="method_not_supported")
    return ApiError(error.status_code, error.detail)


def serve(
    resolved: ResolvedModel,
    host: str,
    port: int,
    device: str,
    quantization: Quantization = "none",
    api_key: str | None = None,
    served_model_name: str = "",
    allowed_origins: Sequence[str] = (),
    pooling: Pooling = "last",
    kv_bytes: int | None = None,
    max_context: int | None = None,
    **options: int,
) -> None:
    """Serve a model until Ctrl-C.

    ``served_model_name`` is the model's name for clients, by default that of the run or the directory. Keys and values
    take at most ``kv_bytes``, by default half of the memory that is free when the model is loaded. ``max_context`` and
    ``options`` are arguments of :func:`build_app`. Raises UserError for invalid arguments and an address in use.
    """
    if not served_model_name.isprintable() or served_model_name.strip() != served_model_name:
        raise UserError("--served_model_name must be printable text without spaces around it.")
    origins = [*dict.fromkeys(map(parse_origin, allowed_origins))]
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UserError("The API key must be printable ASCII text without spaces around it, and not empty.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Cannot listen on {host}, port {port}: {str(error).rstrip('.')}. Change --host or --port."
        ) from None
    with listener, suppress(KeyboardInterrupt):
        address, port, *_ = listener.getsockname()
        ip_address = ipaddress.ip_address(address)
        is_private = api_key is None and ip_address.is_loopback
        model, tokenizer = resolved.load_for_inference(device, quantization)
        found_name = resolved.public_name if resolved.public_name.isprintable() else ""
        name = served_model_name or found_name or _ALIAS
        # Hashed: it may hold the path of a directory, which is not for clients.
        identity = hashlib.sha256(f"{resolved.identify()} {quantization}".encode()).hexdigest()[:16]
        with explain_out_of_memory("The KV cache does not fit into memory; lower --kv_memory."):
            app = build_app(
                model,
                tokenizer,
                name,
                api_key=api_key,
                identity=identity,
                is_private=is_private,
                is_post_trained=resolved.is_post_trained,
                allowed_origins=origins,
                pooling=pooling,
                max_context=max_context,
                kv_bytes=free_bytes(model) // 2 if kv_bytes is None else kv_bytes,
                **options,
            )
        if api_key is None and not is_private:
            log.warning(
                "Everyone who can reach this machine can use the model, because there is no API key. Set --api_key, or "
                "leave out --host."
            )
        if ip_address.is_unspecified:  # all addresses: a browser cannot open 0.0.0.0 or ::
            host = "127.0.0.1" if ip_address.version == 4 else "::1"
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        place = f"{url}/v1 and on all other addresses of this machine" if ip_address.is_unspecified else f"{url}/v1"
        print(f"Serving {found_name or resolved.name} on {place}. Ctrl-C stops the server.", flush=True)
        print(f"Model name for clients: {name}", flush=True)
        print(f"Page to try it: {url}/", flush=True)
        print(describe_kv_memory(app.state.scheduler, max_context or model.config.context_length), flush=True)
        config = uvicorn.Config(
            app, http=RequestTimeout, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_SECONDS + 2
        )
        _Server(config, app.state.scheduler).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends open responses by an error that clients understand, before uvicorn cancels them."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async def close() -> None:
            await asyncio.sleep(_SHUTDOWN_SECONDS)
            await asyncio.to_thread(self._scheduler.close)

        closing = asyncio.create_task(close())
        await super().shutdown(sockets)
        closing.cancel()
