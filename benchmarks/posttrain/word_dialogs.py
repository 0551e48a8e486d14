"""Dialogs that teach a small model to use the words of a request: lists of words, paragraphs, and stories.

A base model of ten million tokens does not copy yet: it gives the second half of a repeated sequence of random tokens
no more probability than the first. So the words of a request mean nothing to it, and the stories of ``words_train``,
with three such words in 180 tokens, hardly teach it. In a list nearly all tokens are copies; and in a short one there
are few words to choose from.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence

from benchmarks.posttrain.trainings import make_dialog
from lm.data.dialogs import Dialog
from lm.eval.problems import Problem

LIST_WORDS = (1, 8)  # from lists of up to twenty a small model learns much more slowly
PARAGRAPH_WORDS = (2, 4)
STORY_WORDS = (3, 8)
PARAGRAPH_CHARACTERS = (60, 400)

_WORD = re.compile(r"[A-Za-z]+")


class WordDialogs:
    """Makes dialogs from problems, requests for stories with their solutions. All are decided by ``seed``."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._random = random.Random(seed)
        self._stories = [problem.solution or "" for problem in problems]
        self._vocabulary = {word for problem in problems for word in problem.ground_truth}
        self._counts = Counter(word for story in self._stories for word in self._words(story))

    def _words(self, text: str) -> list[str]:
        """Return the different words of ``text`` that occur in a request."""
        return sorted({word.lower() for word in _WORD.findall(text)} & self._vocabulary)

    def lists(self, count: int) -> list[Dialog]:
        """Return requests for a list of words: half in the order of the request, half in another."""
        dialogs = []
        vocabulary = sorted(self._vocabulary)
        for number in range(count):
            words = self._random.sample(vocabulary, self._random.randint(*LIST_WORDS))
            request = f"Write a list with these words: {', '.join(words)}."
            if number % 2:
                self._random.shuffle(words)
            dialogs.append(make_dialog(request, f"{', '.join(words)}."))
        return dialogs

    def paragraphs(self, count: int) -> list[Dialog]:
        """Return requests for paragraphs of the stories."""
        low, high = PARAGRAPH_CHARACTERS
        paragraphs = [part for story in self._stories for part in story.split("\n\n") if low <= len(part) <= high]
        return self._requests("paragraph", paragraphs, PARAGRAPH_WORDS, count)

    def stories(self, count: int) -> list[Dialog]:
        """Return requests for the stories."""
        return self._requests("short story", self._stories, STORY_WORDS, count)

    def _requests(self, name: str, texts: Sequence[str], numbers: tuple[int, int], count: int) -> list[Dialog]:
        """Return requests for texts with some of their words, rare words more often. Each time they are others."""
        candidates = [(text, words) for text in texts if len(words := self._words(text)) >= numbers[0]]
        dialogs = []
        for number in range(count):
            if number % len(candidates) == 0:
                self._random.shuffle(candidates)
            text, words = candidates[number % len(candidates)]
            # Of Efraimidis and Spirakis 2006: a sample without replacement, with the weights 1 / count.
            words = sorted(words, key=lambda word: self._random.random() ** self._counts[word], reverse=True)
            words = words[: self._random.randint(*numbers)]
            self._random.shuffle(words)
            dialogs.append(make_dialog(f"Write a {name} with these words: {', '.join(words)}.", text))
        return dialogs
