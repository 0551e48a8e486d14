"""Grammars, schemas and texts for tests of structured output."""

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st

from lm.inference.constraints import Constraint, ConstraintCompiler
from lm.inference.grammars import Grammar
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import make_tokenizer

NEEDS_LLGUIDANCE = "llguidance is not installed"


@cache
def words_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes, parts of words, and four special tokens."""
    pytest.importorskip("llguidance", reason=NEEDS_LLGUIDANCE)
    return make_tokenizer()


@cache
def _compiler() -> ConstraintCompiler:
    return ConstraintCompiler(words_tokenizer())


def make_constraint(grammar: Grammar) -> Constraint:
    """Return a constraint over the ids of :func:`words_tokenizer`."""
    return _compiler().compile(grammar)


_names = st.text('ab_é "\\\n', min_size=1, max_size=4)


def _objects(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = list(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(make, st.dictionaries(_names, children, max_size=4), st.integers(0, 4))


def _arrays(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def make(items: dict[str, Any], smallest: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": smallest, "maxItems": smallest + more}

    return st.builds(make, children, st.integers(0, 2), st.integers(0, 2))


def _range(kind: str, low: float, size: float) -> dict[str, Any]:
    return {"type": kind, "minimum": low, "maximum": low + size}


_leaves = st.one_of(
    st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 3), st.integers(0, 9)
    ),
    st.builds(_range, st.just("integer"), st.integers(-1000, 1000), st.integers(0, 999)),
    st.builds(_range, st.just("number"), st.integers(-100, 100), st.sampled_from([0.25, 1, 1.5, 77])),
    st.builds(lambda values: {"enum": values}, st.lists(st.none() | st.booleans() | _names, min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.lists(st.integers(-9, 9), max_size=3) | _names),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-f]{2}(-[0-9]+)?x$"}]),
)
schemas = st.recursive(
    _leaves,
    lambda children: (
        _objects(children) | _arrays(children) | st.builds(lambda a, b: {"anyOf": [a, b]}, children, children)
    ),
    max_leaves=6,
)
"""JSON schemas of bounded strings, arrays and numbers."""


def is_valid_json(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that the library ``jsonschema`` finds valid."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def random_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a JSON schema of an object with bounded strings, arrays and numbers."""

    def leaf() -> dict[str, Any]:
        low = source.randint(-99, 99)
        return source.choice(
            [
                {"type": "string", "minLength": source.randint(0, 2), "maxLength": source.randint(2, 8)},
                _range("integer", low, source.randint(0, 999)),
                _range("number", low, source.choice([0.5, 1, 9, 77])),
                {"enum": source.sample(["a", "é", 'q"', 1, None, True], 3)},
                {"type": "boolean"},
            ]
        )

    def value() -> dict[str, Any]:
        match source.randrange(6):
            case 0:
                return {"type": "array", "items": leaf(), "minItems": 1, "maxItems": source.randint(1, 3)}
            case 1 if depth < 2:
                return random_schema(source, depth + 1)
        return leaf()

    properties = {name: value() for name in source.sample(["a", "b c", "größe", "d", "e"], source.randint(1, 3))}
    required = [name for name in properties if source.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
