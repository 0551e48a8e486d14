"""Pages as a crawl has them, made up from sentences of stories: lists, code, menus, repetitions, other languages."""

import random
import re
from collections.abc import Callable, Iterator
from functools import partial

_LOREM = "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore."
_POLICY = (
    "This site uses cookies to help you.",
    "Read our privacy policy before you go on.",
    "By using it you accept the terms of use.",
    "Please enable JavaScript to see this page.",
)
_CODE = (
    "def add(left, right):",
    "    return left + right",
    "for (int i = 0; i < n; i++) {",
    "}",
    "import numpy as np",
    "# TODO: remove this",
    "assert x == 3  # holds",
    "Write {name} for the name of the file.",
)
_OTHER = {
    "German": "Der alte Mann ging jeden Morgen an den Strand, um nach den Booten zu sehen.",
    "Polish": "Stary człowiek chodził każdego ranka na plażę, żeby popatrzeć na łodzie.",
    "Russian": "Старик каждое утро ходил на берег, чтобы посмотреть на лодки.",
    "Greek": "Ο γέρος πήγαινε κάθε πρωί στην παραλία για να δει τις βάρκες.",
    "Arabic": "كان الرجل العجوز يذهب كل صباح إلى الشاطئ ليرى القوارب.",
    "Hindi": "बूढ़ा आदमी हर सुबह नावों को देखने समुद्र तट पर जाता था।",
    "Chinese": "老人每天早上都去海边看船。他喜欢大海的声音。",
    "Japanese": "老人は毎朝、船を見に海岸へ行きました。",
    "Korean": "노인은 매일 아침 배를 보러 바닷가에 갔다.",
    "Thai": "ชายชราไปที่ชายหาดทุกเช้าเพื่อดูเรือ",
}


def make_pages(texts: list[str], count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ``count`` pairs of a kind and a page, from the sentences of ``texts``. Each kind comes equally often."""
    rng = random.Random(seed)
    sentences = [part for text in texts for part in re.split(r"(?<=[.!?])\s+", text) if 20 < len(part) < 200]
    words = [word for text in texts for word in text.split()]

    def some(low: int = 5, high: int = 40) -> list[str]:
        return rng.sample(sentences, rng.randint(low, high))

    def share(lines: list[str], change: Callable[[str], str]) -> str:
        """Change a random share of the lines."""
        part = rng.random()
        return "\n".join(change(line) if rng.random() < part else line for line in lines)

    def repeat(lines: list[str], separator: str) -> str:
        chosen = rng.sample(lines, min(len(lines), rng.randint(1, 4)))
        lines = lines + [rng.choice(chosen) for _ in range(rng.randint(1, len(lines)))]
        rng.shuffle(lines)
        return separator.join(lines)

    def insert(lines: list[str], others: tuple[str, ...]) -> str:
        lines = lines + [rng.choice(others) for _ in range(rng.randint(1, 6))]
        rng.shuffle(lines)
        return "\n".join(lines)

    def repeat_text(text: str) -> str:
        return rng.choice([" ", "\n"]).join([text] * rng.randint(1, 9))

    kinds: dict[str, Callable[[], str]] = {
        "text": lambda: " ".join(some()),
        "lines": lambda: "\n".join(some()),
        "repeated lines": lambda: repeat(some(), "\n"),
        "repeated paragraphs": lambda: repeat(some(), "\n\n"),
        "repeated sentences": lambda: repeat(some(), " "),
        "repeated phrase": lambda: " ".join([*some(2, 9), *[" ".join(rng.sample(words, 3))] * rng.randint(2, 40)]),
        "list": lambda: share(some(), lambda line: rng.choice("-•*") + " " + line),
        "menu": lambda: "\n".join(" ".join(rng.sample(words, rng.randint(1, 8))) for _ in range(rng.randint(5, 80))),
        "teasers": lambda: share(some(), lambda line: line[:-1] + rng.choice(["...", "…", " ...", "... "])),
        "hashtags": lambda: " ".join(word if rng.random() < 0.9 else "#" + word for word in rng.sample(words, 200)),
        "numbers": lambda: " ".join(
            word if rng.random() < rng.choice([0.6, 0.8, 0.9]) else str(rng.randint(0, 10**6))
            for word in rng.sample(words, 150)
        ),
        "code": lambda: "\n".join(rng.choice(_CODE) for _ in range(rng.randint(10, 80))),
        "text with code": lambda: insert(some(), _CODE),
        "lorem ipsum": lambda: insert(some(2, 20), (_LOREM, _LOREM.upper())),
        "policies": lambda: insert(some(2, 9), _POLICY),
        "few words": lambda: " ".join(rng.sample(words, rng.randint(1, 70))),
        "Windows lines": lambda: "\r\n".join(some()),
        "capitals": lambda: " ".join(some()).upper(),
        "one long word": lambda: " ".join([*some(), "x" * rng.choice([100, 2000])]),
        "empty": lambda: rng.choice(["", "\n", "  \n\n ", "."]),
        **{name: partial(repeat_text, text) for name, text in _OTHER.items()},
    }
    for place in range(count):
        kind = [*kinds][place % len(kinds)]
        yield kind, kinds[kind]()
