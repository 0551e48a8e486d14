"""Texts for the tokenizer benchmarks: iterators of documents with their separators, most of them endless."""

import base64
import lzma
import random
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np

from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT

END = END_OF_TEXT.encode()
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GENERATED_STORIES = {"train": 150_000, "valid": 3_000}


def find_stories(split: str) -> Path | None:
    """Return the file of children's stories for ``train`` or ``valid`` next to the checkout, or None."""
    path = DATA / f"stories_{split}.txt.xz"
    return path if path.exists() else None


def generate_stories(split: str) -> bytes:
    """Generate stories. The splits have no story in common."""
    return "".join(demo_stories(GENERATED_STORIES[split], seed=list(GENERATED_STORIES).index(split))).encode()


def story_file(split: str, folder: Path) -> Path:
    """Return a file of stories for ``train`` or ``valid``: the real file, or a generated one in ``folder``."""
    if path := find_stories(split):
        return path
    path = folder / f"stories_{split}.txt"
    if not path.exists():
        print(f"{DATA} has no stories: generating some", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generate_stories(split))
    return path


@cache
def stories() -> bytes:
    path = find_stories("train")
    return lzma.decompress(path.read_bytes()) if path else generate_stories("train")


def documents(data: bytes) -> list[bytes]:
    return [part + END for part in data.split(END) if part.strip()]


def rearranged(texts: Sequence[bytes], seed: int = 0) -> Iterator[bytes]:
    """Yield documents without end: each has as many sentences as one of ``texts``, drawn from the sentences of all.

    A document in a hundred is an earlier one with one sentence changed.
    """
    rng = np.random.default_rng(seed)
    parts = [re.findall(rb"[^.!?]+[.!?]*", text.removesuffix(END)) for text in texts]
    lengths = np.array([len(part) for part in parts])
    sentences = np.array(list(chain.from_iterable(parts)), dtype=object)
    while True:
        drawn = rng.integers(0, len(sentences), int(lengths.sum()))
        for number, end in enumerate(np.cumsum(lengths).tolist()):
            document = sentences[drawn[end - lengths[number] : end]]
            yield b"".join(document) + END
            if len(document) and rng.random() < 0.01:
                document[rng.integers(len(document))] = sentences[rng.integers(len(sentences))]
                yield b"".join(document) + END


def take_bytes(parts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield parts until they have ``size`` bytes together."""
    for part in parts:
        if size <= 0:
            return
        size -= len(part)
        yield part


def package_files(pattern: str) -> Iterator[bytes]:
    """Yield the UTF-8 files of the standard library and the installed packages that match ``pattern``, sorted.

    Files with characters that Python's Unicode version does not assign are skipped: the peers use other versions.
    """
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    for path in sorted({path for folder in folders for path in folder.rglob(pattern)}):
        data = path.read_bytes()
        text = data.decode(errors="ignore")
        is_utf8 = len(text.encode()) == len(data)
        if data and END not in data and is_utf8 and "Cn" not in map(unicodedata.category, set(text)):
            yield data + END


def mixed() -> Iterator[bytes]:
    """Yield stories, then Python sources without end."""
    return chain([stories()], cycle(package_files("*.py")))


def code() -> Iterator[bytes]:
    return iter(random.Random(0).sample(files := list(package_files("*.py")), len(files)))


COMMON = "的一是不了在人有我他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后"
EMOJI = re.split(" ", "😀 😂 🥰 🎉 🔥 ✨ ❤️ 👍🏽 👋🏿 🤷🏻‍♀️ 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🇯🇵 🇧🇷 🇩🇪 🧑🏾‍🚀 🐻‍❄️ 1️⃣ ☕ 🦊 🌍 ⚡️")


def cjk() -> Iterator[bytes]:
    """Yield real translations, then random Chinese, Japanese and Korean. Words and characters follow Zipf's law."""
    yield from (part for language in ("zh", "ja", "ko") for part in package_files(f"locale/{language}*/**/*.po"))
    rng = np.random.default_rng(0)

    def pick(items: Sequence[str], number: int) -> list[str]:
        weights = 1 / np.arange(2, len(items) + 2)
        return [items[i] for i in rng.choice(len(items), number, p=weights / weights.sum())]

    def words(first: int, last: int, max_length: int, common: str = "", end: str = "") -> list[str]:
        characters = common + "".join(map(chr, rng.permutation(np.arange(first, last))[:5000]))
        return ["".join(pick(characters, length)) + end for length in sorted(rng.integers(1, max_length + 1, 10_000))]

    chinese, korean = words(0x4E00, 0x9FA6, 3, COMMON), words(0xAC00, 0xB9C4, 4, end=" ")
    stems = [*chinese[:4000], *words(0x30A2, 0x30F4, 5)]
    japanese = ["".join(parts) for parts in zip(stems, pick(words(0x3042, 0x3094, 3), len(stems)), strict=True)]
    while True:
        for vocabulary, stops in ((chinese, "，。、！\n"), (japanese, "、。「」\n"), (korean, ",.?!\n")):
            sentences = np.split(pick(vocabulary, 1000), np.sort(rng.integers(1, 1000, 120)))
            ended = [[*sentence, stop] for sentence, stop in zip(sentences, pick(stops, len(sentences)), strict=True)]
            yield "".join(chain.from_iterable(ended)).encode() + END


def emoji() -> Iterator[bytes]:
    """Yield stories with one to four emoji after each sentence."""
    rng = random.Random(0)
    for document in cycle(documents(stories())):
        parts = re.split(r"(?<=[.!?]) ", document.decode().removesuffix(END_OF_TEXT))
        yield "".join(f"{part} {''.join(rng.choices(EMOJI, k=rng.randint(1, 4)))} " for part in parts).encode() + END


CORPORA = {"stories": lambda: documents(stories()), "code": code, "cjk": cjk, "emoji": emoji}


def random_letters(rng: np.random.Generator, size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return rng.integers(ord("a"), ord("z") + 1, size, np.uint8)


ADVERSARIAL: dict[str, Callable[[np.random.Generator, int], bytes]] = {
    "one_letter": lambda rng, size: b"a" * size,
    "alternating_letters": lambda rng, size: b"ab" * (size // 2),
    "spaces": lambda rng, size: b" " * size,
    "no_separator": lambda rng, size: random_letters(rng, size).tobytes(),
    "unique_pretokens": lambda rng, size: np.where(
        np.arange(size) % 9, random_letters(rng, size), np.uint8(32)
    ).tobytes(),
    "cjk_without_spaces": lambda rng, size: "".join(map(chr, rng.integers(0x4E00, 0x9FA6, size // 3))).encode(),
    "emoji": lambda rng, size: "".join(rng.choice(EMOJI, size // 9)).encode(),
    "dna": lambda rng, size: np.frombuffer(b"acgt", np.uint8)[rng.integers(0, 4, size)].tobytes(),
    "base64": lambda rng, size: base64.b64encode(rng.bytes(3 * size // 4)),
    "invalid_bytes": lambda rng, size: rng.bytes(size // 2).decode(errors="replace").encode(),
}
TRAINED = ("one_letter", "alternating_letters", "spaces", "dna", "base64")  # of ADVERSARIAL, to learn merges from
