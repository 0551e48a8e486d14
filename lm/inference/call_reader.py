"""Reads the calls of tools in an answer, character by character: a JSON object for each, alone or in a list.

A call is ``{"name": "weather", "arguments": {"place": "Rome"}}``; the arguments are also called ``parameters``, and
other members have no effect.
"""

import json
from collections.abc import Collection

from lm.inference.json_scanner import WHITE_SPACE, JsonScanner

ARGUMENT_KEYS = ("arguments", "parameters")


class ReadCall:
    """A call, as far as it is read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self._characters: list[str] = []

    def extend(self, char: str) -> None:
        """Add a character to the arguments."""
        self.has_arguments = True
        self._characters.append(char)

    def take_arguments(self) -> str:
        """Return the JSON text of the arguments since the last time, as the model wrote it."""
        text = "".join(self._characters)
        self._characters.clear()
        return text


class CallReader:
    """Reads one JSON value with at least one call of the tools ``names``."""

    def __init__(self, names: Collection[str]) -> None:
        self.calls: list[ReadCall] = []
        self._names, self._scanner = names, JsonScanner()
        self._depth = 0  # number of open brackets around a call: 1 in a list
        self._key: str | None = None  # of the member whose value is read
        self._string: list[str] = []  # the key, or the name

    @property
    def is_complete(self) -> bool:
        """Whether the value has ended."""
        return self._scanner.expects == "nothing"

    def feed(self, char: str) -> bool:
        """Read a character. Return whether the text can still become calls; after False, the reader is over."""
        scanner = self._scanner
        before, depth = scanner.expects, len(scanner.containers)
        if not scanner.feed(char):
            return False
        if self.is_complete:  # the end of the only call, or that of the list
            return self._is_finished() if self._depth == 0 else bool(self.calls)
        if char in WHITE_SPACE and before != "string" and depth <= self._depth + 1:
            return True
        if depth == self._depth:
            return self._feed_list(char)
        if depth == self._depth + 1:
            return self._feed_member(char, before)
        if self._key in ARGUMENT_KEYS:
            self.calls[-1].extend(char)
        return True

    def _feed_list(self, char: str) -> bool:
        """Read a character outside of calls."""
        if char == "{":
            self.calls.append(ReadCall())
        elif char == "[" and not self._scanner.containers[1:]:
            self._depth = 1
        return char in "{[," and (char != "[" or len(self._scanner.containers) == 1)

    def _feed_member(self, char: str, before: str) -> bool:
        """Read a character directly within a call: of a key, a name, the begin of arguments, or another value."""
        call, after = self.calls[-1], self._scanner.expects
        if len(self._scanner.containers) == self._depth:
            return self._is_finished()
        if before in ("first", "key"):
            self._key, self._string = None, [char]
        elif before == "string":
            self._string.append(char)
            if after == "colon":
                self._key = json.loads("".join(self._string))
            elif after == "comma" and self._key == "name":
                name = json.loads("".join(self._string))
                call.name = name if name in self._names else None
                return call.name is not None
        elif before == "value":
            self._string = [char]
            if self._key == "name":
                return char == '"' and call.name is None
            if self._key in ARGUMENT_KEYS:
                is_first = not call.has_arguments
                call.extend(char)
                return char == "{" and is_first
        return True

    def _is_finished(self) -> bool:
        return self.calls[-1].name is not None and self.calls[-1].has_arguments
