"""Requests of OpenAI's API that the server accepts, and the API's error format.

Source: https://platform.openai.com/docs/api-reference (completions, chat).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from lm.common.errors import UserError
from lm.inference.chat_format import ChatFormat
from lm.inference.completion import encode_prompt
from lm.inference.config import SampleConfig
from lm.inference.infill import encode_infill, find_infill_ends
from lm.inference.sampler import LogitEdits
from lm.tokenizer.text_tokenizer import TextTokenizer
from textmill.server.chat_messages import ChatMessage
from textmill.server.fields import (
    FailFastList,
    ResponseFormat,
    StrictModel,
    StructuredOutputs,
    Unsupported,
    refuse_unless,
)
from textmill.server.tools import ToolFields

Prompts = str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]]
"""A text, texts, the ids of a text, or those of several."""
_Penalty = Annotated[float, Field(ge=-2, le=2)]

_MAX_COUNT = 1 << 31  # numbers of thousands of digits cannot be written into a message
_MAX_ALTERNATIVES = 20
_TAKEN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # of a chat template
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error that the client receives in OpenAI's format."""

    headers: Mapping[str, str] | None = None
    """Headers of the response. Default: those of the status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **fields: Any
    ) -> None:
        super().__init__(message)
        error_type = (
            "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        )
        self.status = status
        self.body = {"error": {"message": message, "type": error_type, "param": param, "code": code, **fields}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON body in Anthropic's format."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        error = {"type": _ANTHROPIC_TYPES.get(self.status, default), "message": self.body["error"]["message"]}
        return {"type": "error", "error": error}

    def response(self, path: str) -> Response:
        """Return the HTTP response to a request for ``path``, in the format of its API."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
        body = self.anthropic_body if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status, self.headers or headers.get(self.status))


class _StreamOptions(StrictModel):
    include_usage: bool | None = None


class GenerationRequest(StrictModel):
    """The common fields of completion and chat requests. Missing fields and null mean the default of SampleConfig.

    Features that the server lacks, also those of vLLM and llama.cpp, are accepted only with a value that has no effect.
    Some bounds are tighter than OpenAI's: float32 must be able to represent all results, or the whole batch fails.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=_MAX_COUNT)
    min_tokens: int | None = Field(None, ge=0, le=_MAX_COUNT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=1 << 30)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    n: int | None = Field(None, ge=1, le=_MAX_COUNT)
    # OpenAI's limit is 4; tasks of evaluation harnesses have more.
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # Structured output.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Unsupported = None
    grammar: Unsupported = None
    json_schema: Unsupported = None
    # Which tokens may come, and where a text ends.
    allowed_token_ids: Unsupported = None
    bad_words: Unsupported = None
    ignore_eos: Unsupported = None
    include_stop_str_in_output: Unsupported = None
    skip_special_tokens: Annotated[Any, refuse_unless(True)] = None
    # Sampling.
    use_beam_search: Unsupported = None
    typical_p: Annotated[Any, refuse_unless(1)] = None
    top_n_sigma: Annotated[Any, refuse_unless(0, -1)] = None
    mirostat: Unsupported = None
    dynatemp_range: Unsupported = None
    dry_multiplier: Unsupported = None
    xtc_probability: Unsupported = None
    # The prompt.
    prompt_embeds: Unsupported = None
    truncate_prompt_tokens: Unsupported = None

    @field_validator("top_k")
    @classmethod
    def _read_top_k(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value  # both turn it off

    def sample_config(self, max_new_tokens: int, *extra_stops: str) -> SampleConfig:
        """Return the sampling parameters, with additional stop texts."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        parameters: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SampleConfig(**parameters, max_new_tokens=max_new_tokens, stop=[*stops, *extra_stops])

    def find_stop_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """Return the ids that end an answer beside those of the model. Others than the model's can end none."""
        return frozenset(token_id for token_id in self.stop_token_ids or () if token_id < tokenizer.size)

    def logit_edits(self, vocab_size: int) -> LogitEdits:
        """Return the penalties and biases. Raise ApiError for a bias of an unknown token id."""
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            is_number = key.isascii() and key.isdecimal() and len(key) < 20
            if not (is_number and int(key) < vocab_size):
                message = f"logit_bias: {key[:40]!r} is not a token id; the model has the ids 0 to {vocab_size - 1}."
                raise ApiError(400, message, "logit_bias")
            biases[int(key)] = bias
        return LogitEdits(self.frequency_penalty or 0.0, self.presence_penalty or 0.0, biases, self.min_tokens or 0)


