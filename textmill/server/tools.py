"""The tools of a chat request, and which of them an answer may call.

Source: https://platform.openai.com/docs/guides/function-calling.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from textmill.server.fields import FailFastList, StrictModel

_MAX_TOOLS = 512
_ANY_OBJECT = {"type": "object"}
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Function(StrictModel):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as a chat template takes it."""
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        parameters = function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


class _NamedFunction(StrictModel):
    name: _Name


class NamedChoice(StrictModel):
    """The choice of one tool."""

    type: Literal["function"]
    function: _NamedFunction


_Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedChoice, Tag("named[]")],
    Discriminator(lambda value: "str" if isinstance(value, str) else "named[]"),  # errors of one form only
]


class ToolFields(StrictModel):
    """The fields of a request that say which tools there are."""

    tools: Annotated[FailFastList[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: list[Tool] | None) -> list[Tool] | None:
        counts = Counter(tool.function.name for tool in tools or [])
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise PydanticCustomError("twice", "Two tools have the name {name}", {"name": repr(twice[:80])})
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _check_choice(cls, choice: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools") or []]
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            name = {"name": repr(choice.function.name[:80])}
            raise PydanticCustomError("unknown", "There is no tool with the name {name}", name)
        if choice == "required" and not names:
            raise PydanticCustomError("missing", "There are no tools to call")
        return choice

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools in the prompt: all, but none if the model may not call any."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def needs_call(self) -> bool:
        """Whether the answer must be a call."""
        return bool(self.shown_tools) and self.tool_choice not in (None, "auto")

    @property
    def is_strict(self) -> bool:
        """Whether a tool asks for arguments that fit its schema."""
        return any(tool.function.strict for tool in self.shown_tools)

    def schemas(self) -> Mapping[str, Mapping[str, Any] | None]:
        """Return the JSON schemas of the arguments that a constrained answer keeps to, by the names of the tools that
        it may call; None for a tool without any. Where no call is needed, any object does for tools that are not
        strict."""
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        tools = [tool.function for tool in self.shown_tools if chosen in (None, tool.function.name)]
        held = {tool.name for tool in tools if self.needs_call or tool.strict}
        parameters = {tool.name: tool.parameters or None for tool in tools}
        return {name: schema if name in held or schema is None else _ANY_OBJECT for name, schema in parameters.items()}
