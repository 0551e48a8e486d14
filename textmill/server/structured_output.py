"""Structured output: the constraint that a request asks for, compiled without delaying other requests."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lm.common.errors import UserError
from lm.inference.constraints import Constraint, ConstraintCompiler
from lm.inference.grammars import Grammar
from lm.tokenizer.text_tokenizer import TextTokenizer
from textmill.server.fields import StructuredOutputs
from textmill.server.requests import ApiError, GenerationRequest

_ANY_OBJECT = {"type": "object"}


class ConstraintFactory:
    """Makes the constraints of requests to a model, one after another in a thread of its own."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._compiler = ConstraintCompiler(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    async def make(self, request: GenerationRequest) -> Constraint | None:
        """Return the constraint of a request, None without one.

        Raises ApiError, with the name of the field, for more than one constraint, and for one that is invalid, that
        takes too long to compile, or that needs a missing library.
        """
        fields = list(_find_grammars(request))
        if not fields:
            return None
        name, make_grammar = fields[-1]
        if len(fields) > 1:
            raise ApiError(400, f"{name}: The answer has one constraint already: {fields[0][0]}. Leave one out.", name)
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: self._compiler.compile(make_grammar()))
        except UserError as error:
            raise ApiError(400, f"{name}: {error}", name) from None


def _find_grammars(request: GenerationRequest) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    """Yield the name of each field that constrains the answer, and the function that makes its grammar."""
    if (response_format := request.response_format) is not None and response_format.type != "text":
        named = response_format.json_schema if response_format.type == "json_schema" else None
        yield "response_format", partial(Grammar.from_json_schema, named.schema_object if named else _ANY_OBJECT)
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
