"""The text classifier: its kernels against a plain reference, its files, and what it learns."""

import json
import math
import random
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lm.common.errors import UserError
from lm.curate import ClassifierConfig, TextClassifier, pack_documents, score_quantile

MULTIPLIER, START, MASK = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1
WORD = re.compile(r"(?:[0-9A-Za-z]|[^\0-\xbf\u2000-\u207f\u3000-\u303f])+")

TEXTS = st.text(
    st.one_of(st.sampled_from("aAbZ09 \t\n.,'é—“あ。語𝄞\xa0\0\x1c"), st.characters(codec="utf-8")), max_size=60
)
CONFIGS = st.builds(
    lambda sizes, **fields: ClassifierConfig(word_ngrams=sizes[0], char_ngrams=sizes[1], **fields),
    st.tuples(st.integers(0, 2), st.integers(0, 7)).filter(any),
    table_bits=st.sampled_from([8, 12]),
    epochs=st.integers(1, 3),
    balance=st.booleans(),
    seed=st.integers(0, 3),
)


def lower(text: str) -> str:
    return "".join(char.lower() if char.isascii() else char for char in text)


def number(char: str) -> int:
    return int.from_bytes(char.encode(), "little")


def ngram_rows(text: str, config: ClassifierConfig) -> Counter[int]:
    """The rows of a text's n-grams, with their counts."""

    def row(value: int) -> int:
        value = (value ^ value >> 32) * MULTIPLIER & MASK
        return value >> (64 - config.table_bits)

    hashes, last = [], None
    for word in WORD.findall(lower(text)) if config.word_ngrams else ():
        value = START
        for char in word:
            value = (value ^ number(char)) * MULTIPLIER & MASK
        hashes.append(value)
        if config.word_ngrams > 1 and last is not None:
            hashes.append((last * MULTIPLIER + value) & MASK)
        last = value
    if n := config.char_ngrams:
        spaced = re.sub("[\t-\r ]+", " ", lower(text) + " ").removeprefix(" ")
        padded = "\0" * (n - 1) + spaced
        for i in range(len(spaced)):
            value = 0
            for char in padded[i : i + n]:
                value = (value * MULTIPLIER + number(char)) & MASK
            hashes.append(value)
    return Counter(map(row, hashes))


def logits(rows: Counter[int], weights: np.ndarray) -> np.ndarray:
    total = np.zeros(weights.shape[1])
    for row, count in rows.items():
        total += count * weights[row]
    return total / max(rows.total(), 1)


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max())
    return exponentials / exponentials.sum()


def train(texts: list[str], labels: list[str], config: ClassifierConfig) -> np.ndarray:
    """Train in float64, one dense vector of counts at a time."""
    known = sorted(set(labels))
    weights = np.zeros((1 << config.table_bits, len(known)))
    generator = np.random.Generator(np.random.PCG64(config.seed))
    steps, done = config.epochs * len(texts), 0
    for _ in range(config.epochs):
        for document in generator.permutation(len(texts)):
            learning_rate = config.learning_rate * (1 - done / steps)
            done += 1
            rows = ngram_rows(texts[document], config)
            if not rows:
                continue
            x = np.zeros(len(weights))
            for row, count in rows.items():
                x[row] = count / rows.total()
            target = np.array([label == labels[document] for label in known])
            label_weight = len(texts) / (len(known) * labels.count(labels[document])) if config.balance else 1
            error = target - softmax(x @ weights)
            weights += learning_rate * label_weight * np.outer(x / (x @ x), error)
    return weights


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=5), CONFIGS, st.integers(2, 21), st.integers(0, 9))
def test_scores_equal_the_reference(texts: list[str], config: ClassifierConfig, num_labels: int, seed: int) -> None:
    """Within float32: sums of a few hundred weights of size 1."""
    weights = np.random.default_rng(seed).standard_normal((1 << config.table_bits, num_labels)).astype(np.float32)
    classifier = TextClassifier([f"{i:02}" for i in range(num_labels)], weights, config)
    scores = classifier.predict_batch(pack_documents(texts))
    expected = [softmax(logits(ngram_rows(text, config), weights)) for text in texts]
    np.testing.assert_allclose(scores, expected, rtol=2e-5, atol=1e-6)
    label, score = classifier.predict(texts[0])
    assert score == scores[0].max() and label == f"{scores[0].argmax():02}"


@settings(max_examples=40)
@given(st.lists(st.tuples(TEXTS, st.sampled_from("abc")), min_size=2, max_size=8), CONFIGS)
def test_training_equals_the_reference(examples: list[tuple[str, str]], config: ClassifierConfig) -> None:
    texts, labels = map(list, zip(*[*examples, ("one", "a"), ("two", "b")], strict=True))
    weights = TextClassifier.fit(texts, labels, config).weights
    np.testing.assert_allclose(weights, train(texts, labels, config), rtol=1e-3, atol=1e-4)