def list_texts(value: Prompts) -> Sequence[str | list[int]]:
    """Return the texts of a field, each as it is or as ids."""
    if isinstance(value, str):
        return [value]
    texts = [item for item in value if not isinstance(item, int)]
    return texts or [[item for item in value if isinstance(item, int)]]


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=_MAX_COUNT)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=_MAX_ALTERNATIVES)

    @property
    def num_alternatives(self) -> int | None:
        """Number of most likely tokens beside each log-probability; None if the response has no log-probabilities."""
        return self.logprobs

    @property
    def completions_per_prompt(self) -> int:
        """Number of completions to generate for a prompt. Raise ApiError if best_of does not fit."""
        count = self.n or 1
        if self.best_of is None:
            return count
        if self.best_of < count:
            raise ApiError(400, f"best_of is {self.best_of}; it must be at least n, which is {count}.", "best_of")
        if self.stream and self.best_of > count:
            raise ApiError(400, "best_of: a stream cannot wait for the best; use best_of = n.", "best_of")
        return self.best_of

    def find_stop_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """Return the ids that end an answer beside those of the model."""
        return super().find_stop_ids(tokenizer) | (find_infill_ends(tokenizer) if self.suffix else frozenset())

    def count_prompts(self) -> int:
        """Return the number of prompts."""
        return len(list_texts(self.prompt))

    def encode_prompts(self, chat_format: ChatFormat) -> list[list[int]]:
        """Return the token ids of the prompts. Raise ApiError if special tokens in them cannot be encoded, and for a
        suffix if the model has no tokens for it."""
        has_begin, parses_special = self.add_special_tokens is not False, bool(self.parse_special)
        if self.suffix and self.echo:
            raise ApiError(400, "echo: A prompt with a suffix is not one text, so it cannot be repeated.", "echo")

        def encode(prompt: str | list[int]) -> list[int]:
            tokenizer = chat_format.tokenizer
            if self.suffix:
                return encode_infill(tokenizer, prompt, self.suffix, has_begin=has_begin, parses_special=parses_special)
            if isinstance(prompt, str):
                return encode_prompt(tokenizer, prompt, has_begin=has_begin, parses_special=parses_special)
            return prompt

        try:
            return [*map(encode, list_texts(self.prompt))]
        except UserError as error:
            name = "suffix" if self.suffix else "parse_special"
            raise ApiError(400, f"{name}: {error}", name) from None


class ChatRequest(GenerationRequest, ToolFields):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[FailFastList[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=0, le=_MAX_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_ALTERNATIVES)

    functions: Unsupported = None
    function_call: Annotated[Any, refuse_unless("none", "auto")] = None
    modalities: Annotated[Any, refuse_unless([], ["text"])] = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    echo: Unsupported = None
    best_of: Annotated[Any, refuse_unless(1)] = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: Unsupported = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Unsupported = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_variables(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := next((name for name in _TAKEN_VARIABLES if name in (variables or {})), None):
            raise PydanticCustomError("taken", "{name} is set by other fields of the request", {"name": taken})
        return variables

    @property
    def num_alternatives(self) -> int | None:
        """Number of most likely tokens beside each log-probability; None if the response has no log-probabilities.

        Raise ApiError if only the most likely tokens are requested.
        """
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def completions_per_prompt(self) -> int:
        """Number of completions to generate for the dialog."""
        return self.n or 1

    def count_prompts(self) -> int:
        """Return 1: the dialog is a single prompt."""
        return 1

    def encode_prompts(self, chat_format: ChatFormat) -> list[list[int]]:
        """Return the token ids of the prompt for the answer to the dialog. Raise ApiError if its roles do not fit."""
        messages = [message.to_message() for message in self.messages]
        variables = {**(self.chat_template_kwargs or {})}
        if self.shown_tools:
            variables["tools"] = [tool.for_template() for tool in self.shown_tools]
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == continues:
            problem = "add_generation_prompt must be the opposite of continue_final_message; leave it out."
            raise ApiError(400, problem, "add_generation_prompt")
        if continues and messages[-1]["role"] != "assistant":
            problem = "continue_final_message needs a last message of the assistant, which the answer continues."
            raise ApiError(400, problem, "continue_final_message")
        try:
            return [chat_format.encode(messages, variables, continues=continues)]
        except UserError as error:
            raise ApiError(400, str(error), "messages") from None


R = TypeVar("R", bound=StrictModel)


def parse_request(request_type: type[R], body: bytes) -> R:
    """Parse a JSON body. Raise ApiError if it is invalid."""
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
    location = errors[0]["loc"]
    reasons = dict.fromkeys(error["msg"] for error in errors if error["loc"][:1] == location[:1])
    fields = [part for part in location if isinstance(part, int) or (part.isidentifier() and part != "str")]
    path = ".".join(map(str, fields)) or "The body"
    raise ApiError(400, f"{path}: {', or: '.join(reasons)}.", str(location[0]) if location else None)
