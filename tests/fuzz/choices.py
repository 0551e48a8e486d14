"""Choices read from the bytes of a fuzzer, and mutations of documents that use them.

A target depends only on its bytes, so a failing case can be kept as a file and repeated.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

DEEP = "\x01deep\x01"  # json_bytes() replaces it by 100,000 nested lists
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
    """Choices that consume bytes. After the last byte, each choice is the first option."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def below(self, number: int) -> int:
        """Return an integer from 0 to ``number`` - 1."""
        size = 1 if number <= 256 else 2 if number <= 65536 else 4
        chunk = self._data[self._position : self._position + size]
        self._position += size
        return int.from_bytes(chunk, "little") % number

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def random(self) -> random.Random:
        """Return a generator that is seeded with two bytes."""
        return random.Random(self.below(1 << 16))


def mutate_once(value: Any, choices: Choices, replace: Callable[[Any, "Choices"], Any] | None = None) -> Any:
    """Return a copy of nested dicts and lists with one mutation.

    ``replace`` returns the replacement of a value. The default is for JSON.
    """
    if isinstance(value, dict) and value and choices.below(8):
        name = choices.pick(list(value))
        match choices.below(8):
            case 0:
                return {key: item for key, item in value.items() if key != name}
            case 1:
                return {(choices.pick(_ODD_TEXTS) if key == name else key): item for key, item in value.items()}
            case 2:
                return {**value, choices.pick(_ODD_TEXTS): value[name]}
            case _:
                return {**value, name: mutate_once(value[name], choices, replace)}
    if isinstance(value, list) and value and choices.below(8):
        i = choices.below(len(value))
        match choices.below(8):
            case 0:
                return [*value[:i], *value[i + 1 :]]
            case 1:
                return [*value[:i], choices.pick(value), *value[i:]]
            case _:
                return [*value[:i], mutate_once(value[i], choices, replace), *value[i + 1 :]]
    return (replace or _replace_json)(value, choices)


def _replace_json(value: Any, choices: Choices) -> Any:
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


def mutate(
    value: Any, choices: Choices, max_mutations: int = 4, replace: Callable[[Any, "Choices"], Any] | None = None
) -> Any:
    """Return a value with up to ``max_mutations`` mutations; see :func:`mutate_once`."""
    for _ in range(choices.below(max_mutations + 1)):
        value = mutate_once(value, choices, replace)
    return value


def json_bytes(value: Any, choices: Choices) -> bytes:
    """Return a value as JSON, which is sometimes damaged."""
    nested = "[" * 100_000 + "]" * 100_000
    text = json.dumps(value, ensure_ascii=choices.below(8) > 0).replace(json.dumps(DEEP), nested)
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(data, choices) if choices.below(4) == 3 else data


def mutate_bytes(data: bytes, choices: Choices, max_mutations: int = 3) -> bytes:
    """Return bytes with 1 to ``max_mutations`` replacements, insertions, deletions, duplications or truncations."""
    edits: list[Callable[[int], bytes]] = [
        lambda i: data[:i] + bytes([choices.below(256)]) + data[i + 1 :],
        lambda i: data[:i] + choices.pick(_ODD_BYTES) + data[i:],
        lambda i: data[:i] + choices.pick(_ODD_BYTES) + data[i + 1 :],
        lambda i: data[:i] + data[i + 1 + choices.below(64) :],
        lambda i: data[: i + choices.below(64)] + data[i:],
        lambda i: data[:i],
    ]
    for _ in range(1 + choices.below(max_mutations)):
        i = choices.below(len(data) + 1)
        data = choices.pick(edits)(i)
    return data
