"""Write a dialog and its beginnings by a chat template, and encode them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import regex

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.data.jinja_template import GENERATION_MARKS, ChatTemplate
from lm.text.normalize import normalize_text

if TYPE_CHECKING:
    from lm.tokenizer.tokenizer import Tokenizer

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDDE)]  # no characters of Unicode: they are in no usual text


class DialogWriter:
    """Writes a dialog and its beginnings. In the messages, a mark splits the text of each special token, so that it is
    not encoded as one; the mark itself is not encoded. A message that would have such a text after the tokenizer's
    normalization is normalized first. ``day`` is that of :meth:`ChatTemplate.write`."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        template: ChatTemplate,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        day: str | None = None,
    ) -> None:
        self._tokenizer, self._template, self._day = tokenizer, template, day
        texts = [*_texts([messages, variables])]
        self._mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        # Some models end answers with an added token that is not special.
        control_ids = tokenizer.stop_ids | {tokenizer.added_ids.get(text) for text in template.tokens.values()}
        control = [text for text, token_id in tokenizer.added_ids.items() if token_id in control_ids]
        contents = dict.fromkeys([*tokenizer.special_tokens, *control])
        self._specials = _find_specials(tuple(contents))
        # The tokenizer looks for these in normalized text, so they can be typed in other characters.
        normalized = {token.content for token in tokenizer.added_tokens if token.normalized and tokenizer.normalizer}
        hidden = [normalize_text(text, tokenizer.normalizer) for text in contents if text in normalized]
        self._hidden = _find_specials(tuple(hidden))
        self._forbidden = _find_specials(tuple(dict.fromkeys([*contents, *hidden])))
        if self._mark is None or any(mark in text for text in texts for mark in GENERATION_MARKS):
            raise UserError("A message has characters from U+FDD0 on, which are no characters; remove them.")
        self._messages = _map_texts(self._split_specials, list(messages))
        self._variables = _map_texts(self._split_specials, dict(variables))

    def write(self, count: int, **variables: Any) -> str:
        """Return the text of the first ``count`` messages."""
        return self._template.write(self._messages[:count], {**self._variables, **variables}, self._day)

    def find_content(self, number: int) -> tuple[str, int, int]:
        """Return the text of the dialog, and where the content of a message begins and ends in it."""
        text, spans = split_generations(self._write_marked(number))
        if len(spans) != 1:
            raise UserError(f"The chat template does not show message {number} once, so its place is not known.")
        return text, *spans[0]

    def write_before(self, text: str, number: int) -> str:
        """Return the part of a dialog's ``text`` before the answer of message ``number``: as much of the prompt for the
        answer as the dialog has too; or all before its content, if the prompt has other messages in other words."""
        before, asking = (
            split_generations(self.write(number, add_generation_prompt=flag))[0] for flag in (False, True)
        )
        if text.startswith(asking):
            return asking
        pairs = zip(text, asking, strict=False)
        common = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), len(text))
        if common >= len(before):
            return text[:common]
        return text[: self._place_content(text, number)[0]]

    def write_limit(self, text: str, number: int) -> str:
        """Return the part of a dialog's ``text`` in which the end of message ``number`` is: all before the content of
        the next message, if that is found."""
        if number + 1 == len(self._messages):
            return text
        try:
            return text[: self._place_content(text, number + 1)[0]]
        except UserError:  # such as a message of a tool, which the template shows in other words
            return self.write_through(text, number)

    def write_through(self, text: str, number: int) -> str:
        """Return the part of a dialog's ``text`` up to the end of message ``number``, or of its content if the template
        ends a last message differently."""
        through = split_generations(self.write(number + 1))[0]
        if text.startswith(through):
            return through
        return text[: self._place_content(text, number)[1]]

    def _place_content(self, text: str, number: int) -> tuple[int, int]:
        """Return where the content of message ``number`` begins and ends in a dialog's ``text``."""
        unmarked, start, end = self.find_content(number)
        if unmarked != text:
            raise UserError(
                f"The chat template changes the text of message {number}, so its place is not known. Use a template "
                "with {% generation %}."
            )
        return start, end

    def _write_marked(self, number: int) -> str:
        """Return the text of all messages, with marks around the content of one."""
        begin, end = GENERATION_MARKS
        messages = [*self._messages]
        messages[number] = {**messages[number], "content": f"{begin}{messages[number].get('content') or ''}{end}"}
        return self._template.write(messages, self._variables, self._day)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text."""
        mark = self._mark
        if mark is None or mark not in text:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        parts = self._specials.split(text) if self._specials else [text]
        tokens = {token.content: token for token in self._tokenizer.added_tokens}
        for index, part in enumerate(parts):
            if index % 2:  # between the parts that are text
                ids.append(self._tokenizer.added_ids[part])
                continue
            if index and tokens[parts[index - 1]].rstrip:
                part = part.lstrip()
            if index + 1 < len(parts) and tokens[parts[index + 1]].lstrip:
                part = part.rstrip()
            # At a mark, the text is divided too: an added token that is not special is found in any text.
            for piece in part.split(mark):
                ids += self._tokenizer.encode(piece, allowed_special=())
        return ids

    def count_bytes(self, text: str) -> int:
        """Return the number of bytes of the tokens of a beginning of a rendered text."""
        return len(self._tokenizer.decode_bytes(self.encode(text)))

    def _split_specials(self, text: str) -> str:
        """Return a message's text with the mark inside each special token."""
        if self._hidden and self._hidden.search(normalized := normalize_text(text, self._tokenizer.normalizer)):
            text = normalized
        while self._forbidden and (match := self._forbidden.search(text)):
            if len(match[0]) == 1:
                raise UserError(f"A message has the character {match[0]!r}, which is a special token of the model.")
            text = self._forbidden.sub(lambda found: f"{found[0][0]}{self._mark}{found[0][1:]}", text)
        return text


@lru_cache(maxsize=8)
def _find_specials(special_tokens: tuple[str, ...]) -> "regex.Pattern[str] | None":
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return regex.compile(f"({'|'.join(map(regex.escape, longest_first))})") if special_tokens else None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return a JSON value with changed texts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(change, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(change, part) for part in value]
    return value


def split_generations(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendered text without the marks of ``{% generation %}``, and where they were."""
    begin, end = GENERATION_MARKS
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = start = 0
    for part in regex.split(f"([{begin}{end}])", text):
        if part == begin:
            start = length
        elif part == end:
            spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans
