"""The endpoints of ``textmill serve``, of OpenAI's API and of Anthropic's, for a model."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from lm.common.errors import UserError
from lm.inference.chat_format import PLAIN_NOTICE, ChatFormat
from lm.inference.completion import check_vocabulary
from lm.inference.config import Pooling
from lm.inference.generation_request import Generation
from lm.inference.scheduler import QueueFull, Scheduler, SchedulerClosed
from lm.model.flops import parameter_count
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer
from textmill.server.access import AccessControl
from textmill.server.api_form import ApiForm, openai_form
from textmill.server.disconnects import CLIENT_CLOSED_REQUEST, EventStream, cancel, until_disconnect
from textmill.server.embeddings import Embedder, EmbeddingRequest
from textmill.server.fields import StrictModel
from textmill.server.logprobs import TokenNames
from textmill.server.messages_api import MESSAGES
from textmill.server.messages_request import CountTokensRequest
from textmill.server.metrics import CountRequests, ServerMetrics
from textmill.server.openapi import openapi_document
from textmill.server.page import page_response
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest, parse_request
from textmill.server.responses import GenerationResponse
from textmill.server.responses_api import RESPONSES
from textmill.server.special_texts import SpecialTextNotice
from textmill.server.structured_output import AnswerPlan, AnswerPlanner
from textmill.server.tokens import DetokenizeRequest, TokenizeRequest

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20
_MAX_SCORES = 1 << 18  # log-probabilities of a response: about 10 MB; json keeps the other threads waiting meanwhile
ALIAS = "textmill"  # a name that every served model answers to
R = TypeVar("R", bound=StrictModel)
_METHODS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/responses": "POST",
    "/v1/messages": "POST",
    "/v1/messages/count_tokens": "POST",
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
    adapters: Mapping[str, str] | None = None,
) -> FastAPI:
    """Return the web application for ``model``, which clients call ``name`` or ``textmill``.

    ``app.state.scheduler`` is its scheduler. ``api_key``, ``max_requests_per_client``, ``is_private`` and
    ``allowed_origins`` are those of :class:`textmill.server.access.AccessControl`; pages of these origins may also read
    the answers. ``pooling`` is that of embeddings. ``speculative_tokens`` is that of
    :class:`lm.inference.config.SampleConfig`. ``identity`` is a text that changes with the model. A request has at most
    ``max_context`` tokens, with those that it generates, by default the model's context; keys and values take at most
    ``kv_bytes``, by default what ``max_batch_size`` such requests need. The page opens on the chat if the model
    ``is_post_trained`` or has a chat template. ``adapters`` are the names and identities of those that the model was
    prepared with, in their order.
    Raises UserError if the model and the tokenizer do not match, if ``max_context`` is longer than the model's context,
    and if ``kv_bytes`` or ``prefix_cache_bytes`` are too small for 16 tokens.
    """
    check_vocabulary(model, tokenizer.size)
    adapters = adapters or {}
    model_context = model.config.context_length
    if max_context is not None and max_context > model_context:
        raise UserError(f"--max_context is {max_context:,}; this model has a context of {model_context:,} tokens.")
    chat_format = ChatFormat(tokenizer)
    if not chat_format.has_template:
        log.warning(PLAIN_NOTICE)
    token_names, planner, notice = TokenNames(tokenizer), AnswerPlanner(chat_format), SpecialTextNotice(tokenizer)
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

    listed = {name: 0, **{adapter: number for number, adapter in enumerate(adapters, 1)}}

    def choose_model(requested: str | None) -> tuple[str, int]:
        """Return the name and the number of the adapter that a request is for; 0: the base alone."""
        found = name if requested in (None, ALIAS) else requested
        if found not in listed:
            others = f" with the adapters {', '.join(adapters)}" if adapters else ""
            message = f"There is no model {found[:80]!r}; this is {name!r}{others}."
            raise ApiError(404, message, "model", "model_not_found")
        return found, listed[found]

    async def read_request(http_request: Request, request_type: type[R]) -> R:
        body = bytearray()
        async for part in http_request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise ApiError(413, f"The body is longer than {_MAX_BODY_BYTES:,} bytes.")
        request = parse_request(request_type, bytes(body))
        choose_model(getattr(request, "model", None))
        return request

    async def encode(request: CompletionRequest | ChatRequest) -> tuple[list[list[int]], AnswerPlan]:
        plan = await planner.plan(request)
        prompts = await asyncio.to_thread(request.encode_prompts, chat_format)
        if isinstance(request, ChatRequest) and plan.has_form:
            prompts = [chat_format.end_reasoning(prompt) for prompt in prompts]
        return prompts, plan

    async def generate(http_request: Request, form: ApiForm) -> Response:
        try:
            return await generate_in_form(http_request, form)
        except ApiError as error:
            raise form.rename_field(error) from None

    async def generate_in_form(http_request: Request, form: ApiForm) -> Response:
        outer_request = await read_request(http_request, form.request_type)
        request = form.translate(outer_request)
        request.model, adapter = choose_model(getattr(outer_request, "model", None))
        count = request.count_prompts() * request.completions_per_prompt
        if not 0 < count <= scheduler.capacity:
            raise ApiError(400, f"{count} completions are requested; 1 to {scheduler.capacity} are possible.", "n")
        prompts, plan = await encode(request)
        await asyncio.to_thread(notice.check, request)
        response = GenerationResponse(
            request,
            prompts,
            chat_format,
            token_names,
            context_length,
            speculative_tokens,
            plan,
            form.cuts_at_context,
            is_limited=context_length < model_context,
        )
        choices = {choice.generation: choice for choice in response.choices}
        for generation in choices:
            generation.adapter = adapter
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
            events = form.write_events(outer_request, response.chunks(form.has_running_usage))
            return EventStream(events, response, scheduler)
        try:
            body = await until_disconnect(http_request, response.whole())
        finally:
            cancel(response, scheduler)
        if body is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(form.write_whole(outer_request, body))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, openai_form(CompletionRequest))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generate(request, openai_form(ChatRequest))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await generate(request, RESPONSES)

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await generate(request, MESSAGES)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        try:
            [prompt], _ = await encode((await read_request(request, CountTokensRequest)).to_chat())
        except ApiError as error:
            raise MESSAGES.rename_field(error) from None
        return {"input_tokens": len(prompt)}

    embedder = Embedder(model, tokenizer, scheduler, pooling)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read_request(request, EmbeddingRequest)
        response = await until_disconnect(request, embedder.respond(body, *choose_model(body.model)))
        return response or Response(status_code=CLIENT_CLOSED_REQUEST)

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
    model_json |= {"aliases": [ALIAS] if name != ALIAS else [], "identity": identity}
    model_json |= {"has_chat_template": chat_format.has_template, "special_tokens": list(tokenizer.special_ids)}
    model_json["num_parameters"] = parameter_count(model.config)["total"]
    model_json["max_model_len"] = context_length  # vLLM's name, as parent
    adapter_json = {"aliases": [], "parent": name}
    models_json = {name: model_json}
    models_json |= {
        key: {**model_json, "id": key, "identity": value, **adapter_json} for key, value in adapters.items()
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [*models_json.values()]}

    @app.get("/v1/models/{model_id:path}")
    async def model_info(model_id: str) -> dict[str, Any]:
        return models_json[choose_model(model_id)[0]]

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
    return error.response(request.url.path)


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
