"""Text classifier: a linear softmax over hashed word and character n-grams, for quality, toxicity and language."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lm.common.errors import UserError
from lm.curate.config import ClassifierConfig
from lm.curate.document_batch import DocumentBatch, pack_documents
from lm.kernels.curation.ngram_classifier import (
    LABELS_AT_A_TIME,
    MAX_ROWS_PER_BYTE,
    MULTIPLIER,
    STATE_SIZE,
    NgramHash,
    score_documents,
    train_epoch,
)
from lm.kernels.jit import Floats, log_compilation

_FORMAT = "textmill text classifier 1"
_ROWS_AT_A_TIME = 4096  # n-grams between hashing and adding up weights: 16 KiB, which the fastest cache holds
_MAX_TRAINING_BYTES = 1 << 20  # of a document; its n-grams take eight times the memory
_MAX_LABELS = 1024


class TextClassifier:
    """A linear classifier with L labels. The logits of a text are the mean of the weights of its n-grams.

    N-grams are words, pairs of words and character n-grams of the text, in lower case (ASCII letters only) and with one
    space for each run of ASCII white space. A word is a run of ASCII letters and digits and of other characters above
    U+00BF but those of General Punctuation (U+2000–207F) and of CJK Symbols (U+3000–303F).

    The model is that of fastText without its hidden layer (Joulin et al. 2016, https://arxiv.org/abs/1607.01759), and
    the step of an update is normalized by the squares of the inputs (NLMS, Widrow and Hoff 1960): the logits change by
    the same amount for short and long texts. Reading is thread-safe.
    """

    def __init__(self, labels: Sequence[str], weights: Floats, config: ClassifierConfig) -> None:
        """``weights``: float32 (2^table_bits, L)."""
        self.labels, self.config = tuple(labels), config
        stride = -(-len(labels) // LABELS_AT_A_TIME) * LABELS_AT_A_TIME
        self._weights = np.zeros((1 << config.table_bits, stride), np.float32)
        self._weights[:, : len(labels)] = weights

    @property
    def weights(self) -> Floats:
        """The weights, float32 (2^table_bits, L)."""
        return self._weights[:, : len(self.labels)]

    @classmethod
    def fit(
        cls, texts: Iterable[str], labels: Iterable[str], config: ClassifierConfig | None = None
    ) -> "TextClassifier":
        """Train a classifier on texts and their labels. Deterministic in the seed; uses one thread.

        Only the first MiB of a text counts. Raises UserError if there are not as many labels as texts, or fewer than
        two different labels.
        """
        config = config or ClassifierConfig()
        batch, names = pack_documents(texts), list(labels)
        if len(names) != len(batch.offsets) - 1:
            raise UserError(
                f"There are {len(batch.offsets) - 1:,} texts and {len(names):,} labels; give one label a text."
            )
        counts = Counter(names)
        if not 2 <= len(counts) <= _MAX_LABELS:
            raise UserError(
                f"The texts have {len(counts):,} different labels; a classifier needs between 2 and {_MAX_LABELS:,}."
            )
        known = sorted(counts)
        numbers = {name: number for number, name in enumerate(known)}
        classifier = cls(known, np.zeros((1 << config.table_bits, len(known)), np.float32), config)
        classifier._train(batch, np.array([numbers[name] for name in names], np.int32))
        return classifier

    def _train(self, batch: DocumentBatch, labels: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        config, num_documents, stride = self.config, len(labels), self._weights.shape[1]
        starts = batch.offsets[:-1]
        ends = np.minimum(batch.offsets[1:], starts + _MAX_TRAINING_BYTES)
        for document in np.flatnonzero(ends < batch.offsets[1:]):
            while batch.data[ends[document]] & 0xC0 == 0x80:  # inside a character
                ends[document] -= 1
        counts = np.bincount(labels, minlength=len(self.labels))
        label_weights = num_documents / (len(counts) * counts) if config.balance else np.ones(len(counts))
        longest = int((ends - starts).max(initial=0))
        rows = np.empty(MAX_ROWS_PER_BYTE * (longest + 1) + 3, np.int32)
        workspace = np.zeros(STATE_SIZE, np.uint64), rows, np.zeros(len(self._weights), np.int32)
        generator = np.random.Generator(np.random.PCG64(config.seed))
        for epoch in range(config.epochs):
            order = generator.permutation(num_documents)
            done = (epoch * num_documents + np.arange(num_documents)) / (config.epochs * num_documents)
            with log_compilation("classifier training"):
                train_epoch(
                    batch.data,
                    starts[order],
                    ends[order],
                    labels[order],
                    label_weights.astype(np.float32),
                    (config.learning_rate * (1 - done)).astype(np.float32),
                    _ngram_hash(config),
                    self._weights,
                    len(self.labels),
                    *workspace,
                    np.empty(stride, np.float32),
                )

    def predict(self, text: str) -> tuple[str, float]:
        """Return the most probable label of a text, and its probability."""
        [scores] = self.predict_batch(pack_documents([text]))
        best = int(scores.argmax())
        return self.labels[best], float(scores[best])

    def predict_batch(self, batch: DocumentBatch) -> Floats:
        """Return the probabilities of the labels of D documents, float32 (D, L). Memory does not grow with their
        lengths. A text without n-grams has the same probability for each label."""
        scores = np.empty((len(batch.offsets) - 1, self._weights.shape[1]), np.float32)
        workspace = np.empty(STATE_SIZE, np.uint64), np.empty(_ROWS_AT_A_TIME, np.int32)
        with log_compilation("classifier"):
            score_documents(batch.data, batch.offsets, _ngram_hash(self.config), self._weights, *workspace, scores)
        logits = scores[:, : len(self.labels)]
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def save(self, path: str | Path) -> None:
        """Write the weights as safetensors, with the labels and the configuration in the file's metadata, as JSON."""
        header = {"format": _FORMAT, "labels": self.labels, "config": asdict(self.config)}
        tensors = {"weights": np.ascontiguousarray(self.weights)}
        Path(path).write_bytes(save(tensors, {"classifier": json.dumps(header)}))

    @classmethod
    def load(cls, path: str | Path) -> "TextClassifier":
        """Read a classifier that :meth:`save` wrote. Raises UserError if the file is missing, damaged or another."""
        try:
            with safe_open(path, "numpy") as file:
                header = json.loads((file.metadata() or {}).get("classifier", "{}"))
                if not isinstance(header, dict) or header.get("format") != _FORMAT:
                    raise UserError(f"{path} is not a text classifier of textmill; train one with TextClassifier.fit.")
                labels, config = header["labels"], ClassifierConfig(**header["config"])
                if not all(isinstance(label, str) for label in labels) or len({*labels}) != len(labels):
                    raise ValueError("its labels are not different texts")
                if not 2 <= len(labels) <= _MAX_LABELS:
                    raise ValueError(f"it has {len(labels)} labels")
                shape = file.get_slice("weights").get_shape()
                if shape != [1 << config.table_bits, len(labels)]:
                    raise ValueError(f"its weights have the shape {shape}")
                weights = file.get_tensor("weights")
                if weights.dtype != np.float32 or not np.isfinite(weights).all():
                    raise ValueError("its weights are not finite numbers of 32 bits")
        except FileNotFoundError:
            raise UserError(f"The classifier {path} does not exist.") from None
        except UserError:
            raise
        except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
            raise UserError(f"The classifier {path} is damaged: {error}. Train it again.") from None
        return cls(labels, weights, config)


def score_quantile(scores: Floats, kept: float) -> float:
    """Return the threshold that keeps the part ``kept`` (0 to 1) of documents with the highest scores: ``scores >=
    threshold``. Documents with the same score as the last one kept are kept too. ``scores``: floats (D,), not empty.
    """
    if not len(scores) or not 0 <= kept <= 1:
        raise UserError(f"The part {kept!r} of {len(scores):,} scores is undefined; give scores and a part of 0 to 1.")
    number = round(kept * len(scores))
    if not number:
        return float("inf")
    return float(np.partition(scores, len(scores) - number)[len(scores) - number])


def _ngram_hash(config: ClassifierConfig) -> NgramHash:
    power = np.uint64(pow(MULTIPLIER, config.char_ngrams, 1 << 64))
    return NgramHash(64 - config.table_bits, config.word_ngrams, config.char_ngrams, power)
