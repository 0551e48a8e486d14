"""Grammars of structured output: a JSON schema, a regular expression, a choice or a grammar, as llguidance reads it.

Sources: https://json-schema.org; https://github.com/guidance-ai/llguidance (its Lark dialect); Koo et al. 2024
(automata over a tokenizer's vocabulary).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.common.errors import UserError

SPECIAL_MARK = b"\xff"
"""What llguidance expects before the name of a special token. No UTF-8 text has this byte."""
END = "<|end of the text|>"
"""The name of llguidance's end token."""
_MAX_SOURCE_LENGTH = 1 << 17
_MAX_GBNF_LENGTH = 1 << 14  # its conversion is quadratic in the number of rules
_MAX_REASON_LENGTH = 200
# One space, or a line break with an indent: a model cannot fill its answer with white space. No escapes \uXXXX: with
# them, llguidance lets an additional property have the name of a declared one, and another type.
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]|\n([ ]{0,40}|\t{0,20})", "json_allowed_escapes": '"\\bfnrt'}
# llguidance would replace a mask by the one token that its own encoding of the text begins with.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class Grammar:
    """The texts that a constraint allows, in llguidance's Lark dialect. Not yet checked by llguidance."""

    source: str
    subject: str
    """What the user wrote, for messages: ``JSON schema``."""

    def __post_init__(self) -> None:
        if (size := len(self.source)) > _MAX_SOURCE_LENGTH:
            raise UserError(f"The {self.subject} has {size:,} characters; at most {_MAX_SOURCE_LENGTH:,} are possible.")

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """Return the grammar of the JSON texts that a schema, an object or its JSON text, allows.

        The properties come in the order of the schema. Raises UserError for text that is no JSON object.
        """
        return cls.from_rules(f"start: {write_json_rule(schema)}", "JSON schema")

    @classmethod
    def from_rules(cls, rules: str, subject: str) -> "Grammar":
        """Return the grammar of rules in llguidance's dialect; they may have parts of :func:`write_json_rule` and
        :func:`write_literal`. ``subject`` is what the user wrote."""
        return cls(f"{rules}{_NO_FORCING}", subject)

    @classmethod
    def from_regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of the texts that match the whole ``pattern``, in Rust's syntax."""
        library = require_llguidance()
        lark = json.loads(library.LLMatcher.grammar_from_regex(_require_unicode(pattern)))["grammars"][0]
        return cls(f"{lark['lark_grammar']}{_NO_FORCING}", "regular expression")

    @classmethod
    def from_choices(cls, choices: Sequence[str]) -> "Grammar":
        """Return the grammar of several texts. Raises UserError if there are none."""
        if not choices:
            raise UserError("The list of choices is empty.")
        return cls.from_rules(f"start: {' | '.join(map(write_literal, choices))}", "list of choices")

    @classmethod
    def from_grammar(cls, text: str) -> "Grammar":
        """Return a grammar in llguidance's Lark dialect, or in llama.cpp's GBNF: ``root ::= "yes" | "no"``.

        Raises UserError for GBNF that cannot be read.
        """
        if "::=" in _require_unicode(text):
            require_llguidance()
            if len(text) > _MAX_GBNF_LENGTH:
                raise UserError(
                    f"The grammar has {len(text):,} characters; GBNF can have at most {_MAX_GBNF_LENGTH:,}."
                )
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                text = gbnf_to_lark(text)
            except Exception as error:  # the converter raises several types
                raise UserError(f"The grammar is invalid: {_shorten(str(error))}.") from None
        return cls(text + _NO_FORCING, "grammar")

    def explain(self, reason: str) -> UserError:
        """Return the error for a grammar that llguidance does not read. ``reason`` is its message."""
        return UserError(f"The {self.subject} is invalid or not supported: {_shorten(reason)}.")

    def compile(self, tokenizer: Any) -> Any:
        """Return an ``LLMatcher`` at the start of a text, for an ``LLTokenizer``.

        Raises UserError for a grammar that llguidance does not read.
        """
        library = require_llguidance()
        # Some 100 MB of memory; 2,000 optional properties.
        limits = library.LLParserLimits(
            max_items_in_row=8000, max_lexer_states=50_000, precompute_large_lexemes=False, verbose_errors=False
        )
        lark = library.LLMatcher.grammar_from_lark(self.source)
        matcher = library.LLMatcher(tokenizer, lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise self.explain(matcher.get_error())
        return matcher


def write_json_rule(schema: Mapping[str, Any] | str) -> str:
    """Return the part of a rule for the JSON texts that a schema, an object or its JSON text, allows.

    Raises UserError for text that is no JSON object.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise UserError("The JSON schema is not an object.")
        return f"%json {json.dumps({**parsed, 'x-guidance': _JSON_OPTIONS}, allow_nan=False)}"
    except UserError:
        raise
    except RecursionError:
        raise UserError("The JSON schema is nested too deeply.") from None
    except ValueError as error:  # no JSON, a number that is not finite, or one of thousands of digits
        raise UserError(f"The JSON schema is not JSON: {_shorten(str(error))}.") from None


def write_literal(text: str) -> str:
    """Return the part of a rule for a text. Raises UserError for a lone surrogate."""
    return json.dumps(_require_unicode(text)).replace("\x7f", "\\u007f")


def name_special(token: str) -> str:
    """Return the name of a special token in rules: itself if it is of the form ``<name>``, else one of its bytes."""
    return token if re.fullmatch(r"<[^<>\[\]\s]+>", token) else f"<|bytes:{token.encode().hex()}|>"


def require_llguidance() -> Any:
    """Return the library. Raises UserError if it is missing."""
    try:
        import llguidance
    except ImportError:
        raise UserError("Structured output needs an extra: pip install 'textmill[grammar]'.") from None
    return llguidance


def _require_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("The text holds a lone surrogate, which is not valid Unicode.") from None
    return text


def _shorten(reason: str) -> str:
    """Return the part of llguidance's message that tells a user what is wrong, in one line."""
    cause = re.search(r"^error: (.+)", reason, re.MULTILINE)  # of the regex parser, below the pattern
    line = cause[1] if cause else next(iter(reason.strip().splitlines()), "no reason is known")
    line = re.sub(r'^at 1\(8\): (invalid regex ".*" \(in regex\)|failed to compile JSON schema): ', "", line)
    line = line.removesuffix(".")
    return line if len(line) <= _MAX_REASON_LENGTH else f"{line[:_MAX_REASON_LENGTH]}…"