def sentences(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    words = {
        "numbers": ["one", "two", "three", "four", "five"],
        "colours": ["red", "green", "blue", "grey", "five"],
    }
    choice = random.Random(seed)
    labels = [choice.choice([*words]) for _ in range(count)]
    return [" ".join(choice.choices(words[label], k=6)) for label in labels], labels


def test_a_classifier_learns_and_is_deterministic_in_the_seed() -> None:
    texts, labels = sentences(200)
    classifier = TextClassifier.fit(texts, labels)
    unseen, truth = sentences(200, seed=1)
    assert [classifier.predict(text)[0] for text in unseen] == truth
    again, other = (TextClassifier.fit(texts, labels, ClassifierConfig(seed=seed)) for seed in (0, 1))
    assert np.array_equal(classifier.weights, again.weights)
    assert not np.array_equal(classifier.weights, other.weights)


def test_balance_gives_a_rare_label_its_share() -> None:
    texts, labels = ["a b"] * 95 + ["a c"] * 5, ["common"] * 95 + ["rare"] * 5
    balanced, plain = (
        TextClassifier.fit(texts, labels, ClassifierConfig(balance=balance, char_ngrams=0, epochs=1))
        for balance in (True, False)
    )
    rare = balanced.labels.index("rare")
    score, unbalanced = (part.predict_batch(pack_documents(["a"]))[0][rare] for part in (balanced, plain))
    assert score > unbalanced + 0.1


def test_long_documents_are_read_in_parts() -> None:
    classifier = TextClassifier.fit(*sentences(50))
    text = "red five " * 3000 + "é" * 5000
    expected = softmax(logits(ngram_rows(text, classifier.config), classifier.weights))
    np.testing.assert_allclose(classifier.predict_batch(pack_documents([text]))[0], expected, rtol=1e-4)


def test_training_reads_the_first_mebibyte_up_to_a_whole_character() -> None:
    texts = ["one two", "é" * (1 << 19) + " red", "x" + "é" * ((1 << 19) - 1) + "€ red"]
    config = ClassifierConfig(table_bits=8, char_ngrams=2, epochs=1)
    cut = [texts[0], "é" * (1 << 19), "x" + "é" * ((1 << 19) - 1)]
    weights = TextClassifier.fit(texts, ["a", "b", "b"], config).weights
    assert np.array_equal(weights, TextClassifier.fit(cut, ["a", "b", "b"], config).weights)


def test_a_text_without_ngrams_has_equal_scores() -> None:
    classifier = TextClassifier.fit(*sentences(50))
    assert classifier.predict_batch(pack_documents(["", " \n"])).tolist() == [[0.5, 0.5]] * 2
    assert classifier.predict_batch(pack_documents([])).shape == (0, 2)


def test_a_saved_classifier_gives_the_same_scores(tmp_path: Path) -> None:
    texts, labels = sentences(60)
    config = ClassifierConfig(table_bits=10, char_ngrams=3, learning_rate=0.3)
    classifier = TextClassifier.fit(texts, labels, config)
    classifier.save(tmp_path / "model.safetensors")
    loaded = TextClassifier.load(tmp_path / "model.safetensors")
    assert (loaded.labels, loaded.config) == (("colours", "numbers"), config)
    batch = pack_documents(texts)
    assert np.array_equal(loaded.predict_batch(batch), classifier.predict_batch(batch))


def test_bad_input_is_a_user_error(tmp_path: Path) -> None:
    for texts, labels, message in (
        (["a", "b"], ["x"], "2 texts and 1 labels"),
        (["a", "b"], ["x", "x"], "have 1 different labels"),
        ([], [], "have 0 different labels"),
    ):
        with pytest.raises(UserError, match=message):
            TextClassifier.fit(texts, labels)
    with pytest.raises(UserError, match="set one of them"):
        ClassifierConfig(word_ngrams=0, char_ngrams=0)
    with pytest.raises(UserError, match="does not exist"):
        TextClassifier.load(tmp_path / "missing")


def header(**fields: object) -> dict[str, str]:
    config = {"table_bits": 8}
    content = {"format": "textmill text classifier 1", "labels": ["a", "b"], "config": config, **fields}
    return {"classifier": json.dumps(content)}


@pytest.mark.parametrize(
    ("metadata", "shape", "value", "message"),
    [
        (header(labels=["a"]), (256, 1), 0, "it has 1 labels"),
        (header(labels=["a", "a"]), (256, 2), 0, "not different texts"),
        (header(labels=5), (256, 2), 0, "damaged"),
        (header(config={"table_bits": 60}), (256, 2), 0, "table_bits is 60"),
        (header(config={"bits": 8}), (256, 2), 0, "damaged"),
        (header(config=[1]), (256, 2), 0, "damaged"),
        (header(), (255, 2), 0, r"shape \[255, 2\]"),
        (header(), (256, 2), math.nan, "not finite"),
        (header(format="another"), (256, 2), 0, "not a text classifier"),
        ({"classifier": "[" * 100_000}, (256, 2), 0, "damaged"),
        ({"classifier": "5"}, (256, 2), 0, "not a text classifier"),
        ({}, (256, 2), 0, "not a text classifier"),
    ],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, metadata: dict[str, str], shape: tuple[int, int], value: float, message: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weights": np.full(shape, value, np.float32)}, path, metadata)
    with pytest.raises(UserError, match=message):
        TextClassifier.load(path)


@settings(max_examples=50)
@given(st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("classifier") / "model.safetensors"
    TextClassifier.fit(["a", "b"], ["x", "y"], ClassifierConfig(table_bits=8)).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, min(600, len(content) - 1)))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with suppress(UserError):
        TextClassifier.load(path).predict("a")


def test_a_threshold_keeps_the_best_part() -> None:
    scores = np.random.default_rng(0).random(1000, np.float32)
    for kept in (0.0, 0.001, 0.25, 1.0):
        assert (scores >= score_quantile(scores, kept)).sum() == round(kept * 1000)
    assert score_quantile(np.array([1, 1, 0], np.float32), 1 / 3) == 1
    for bad, kept in (([], 0.5), ([1.0], 1.5), ([1.0], math.nan)):
        with pytest.raises(UserError):
            score_quantile(np.array(bad, np.float32), kept)
