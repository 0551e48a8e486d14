"""The grammar of answers with calls of tools, whose arguments fit the JSON schemas of the tools."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from lm.common.errors import UserError
from lm.inference.call_form import CallForm
from lm.inference.grammars import Grammar, name_special, write_json_rule, write_literal

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = r"/(.|\n)*/"
"""The part of a rule for any text without special tokens."""


def make_call_grammar(
    form: CallForm,
    schemas: Mapping[str, Mapping[str, Any] | None],
    special_tokens: Collection[str] = (),
    *,
    allows_several: bool = True,
    content: str | None = None,
) -> Grammar:
    """Return the grammar of one call or ``allows_several``, in the form of a model.

    ``schemas`` has the JSON schema of the arguments of each tool by its name; None: the tool has no arguments.
    ``special_tokens`` are those of the tokenizer. The answer can also be ``content``, a part of a rule; with
    ``ANY_TEXT``, any text in which each mark of the form begins calls. Raises UserError for a schema of something
    other than an object.
    """

    def write(text: str) -> str:
        return _write_text(text, special_tokens)

    rules = [f"call: {write(form.before_name)} ({' | '.join(f'call_{number}' for number in range(len(schemas)))})"]
    for number, (name, schema) in enumerate(schemas.items()):
        rules.append(f"call_{number}: {write(form.write_name(name))} arguments_{number} {write(form.after_arguments)}")
        rules.append(f"arguments_{number}: {write_json_rule(_require_object(name, schema))}")
    more = f"({write(form.separator)} call)*" if allows_several and form.separator is not None else ""
    calls = f"call {more} {write(form.end)}"
    if content == ANY_TEXT and (mark := form.mark):
        rules.append(f"calls: {write(form.begin.partition(mark)[2])} {calls}\ntext: {ANY_TEXT}")
        times = "*" if allows_several else "?"
        if mark in special_tokens:
            rules.append(f"start: text ({name_special(mark)} calls text){times}")
        else:
            rules.append(f"before[suffix={write_literal(mark)}]: {ANY_TEXT}\nstart: (before calls){times} text")
    elif content == ANY_TEXT:
        begins = [f"{name_special(other)} calls | " for other in form.other_marks if other in special_tokens]
        rules.append(f"calls: {calls}\nstart: ({''.join(begins)}calls | text)?\ntext: /\\s*[^{{\\[\\s](.|\\n)*/")
    else:
        rules.append(f"start: {write(form.begin)} {calls}" + (f" | content\ncontent: {content}" if content else ""))
    return Grammar.from_rules("\n".join(rules), "JSON schema of a tool")


def _require_object(name: str, schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if schema is None:
        return _NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise UserError(f"The parameters of {name} must be a JSON schema of an object.")
    return {**schema, "type": "object"}


def _write_text(text: str, special_tokens: Collection[str]) -> str:
    """Return the part of a rule for a text with special tokens."""
    pattern = "|".join(sorted(map(re.escape, special_tokens), key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    return " ".join(
        name_special(part) if index % 2 else write_literal(part) for index, part in enumerate(parts) if part
    )
