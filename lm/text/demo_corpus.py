"""Generated short stories, so that the pipeline has text to train on without a download.

The grammar is regular enough that a model of a million parameters learns it in a minute, and varied enough that its
samples are not copies of the corpus.
"""

import random
from collections.abc import Iterator

from lm.text.pretokenize import END_OF_TEXT

_NAMES = [
    *("Ada", "Ben", "Clara", "Dan", "Ella", "Finn", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena", "Milo", "Nora"),
    *("Otto", "Pia", "Quinn", "Rosa", "Sami", "Tess", "Uma", "Vera", "Will", "Yara"),
]
_ANIMALS = ["cat", "dog", "fox", "goat", "hen", "mouse", "owl", "pony", "rabbit", "toad", "duck", "bear"]
_KINDS = ["little", "old", "shy", "brave", "hungry", "sleepy", "merry", "grumpy", "clever", "kind"]
_PLACES = [
    *("the forest", "the garden", "the river", "the hill", "the village", "the barn", "the beach", "the market"),
    *("the old mill", "the meadow"),
]
_THINGS = [
    *("a red ball", "a golden key", "a warm hat", "a wooden boat", "a small drum", "a blue kite", "a sweet apple"),
    *("a shiny bell", "a paper star", "a big map"),
]
_WEATHER = ["sunny", "rainy", "windy", "snowy", "warm", "cold", "quiet", "foggy"]
_FEELINGS = ["happy", "proud", "glad", "calm", "thankful", "full of joy"]
_LESSONS = [
    "it is good to share",
    "a friend is worth more than gold",
    "small feet can go far",
    "asking for help is brave",
    "kind words open doors",
    "it is fine to try again",
]


def demo_stories(documents: int, seed: int = 0) -> Iterator[str]:
    """Yield ``documents`` stories, each followed by ``<|endoftext|>`` and a newline. ``seed`` determines the text."""
    rng = random.Random(seed)
    pick = rng.choice
    for _ in range(documents):
        name, friend = rng.sample(_NAMES, 2)
        animal, kind, place, thing = pick(_ANIMALS), pick(_KINDS), pick(_PLACES), pick(_THINGS)
        noun = thing.split(" ", 1)[1]
        beginning = [
            f"Once upon a time there was a {kind} {animal} named {name}. {name} lived near {place}.",
            f"One {pick(_WEATHER)} day, a {kind} {animal} named {name} went to {place}.",
            f"{name} was a {kind} {animal} who loved {place}.",
        ]
        trouble = [
            f"{name} wanted to find {thing}, but did not know where to look.",
            f"There {name} saw {thing}. It was stuck in a tree.",
            f"{name} had lost {thing} and began to cry.",
        ]
        help_ = [
            f'Then {friend} the {pick(_ANIMALS)} came by. "Can I help you?" asked {friend}.',
            f'"Do not worry," said {friend} the {pick(_ANIMALS)}. "We will do it together."',
            f'Soon {name} met {friend}, a {pick(_KINDS)} {pick(_ANIMALS)}. "What is wrong?" asked {friend}.',
        ]
        work = [
            f"They looked under {rng.randint(2, 20)} stones and behind {rng.randint(2, 9)} trees.",
            f"They walked all the way to {pick(_PLACES)} and back.",
            f"{friend} climbed up, and {name} held on tight.",
        ]
        ending = [
            f"At last they found the {noun}. {name} was {pick(_FEELINGS)}.",
            f"In the end they had the {noun}, and both were {pick(_FEELINGS)}.",
        ]
        lesson = [
            f"{name} learned that {pick(_LESSONS)}.",
            f'"Thank you," said {name}. From that day on they were friends.',
        ]
        story = " ".join(map(pick, (beginning, trouble, help_, work, ending, lesson)))
        yield f"{story}\n{END_OF_TEXT}\n"
