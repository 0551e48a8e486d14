"""A preview of fine-tuning data: the first rows of a file in the chat template, the trained parts, what is left out."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING

from lm.data.chat_template import EncodedExample, TemplatePart, encode_dialog, split_dialog
from lm.data.dialog_formats import Example, RowParser
from lm.data.dialogs import Message, PreferencePair
from lm.text.rows import DamagedRows, iterate_rows

if TYPE_CHECKING:
    from lm.tokenizer.tokenizer import Tokenizer

_CHECKED_ROWS = 1000


@dataclass(frozen=True)
class PreviewDialog:
    """A dialog of a row as the model sees it. A row of preferences has two."""

    kind: str
    """``chosen`` or ``rejected``, if the row is one of preferences."""
    parts: list[TemplatePart]
    tokens: int | None = None
    """Number of tokens, if a tokenizer is given."""
    trained_tokens: int | None = None
    context_problem: str = ""
    """What a context of the given length leaves out, if anything."""


@dataclass
class Preview:
    """The first rows of a file."""

    rows: list[tuple[str, list[PreviewDialog] | str]] = field(default_factory=list)
    """Each with its file and line, and its dialogs, or the reason why it is left out."""
    checked: int = 0
    """Number of the rows that were read."""
    is_whole: bool = True
    """Whether they are all rows of the file."""
    forms: str = ""
    """The forms of the rows and their fields."""
    damaged: DamagedRows = field(default_factory=DamagedRows)
    """The rows that are left out, of those that were read."""


def preview_file(url: str, count: int, tokenizer: "Tokenizer | None" = None, context_length: int = 0) -> Preview:
    """Return the first ``count`` rows of a file in the chat template, and what is left out of the first 1,000.

    With the ``tokenizer`` of a model, which has the tokens of the template, and its ``context_length``, the tokens of
    the shown rows are counted, and those beyond the context named. Raises UserError if the file cannot be read.
    """
    preview, parser = Preview(), RowParser()
    limit = max(count, _CHECKED_ROWS)
    for name, load in islice(iterate_rows(url), limit + 1):
        if preview.checked == limit:
            preview.is_whole = False
            break
        preview.checked += 1
        try:
            shown: list[PreviewDialog] | str | None = None
            example = parser.parse(load())
            if len(preview.rows) < count:
                shown = [*_preview_example(example, tokenizer, context_length)]
        except ValueError as error:
            shown = str(error)
            preview.damaged.add(name, shown)
        if shown is not None and len(preview.rows) < count:
            preview.rows.append((name, shown))
    preview.forms = parser.describe()
    return preview


def _preview_example(example: Example, tokenizer: "Tokenizer | None", context_length: int) -> Iterator[PreviewDialog]:
    if isinstance(example, PreferencePair):
        asked = [Message(role=message["role"], content=message["content"], weight=0) for message in example.prompt]
        answers = {"chosen": example.chosen, "rejected": example.rejected}
        dialogs = {kind: [*asked, Message(role="assistant", content=answer)] for kind, answer in answers.items()}
    else:
        dialogs = {"": [*example.messages]}
    for kind, messages in dialogs.items():
        if tokenizer is None:
            yield PreviewDialog(kind, [*split_dialog(messages)])
            continue
        encoded = encode_dialog(tokenizer, messages)
        problem = _find_context_problem(encoded, context_length, is_pair=bool(kind))
        parts = [*_split_encoded(tokenizer, encoded)]
        yield PreviewDialog(kind, parts, len(encoded.ids), sum(encoded.is_target), problem)


def _split_encoded(tokenizer: "Tokenizer", example: EncodedExample) -> Iterator[TemplatePart]:
    """Yield the parts of a dialog in the template of a model."""
    special_ids = frozenset(tokenizer.special_ids.values())
    for (is_special, is_target), group in groupby(
        zip(example.ids, example.is_target, strict=True), lambda token: (token[0] in special_ids, token[1])
    ):
        yield TemplatePart(tokenizer.decode(token_id for token_id, _ in group), is_special, is_target)


def _find_context_problem(example: EncodedExample, context_length: int, is_pair: bool) -> str:
    """Return what :func:`lm.data.packing.pack_examples`, or the training on pairs, makes of a long dialog."""
    beyond = len(example.ids) - (context_length + 1)  # the last token is a label only
    if beyond <= 0:
        return ""
    context = f"the model's context of {context_length:,} tokens"
    if is_pair:
        return f"left out: longer than {context}"
    from lm.data.packing import has_target  # slow to import: torch

    if not has_target(example, context_length):
        return f"left out: no answer within {context}"
    return f"cut: its last {beyond:,} tokens are beyond {context}"
