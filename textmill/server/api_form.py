"""The form of an API: which requests an endpoint takes, and how its responses are written.

Inside, each request is a completion or a chat of OpenAI's API. So other APIs are translations, and there is one engine.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from textmill.server.fields import StrictModel
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest, parse_request

Chunks = AsyncIterator[dict[str, Any]]
"""The JSON bodies of a stream of OpenAI's completions or chats."""


class ApiForm(NamedTuple):
    """The form of one endpoint. The functions get the request as it came."""

    request_type: type[StrictModel]
    translate: Callable[[Any], CompletionRequest | ChatRequest]
    write_whole: Callable[[Any, dict[str, Any]], dict[str, Any]]
    """Writes a response, from the JSON body of a completion or a chat."""
    write_events: Callable[[Any, Chunks], AsyncIterator[str]]
    """Writes server-sent events. Errors of the chunks become events."""
    field_names: Mapping[str, str] = MappingProxyType({})
    """The names of fields for errors, by those of a chat."""
    has_running_usage: bool = True
    """Whether each chunk has the usage so far."""
    cuts_at_context: bool = False
    """Whether an answer that needs more than the model's context ends there, instead of being refused."""

    def rename_field(self, error: ApiError) -> ApiError:
        """Return an error with the name that its field has in this API."""
        field = error.body["error"]["param"]
        if (name := self.field_names.get(field)) is None:
            return error
        message = error.body["error"]["message"]
        if message.startswith(f"{field}:"):
            message = name + message.removeprefix(field)
        error.body["error"] |= {"message": message, "param": name}
        return error


def make_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Return a chat request with the fields that are not None. Raise ApiError if it is invalid."""
    fields = {name: value for name, value in body.items() if value is not None}
    return parse_request(ChatRequest, json.dumps(fields).encode())


async def _write_openai_events(_: CompletionRequest | ChatRequest, chunks: Chunks) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
    except ApiError as error:
        yield f"data: {json.dumps(error.body)}\n\n"
    yield "data: [DONE]\n\n"


def openai_form(request_type: type[CompletionRequest] | type[ChatRequest]) -> ApiForm:
    """Return the form of OpenAI's completions or chats."""
    return ApiForm(
        request_type, lambda request: request, lambda _, body: body, _write_openai_events, has_running_usage=False
    )
