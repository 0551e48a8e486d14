"""How the answers to a request are generated and read: their constraint, and the calls and reasoning in them.

Constraints are compiled without delaying other requests.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lm.common.errors import UserError
from lm.inference.answer_parser import AnswerMarks
from lm.inference.call_grammar import ANY_TEXT, make_call_grammar
from lm.inference.chat_format import ChatFormat
from lm.inference.constraints import Constraint, ConstraintCompiler
from lm.inference.grammars import Grammar, require_llguidance, write_json_rule
from textmill.server.fields import ResponseFormat, StructuredOutputs
from textmill.server.requests import ApiError, ChatRequest, GenerationRequest

_ANY_OBJECT = {"type": "object"}
_MAX_CHECK_SECONDS = 2.0  # other requests wait meanwhile


@dataclass(frozen=True)
class AnswerPlan:
    """How the answers to a request are generated and read."""

    constraint: Constraint | None = None
    has_form: bool = False
    """Whether the constraint is for the whole answer, which then has no reasoning and no white space around it."""
    marks: AnswerMarks = AnswerMarks()
    """What the answers can hold besides content."""
    has_certain_calls: bool = False
    """Whether the constraint makes a call of all that begins like one."""


class AnswerPlanner:
    """Plans the answers to requests. Their constraints are compiled one after another in a thread of its own."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._chat_format = chat_format
        self._compiler = ConstraintCompiler(chat_format.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    async def plan(self, request: GenerationRequest) -> AnswerPlan:
        """Return the plan of a request.

        Raises ApiError, with the name of the field, for more than one constraint, for one that is invalid, that takes
        too long to compile, or that needs a missing library, and for tools that the model's template cannot have.
        """
        marks = AnswerMarks()
        if isinstance(request, ChatRequest):
            names = [tool.function.name for tool in request.shown_tools]
            try:
                marks = await asyncio.to_thread(self._chat_format.find_marks, names)
            except UserError as error:
                raise ApiError(400, f"tools: {error}", "tools") from None
        fields = list(self._find_grammars(request))
        if not fields:
            return AnswerPlan(marks=marks)
        name, make_grammar = fields[-1]
        if len(fields) > 1:
            raise ApiError(400, f"{name}: The answer has one constraint already: {fields[0][0]}. Leave one out.", name)
        loop = asyncio.get_running_loop()
        try:
            constraint = await loop.run_in_executor(self._thread, lambda: self._compiler.compile(make_grammar()))
        except UserError as error:
            with suppress(UserError):
                await loop.run_in_executor(self._thread, self._check_tools, request)
            raise ApiError(400, f"{name}: {error}", name) from None
        if name == "tools":
            return AnswerPlan(constraint, False, marks, has_certain_calls=True)
        # An answer of another form has no calls, whatever it looks like.
        marks = replace(marks, has_reasoning=False) if name in ("tool_choice", "response_format") else AnswerMarks()
        return AnswerPlan(constraint, True, marks, has_certain_calls=name == "tool_choice")

    def _check_tools(self, request: GenerationRequest) -> None:
        """Raise ApiError if the parameters of a tool are the reason why a grammar of calls cannot be compiled, and if
        this is found in a few seconds."""
        require_llguidance()
        deadline = time.monotonic() + _MAX_CHECK_SECONDS
        for name, schema in request.schemas().items() if isinstance(request, ChatRequest) else ():
            if time.monotonic() > deadline:
                return
            try:
                self._compiler.compile(Grammar.from_json_schema(schema or _ANY_OBJECT))
            except UserError as error:
                raise ApiError(400, f"tools: The parameters of {name[:80]!r}: {error}", "tools") from None

    def _find_grammars(self, request: GenerationRequest) -> Iterator[tuple[str, Callable[[], Grammar]]]:
        """Yield the name of each field that constrains the answer, and the function that makes its grammar."""
        json_schema = _find_json_schema(request.response_format)
        if isinstance(request, ChatRequest) and request.shown_tools:
            make = partial(
                make_call_grammar,
                self._chat_format.require_call_form(),
                request.schemas(),
                self._chat_format.tokenizer.special_ids,
                allows_several=request.parallel_tool_calls is not False,
            )
            if request.needs_call:
                yield "tool_choice", make
            elif json_schema is not None:
                yield "response_format", partial(_make_calls_or_json, make, json_schema)
                json_schema = None
            elif request.is_strict:
                yield "tools", partial(make, content=ANY_TEXT)
        if json_schema is not None:
            yield "response_format", partial(Grammar.from_json_schema, json_schema)
        yield from _find_outputs(request)


def _make_calls_or_json(make: Callable[..., Grammar], schema: dict[str, Any]) -> Grammar:
    return make(content=write_json_rule(schema))


def _find_json_schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    named = response_format.json_schema if response_format.type == "json_schema" else None
    return named.schema_object if named else _ANY_OBJECT


def _find_outputs(request: GenerationRequest) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    """Yield the fields of vLLM that constrain the answer."""
    outputs = request.structured_outputs or StructuredOutputs()
    values: list[tuple[str, Callable[[Any], Grammar], Any]] = [
        ("structured_outputs", Grammar.from_json_schema, outputs.json_schema),
        ("structured_outputs", Grammar.from_json_schema, _ANY_OBJECT if outputs.json_object else None),
        ("structured_outputs", Grammar.from_regex, outputs.regex),
        ("structured_outputs", Grammar.from_choices, outputs.choice),
        ("structured_outputs", Grammar.from_grammar, outputs.grammar),
        ("guided_json", Grammar.from_json_schema, request.guided_json),
        ("guided_json_object", Grammar.from_json_schema, _ANY_OBJECT if request.guided_json_object else None),
        ("guided_regex", Grammar.from_regex, request.guided_regex),
        ("guided_choice", Grammar.from_choices, request.guided_choice),
        ("guided_grammar", Grammar.from_grammar, request.guided_grammar),
    ]
    for name, make, value in values:
        if value is not None:
            yield name, partial(make, value)
