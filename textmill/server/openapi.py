"""The OpenAPI document of the server, from which programs make clients and forms."""

from collections.abc import Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from textmill.server.embeddings import EmbeddingRequest
from textmill.server.fields import StrictModel
from textmill.server.messages_request import CountTokensRequest, MessagesRequest
from textmill.server.requests import ChatRequest, CompletionRequest
from textmill.server.responses_api import ResponsesRequest
from textmill.server.tokens import DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[StrictModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def openapi_document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the document of ``routes``, with the fields that the server supports in the bodies of requests.

    The handlers read a body themselves, because its length is limited, so FastAPI does not see its form.
    Source: https://spec.openapis.org/oas/v3.1.0
    """
    document = get_openapi(title="textmill", version="1", routes=routes)
    _, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    schemas = definitions["$defs"]
    for schema in schemas.values():
        # A field of any type is one that the server refuses.
        fields = schema.get("properties", {}).items()
        schema["properties"] = {name: field for name, field in fields if field.keys() - {"default", "title"}}
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    for path, body in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        content = {"application/json": {"schema": reference}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
