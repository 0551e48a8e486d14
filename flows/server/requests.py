"""Requests of OpenAI's API that the server accepts, and the API's error format.

Source: https://platform.openai.com/docs/api-reference (completions, chat).
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.inference.chat_format import ChatFormat
from lm.inference.completion import encode_prompt
from lm.inference.config import SampleConfig

T = TypeVar("T")
_List = Annotated[list[T], Field(fail_fast=True)]  # report the first wrong item only, not a million
_Empty = Annotated[T, Field(max_length=0)]


class ApiError(Exception):
    """An error that the client receives in OpenAI's format."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        error_type = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        return JSONResponse(self.body, self.status, {"Retry-After": "1"} if self.status == 429 else None)


class _StrictModel(BaseModel):
    """Rejects fields of a wrong type. Unknown fields are ignored, because newer clients send newer fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _StreamOptions(_StrictModel):
    include_usage: bool | None = None


class GenerationRequest(_StrictModel):
    """The common fields of completion and chat requests. Missing fields and null mean the default of SampleConfig.

    Features that the server lacks are accepted only with a value that has no effect. Some bounds are tighter than
    OpenAI's: float32 must be able to represent all results, or the whole batch fails.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0, le=1 << 30)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: _Empty[dict[str, float]] | None = None
    n: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def sample_config(self, max_new_tokens: int, *extra_stops: str) -> SampleConfig:
        """Return the sampling parameters, with additional stop texts."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        parameters: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SampleConfig(**parameters, max_new_tokens=max_new_tokens, stop=[*stops, *extra_stops])


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: str | _List[str] | _List[int] | _List[_List[int]]
    suffix: _Empty[str] | None = None
    best_of: int | None = Field(None, ge=1, le=1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)

    def _prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        return prompts or [[item for item in self.prompt if isinstance(item, int)]]

    def count_prompts(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts())

    def encode_prompts(self, chat_format: ChatFormat) -> list[list[int]]:
        """Return the token ids of the prompts."""
        encode = partial(encode_prompt, chat_format.tokenizer)
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in self._prompts()]


class _TextPart(_StrictModel):
    type: Literal["text"]
    text: str


class _ResponseFormat(_StrictModel):
    type: Literal["text"]


class _ChatMessage(_StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _List[_TextPart]


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[_List[_ChatMessage], Field(min_length=1)]
    tools: _Empty[list[Any]] | None = None
    response_format: _ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None

    def count_prompts(self) -> int:
        """Return 1: the dialog is a single prompt."""
        return 1

    def encode_prompts(self, chat_format: ChatFormat) -> list[list[int]]:
        """Return the token ids of the prompt for the answer to the dialog. Raise ApiError if its roles do not fit."""
        messages = []
        for message in self.messages:
            content = message.content
            text = content if isinstance(content, str) else "".join(part.text for part in content)
            messages.append(Message(role="system" if message.role == "developer" else message.role, content=text))
        try:
            return [chat_format.encode(messages)]
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None


R = TypeVar("R", bound=GenerationRequest)


def parse_request(request_type: type[R], body: bytes) -> R:
    """Parse a JSON body. Raise ApiError if it is invalid."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    location = errors[0]["loc"]
    reasons = dict.fromkeys(error["msg"] for error in errors if error["loc"][:1] == location[:1])
    path = ".".join(map(str, location)) or "The body"
    raise ApiError(400, f"{path}: {', or: '.join(reasons)}.", str(location[0]) if location else None)
