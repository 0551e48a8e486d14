"""Choices made out of the bytes that a fuzzer changes, and documents that are damaged by them.

What a target does follows from its bytes alone, so that a case that was found can be kept as a file and tried again.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

DEEP = "\x01deep\x01"  # stands for a hundred thousand lists inside each other
_ODD_NUMBERS = [0, 1, -1, 2, 3, 7, 255, 256, 65535, 65536, 1 << 24, 1 << 31, 1 << 32, 1 << 63, 10**30, 10**400]
_ODD_FLOATS = [0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")]
_ODD_TEXTS = [
    *("", " ", "a", "é", "Ġ", "\ud800", "\0", "a" * 3000, "../x", "/dev/zero", "/", ".", "NaN", "1", "<|endoftext|>"),
    *("(a+)+$", "(", "(?", "a{1000000000}", "((((x{9}){9}){9}){9}){9}", "\x85", "torch.nn", DEEP),
]
_ODD_OTHERS: list[Any] = [
    *(None, True, False, [], {}, [[]], [{}], {"a": []}, [None], ["a", "b"], [1, 2], [0, 1 << 40]),
]
ODD = [*_ODD_NUMBERS, *_ODD_FLOATS, *_ODD_TEXTS, *_ODD_OTHERS]
_ODD_BYTES = [
    *(b"\0", b"\xff", b"\n", b" ", b'"', b"{", b"}", b"[", b",", b"9", b"\xed\xa0\x80", b"\xff" * 4, b"\x80", b"-"),
]


class Choices:
    """Choices, each out of the next bytes; when there are no more it is the first that is chosen."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, number: int) -> int:
        """A whole number from 0 to ``number`` - 1."""
        size = 1 if number <= 256 else 2 if number <= 65536 else 4
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "little") % number

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def random(self) -> random.Random:
        """As many choices as one likes out of two bytes."""
        return random.Random(self.below(1 << 16))


def changed(value: Any, choices: Choices, other: Callable[[Any, "Choices"], Any] | None = None) -> Any:
    """A value made of dicts and lists with one change somewhere in it; the value itself stays as it is. What stands in
    place of a part is ``other``'s choice; the default is for JSON."""
    if isinstance(value, dict) and value and choices.below(8):
        name = choices.pick(list(value))
        match choices.below(8):
            case 0:
                return {key: one for key, one in value.items() if key != name}
            case 1:
                return {(choices.pick(_ODD_TEXTS) if key == name else key): one for key, one in value.items()}
            case 2:
                return {**value, choices.pick(_ODD_TEXTS): value[name]}
            case _:
                return {**value, name: changed(value[name], choices, other)}
    if isinstance(value, list) and value and choices.below(8):
        i = choices.below(len(value))
        match choices.below(8):
            case 0:
                return [*value[:i], *value[i + 1 :]]
            case 1:
                return [*value[:i], choices.pick(value), *value[i:]]
            case _:
                return [*value[:i], changed(value[i], choices, other), *value[i + 1 :]]
    return (other or _other)(value, choices)


def _other(value: Any, choices: Choices) -> Any:
    if isinstance(value, str) and value and choices.below(2):
        i = choices.below(len(value) + 1)
        return value[:i] + choices.pick(_ODD_TEXTS) + value[i + choices.below(3) :]
    if type(value) is int and choices.below(2):
        return value + choices.pick([-1, 1, value, -2 * value, 256, 65536])
    match choices.below(8):
        case 0:
            return [value]
        case 1:
            return {"a": value}
        case 2:
            return str(value)
        case _:
            return choices.pick(ODD)


def damaged(value: Any, choices: Choices, most: int = 4, other: Callable[[Any, "Choices"], Any] | None = None) -> Any:
    """A value with up to ``most`` changes; see :func:`changed`."""
    for _ in range(choices.below(most + 1)):
        value = changed(value, choices, other)
    return value


def json_bytes(value: Any, choices: Choices) -> bytes:
    """A value as JSON, mostly whole."""
    nested = "[" * 100_000 + "]" * 100_000
    text = json.dumps(value, ensure_ascii=choices.below(8) > 0).replace(json.dumps(DEEP), nested)
    data = text.encode("utf-8", "surrogatepass")
    return cut_up(data, choices) if choices.below(4) == 3 else data


def cut_up(data: bytes, choices: Choices, most: int = 3) -> bytes:
    """Bytes of which up to ``most`` places are changed, taken out, put in, or where they end."""
    edits: list[Callable[[int], bytes]] = [
        lambda i: data[:i] + bytes([choices.below(256)]) + data[i + 1 :],
        lambda i: data[:i] + choices.pick(_ODD_BYTES) + data[i:],
        lambda i: data[:i] + choices.pick(_ODD_BYTES) + data[i + 1 :],
        lambda i: data[:i] + data[i + 1 + choices.below(64) :],
        lambda i: data[: i + choices.below(64)] + data[i:],
        lambda i: data[:i],
    ]
    for _ in range(1 + choices.below(most)):
        place = choices.below(len(data) + 1)
        data = choices.pick(edits)(place)
    return data
