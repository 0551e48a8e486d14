"""What clients of ``textmill serve`` may ask for: the fields of OpenAI's requests, and its shape of an error."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lm import dialog
from lm.completion import prompt_ids
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer

T = TypeVar("T")
_Items = Annotated[list[T], Field(fail_fast=True)]  # a message for each of a million wrong items helps nobody

_Nothing = Annotated[T, Field(max_length=0)]


class Refused(Exception):
    """A request that is not done, and why."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The answer to the client."""
        return JSONResponse(self.body, self.status, {"Retry-After": "1"} if self.status == 429 else None)


class _Strict(BaseModel):
    """Fields of a wrong type are refused, and those that ask for what is not there; unknown ones are ignored: clients
    send what newer servers know."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _StreamOptions(_Strict):
    include_usage: bool | None = None


class Wanted(_Strict):
    """What completions and chats have in common. What is left out, or null, is as in SampleConfig.

    Some bounds are tighter than there: float32 computes with all numbers within them, and where it did not, the whole
    batch would fail.
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
    logit_bias: _Nothing[dict[str, float]] | None = None
    n: int | None = Field(None, ge=1)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def sampling(self, max_new_tokens: int, *stops: str) -> SampleConfig:
        """The settings of the draws, with more texts that end them."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        own = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SampleConfig(**given, max_new_tokens=max_new_tokens, stop=[*own, *stops])


class Completion(Wanted):
    """A request to go on with texts."""

    prompt: str | _Items[str] | _Items[int] | _Items[_Items[int]]
    suffix: _Nothing[str] | None = None
    best_of: int | None = Field(None, ge=1, le=1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)

    def prompts(self) -> Sequence[str | list[int]]:
        """Words, or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        words = [item for item in self.prompt if not isinstance(item, int)]
        return words or [[item for item in self.prompt if isinstance(item, int)]]


class _Part(_Strict):
    type: Literal["text"]
    text: str


class _Format(_Strict):
    type: Literal["text"]


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Items[_Part]


class Chat(Wanted):
    """A request to answer in a dialog."""

    messages: Annotated[_Items[_Message], Field(min_length=1)]
    tools: _Nothing[list[Any]] | None = None
    response_format: _Format | None = None
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        """The dialog, rendered by :mod:`lm.dialog`."""
        said = []
        for one in self.messages:
            content = one.content if isinstance(one.content, str) else "".join(part.text for part in one.content)
            said.append(dialog.Message("system" if one.role == "developer" else one.role, content))
        return [dialog.render(said)]


W = TypeVar("W", bound=Wanted)


def parse(kind: type[W], body: bytes) -> W:
    """The request in ``body``; raises Refused where it is none."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    param = str(found[0]["loc"][0]) if found[0]["loc"] else None
    reasons = [one["msg"] for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    where = ".".join(map(str, found[0]["loc"]))
    raise Refused(400, f"{where or 'The body'}: {', or: '.join(dict.fromkeys(reasons))}.", param)


def encoded(prompts: Sequence[str | list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of prompts."""
    return [prompt_ids(tokenizer, one) if isinstance(one, str) else one for one in prompts]
