"""Checks JSON character by character: whether a text can still become JSON, and where it is complete.

Source: RFC 8259.
"""

from typing import Final

WHITE_SPACE: Final = " \t\n\r"
_MAX_DEPTH = 200
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = '"\\/bfnrtu'
_HEX = frozenset("0123456789abcdefABCDEF")
# From a part of a number to the parts that may follow, each with its characters.
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "minus": {"0": "zero", "123456789": "integer"},
    "zero": {".": "point", "eE": "exponent"},
    "integer": {"0123456789": "integer", ".": "point", "eE": "exponent"},
    "point": {"0123456789": "fraction"},
    "fraction": {"0123456789": "fraction", "eE": "exponent"},
    "exponent": {"+-": "sign", "0123456789": "power"},
    "sign": {"0123456789": "power"},
    "power": {"0123456789": "power"},
}
_NUMBER_ENDS = frozenset({"zero", "integer", "fraction", "power"})


class JsonScanner:
    """The state of a scan through one JSON object or array. Values are nested at most 200 deep."""

    def __init__(self) -> None:
        self.expects = "value"
        """What comes next: ``value``, ``key``, ``colon`` or ``comma``; ``string``, ``number`` or ``literal`` within
        one; ``nothing`` after the end. After an opening bracket, ``first`` instead of ``key`` or ``value``."""
        self.containers: list[str] = []
        """The closing brackets of the objects and arrays that are open, the innermost last."""
        self.is_key = False
        """Whether the string that is read, or was read last, is a key."""
        self._rest = ""  # of an escape, a literal; the part of a number

    def feed(self, char: str) -> bool:
        """Read a character. Return whether the text can still become JSON; after False, the scan is over."""
        match self.expects:
            case "string":
                return self._feed_string(char)
            case "literal":
                if not self._rest.startswith(char):
                    return False
                self._rest = self._rest[1:]
                return self._rest != "" or self._end_value()
            case "number":
                for chars, part in _NUMBER[self._rest].items():
                    if char in chars:
                        self._rest = part
                        return True
                return self._rest in _NUMBER_ENDS and self._end_value() and self.feed(char)
        return char in WHITE_SPACE or self._feed_structure(char)

    def _feed_string(self, char: str) -> bool:
        if self._rest == "\\":
            self._rest = "uuuu" if char == "u" else ""
            return char in _ESCAPES
        if self._rest:
            self._rest = self._rest[1:]
            return char in _HEX
        if char == '"':
            self.expects = "colon"
            return self.is_key or self._end_value()
        self._rest = "\\" if char == "\\" else ""
        return char >= " "

    def _feed_structure(self, char: str) -> bool:
        closing = self.containers[-1] if self.containers else ""
        if char == closing and self.expects in ("first", "comma"):
            self.containers.pop()
            return self._end_value()
        match self.expects:
            case "colon":
                self.expects = "value"
                return char == ":"
            case "comma":
                self.expects = "key" if closing == "}" else "value"
                return char == ","
            case "key" | "first" if closing == "}":
                self.expects, self.is_key = "string", True
                return char == '"'
            case "value" | "first":
                return self._begin_value(char)
        return False

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self.containers.append("}" if char == "{" else "]")
            self.expects = "first"
            return len(self.containers) <= _MAX_DEPTH
        if not self.containers:  # a text or a number alone has no end that can be seen
            return False
        if char == '"':
            self.expects, self.is_key = "string", False
        elif char in _LITERALS:
            self.expects, self._rest = "literal", _LITERALS[char][1:]
        else:
            self.expects, self._rest = "number", "minus"
            return char == "-" or self.feed(char)
        return True

    def _end_value(self) -> bool:
        self.expects, self._rest = "comma" if self.containers else "nothing", ""
        return True
