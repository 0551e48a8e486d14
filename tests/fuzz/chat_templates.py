"""Fuzz target for chat templates: published ones, with changed bytes and tags of each other, for changed dialogs."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.data.jinja_template import render_foreign
from tests.fuzz.choices import Choices, json_bytes, mutate, mutate_bytes
from tests.helpers.processes import PROJECT
from tests.helpers.tool_models import NOW, TOOL

_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "now"}}]},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "d", "reasoning_content": "e"},
]
_LONGEST = 16 << 20


@cache
def _sources() -> list[str]:
    return [path.read_text() for path in sorted((PROJECT / "tests" / "data" / "chat_templates").glob("*.jinja"))]


@cache
def _tags() -> list[str]:
    return sorted({tag for source in _sources() for tag in re.findall(r"\{[{%].*?[%}]\}", source, re.DOTALL)})


def chat_template(choices: Choices, folder: Path) -> None:
    """Render a template. It gives a text, or a short reason why not; the next one is rendered as if nothing was."""
    source = choices.pick(_sources())
    for _ in range(choices.below(3)):
        place = choices.below(len(source) + 1)
        source = source[:place] + choices.pick(_tags()) + source[place:]
    source = mutate_bytes(source.encode(), choices, 2).decode(errors="replace")
    variables = {"messages": _MESSAGES, "tools": [TOOL, NOW], "add_generation_prompt": True, "bos_token": "<s>"}
    try:
        changed = json.loads(json_bytes(mutate(variables, choices), choices))
    except (ValueError, RecursionError):
        changed = variables  # not JSON: no request has it
    try:
        text = render_foreign(source, changed if isinstance(changed, dict) else variables)
    except UserError as error:
        assert str(error).startswith("The chat template") and len(str(error)) < 1000, str(error)
    else:
        assert len(text) <= _LONGEST
    assert render_foreign("{{ 1 + 1 }}", {}) == "2"
