"""``textmill dialogs``: rows of fine-tuning data in the chat template, their trained tokens in colour or brackets."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TextIO

from lm.common.errors import UserError
from lm.data.chat_template import TemplatePart
from lm.data.dialog_preview import Preview
from textmill.cli.terminal import color, shows_color

_TRAINED, _SPECIAL = 32, 2  # codes of SGR: green, dim
_MARKS = "⟦", "⟧"  # around trained tokens, without colour
_MAX_CHARACTERS = 2000  # of a message
# Control characters, which a terminal would obey, and those that turn the direction of a text.
_CONTROLS = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def format_preview(preview: Preview, url: str, stream: TextIO) -> str:
    """Return the preview of a file as text for ``stream``. Raises UserError if the file has no rows."""
    if not preview.checked:
        raise UserError(f"{url} has no rows; give a file of JSON Lines, a JSON array, CSV or Parquet.")
    has_color = shows_color(stream)
    blocks = [f"{url}: {preview.forms or 'no row can be used'}"]
    for name, shown in preview.rows:
        place = name.removeprefix(f"{url}, ")
        if isinstance(shown, str):
            blocks.append(f"{place}: left out: {_escape(shown)}")
            continue
        for dialog in shown:
            counts = f": {dialog.tokens:,} tokens, {dialog.trained_tokens:,} trained" if dialog.tokens else ""
            counts += f"; {dialog.context_problem}" if dialog.context_problem else ""
            title = ", ".join(filter(None, (place, dialog.kind)))
            blocks.append(f"{title}{counts}\n{_format_parts(dialog.parts, stream if has_color else None)}")
    return "\n\n".join([*blocks, _summarize(preview, url, stream if has_color else None)]) + "\n"


def _summarize(preview: Preview, url: str, stream: TextIO | None) -> str:
    trained = color("green", _TRAINED, stream) if stream else f"between {_MARKS[0]} and {_MARKS[1]}"
    rows = f"the {preview.checked:,} rows" if preview.is_whole else f"the first {preview.checked:,} rows"
    lines = [f"Trained tokens are {trained}."]
    damaged = preview.damaged
    if not damaged.count:
        return "\n".join([*lines, f"None of {rows} is damaged."])
    lines.append(f"Of {rows}, {damaged.count:,} {'is' if damaged.count == 1 else 'are'} damaged and left out:")
    lines += (f"  {_escape(name.removeprefix(f'{url}, '))}" for name in damaged.names[:10])
    if damaged.count > 10:
        lines.append(f"  and {damaged.count - 10:,} more")
    return "\n".join(lines)


def _format_parts(parts: Sequence[TemplatePart], stream: TextIO | None) -> str:
    if stream:
        return "".join(
            color(_shorten(part.text), _TRAINED, stream) if part.is_target
            else color(part.text, _SPECIAL, stream) if part.is_special
            else _shorten(part.text)
            for part in parts
        )  # fmt: skip
    text = ""
    for is_target, group in groupby(parts, lambda part: part.is_target):
        inner = "".join(_shorten(part.text) for part in group)
        text += f"{_MARKS[0]}{inner}{_MARKS[1]}" if is_target else inner
    return text


def _shorten(text: str) -> str:
    """Return a message without its middle if it is long, and without characters that a terminal would obey."""
    left_out = len(text) - _MAX_CHARACTERS
    if left_out > 100:
        half = _MAX_CHARACTERS // 2
        text = f"{text[:half]} […{left_out:,} characters…] {text[-half:]}"
    return _escape(text)


def _escape(text: str) -> str:
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
