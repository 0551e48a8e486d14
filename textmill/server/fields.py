"""Types of the fields of requests: strict ones, unsupported ones, and those of structured output.

Sources: https://platform.openai.com/docs/guides/structured-outputs; vLLM's ``structured_outputs``.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
FailFastList = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item only is reported, not a million."""


def refuse_unless(*harmless: Any) -> AfterValidator:
    """Refuse a value that would change the answer: all but null and ``harmless``."""

    def check(value: Any) -> Any:
        if value is not None and value not in harmless:
            raise PydanticCustomError("unsupported", "This server does not support it; leave it out")
        return value

    return AfterValidator(check)


Unsupported = Annotated[Any, refuse_unless(False, "", [])]


class StrictModel(BaseModel):
    """Rejects fields of a wrong type. Unknown fields are ignored, because newer clients send newer fields.

    A known field that would change the answer is declared as unsupported, so that no client takes the answer for the
    one that it asked for.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _NamedSchema(StrictModel):
    """The answer always keeps to the schema, also without ``strict``. The name and the description have no effect."""

    name: str | None = None
    schema_object: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "The type json_schema needs a json_schema")
        return self


class StructuredOutputs(StrictModel):
    """vLLM's ``structured_outputs``. One of the fields can be given."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: FailFastList[str] | None = None
    grammar: str | None = None
    structural_tag: Unsupported = None
    whitespace_pattern: Unsupported = None
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
