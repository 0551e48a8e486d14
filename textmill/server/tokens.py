"""``POST /tokenize`` and ``/detokenize``, in the form of vLLM: the ids of a text or a dialog, and the text of ids."""

from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from lm.inference.chat_format import ChatFormat
from textmill.server.fields import FailFastList, StrictModel
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest, parse_request


class TokenizeRequest(StrictModel):
    """The body of ``POST /tokenize``: a ``prompt`` as in a completion, or ``messages`` as in a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("missing", "The body needs a prompt or messages")
        return self

    def encode(self, chat_format: ChatFormat) -> list[int]:
        """Return the ids. Raise ApiError as a completion or a chat does."""
        body = self.model_dump_json(exclude_none=True).encode()
        if self.messages is None:
            return parse_request(CompletionRequest, body).encode_prompts(chat_format)[0]
        return parse_request(ChatRequest, body).encode_prompts(chat_format)[0]


class DetokenizeRequest(StrictModel):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: FailFastList[int] = Field(max_length=1 << 20)

    def decode(self, chat_format: ChatFormat) -> str:
        """Return the text. Raise ApiError for an id outside the vocabulary."""
        if unknown := [token for token in self.tokens if token not in chat_format.tokenizer.vocab]:
            raise ApiError(400, f"tokens: {unknown[0]} is no token id of the model.", "tokens")
        return chat_format.tokenizer.decode(self.tokens)
