"""Measure curation in one thread, beside the libraries that do the same: MB of UTF-8 a CPU-second.

``python -m benchmarks.curate [--only rules,masks,language] [--rounds 5] [--megabytes 20] [--datatrove PYTHON]``. All
take turns; the figures are medians. English is ASCII; mixed text has stories, Chinese, Japanese, Korean and emoji. Each
document has an e-mail address, a telephone number and an IP address for the masks.
``--datatrove`` names the Python of an environment with datatrove, whose figures come from less text. The last line is
JSON.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from benchmarks.texts import END, cjk, documents, emoji, rearranged, stories, take_bytes
from lm.curate import RulesConfig, compute_figures, first_failed_rule, pack_documents
from lm.curate.language import identify_batch
from lm.curate.masks import MASKS, mask_batch

_WORKER = Path(__file__).with_name("datatrove_filters.py")
_CONTACT = "\nWrite to ann.smith@example.com, call (283)-182-3829 or connect to 198.51.100.7.\n"
Work = Callable[[list[str]], object]


def corpora(size: int) -> Iterator[tuple[str, list[str]]]:
    """Yield names and documents of about ``size`` bytes: English in ASCII, and mixed scripts.

    After the stories, English goes on with documents of their sentences.
    """
    in_ascii = [document for document in documents(stories()) if document.isascii()]
    english = chain(in_ascii, rearranged(in_ascii))
    mixed = (document for pair in zip(documents(stories()), cjk(), emoji(), strict=False) for document in pair)
    for name, source in (("ASCII", english), ("mixed", mixed)):
        yield name, [part.removesuffix(END).decode() + _CONTACT for part in take_bytes(source, size)]


def rules(texts: list[str]) -> None:
    config = RulesConfig()
    first_failed_rule(compute_figures(pack_documents(texts), config), config)


def masks(texts: list[str]) -> None:
    batch = pack_documents(texts)
    for kind in MASKS:
        batch, _ = mask_batch(batch, kind)


def language(texts: list[str]) -> None:
    identify_batch(pack_documents(texts))


OURS: dict[str, Work] = {"rules": rules, "masks": masks, "language": language}
PEER_BYTES = {"rules": 300_000, "masks": 5_000_000, "language": 2_000_000}  # that a peer reads in a round


def py3langid(texts: list[str]) -> None:
    from py3langid import classify

    for text in texts:
        classify(text)


def datatrove_seconds(python: str, work: str, texts: list[str]) -> float:
    """Return the CPU seconds of datatrove, in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
        file.flush()
        done = subprocess.run([python, str(_WORKER), work, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} cannot run datatrove's filters:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def cpu_seconds(function: Work, texts: list[str]) -> float:
    started = time.process_time()
    function(texts)
    return time.process_time() - started


def megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def measure(work: str, texts: list[str], rounds: int, python: str | None) -> dict[str, float]:
    """Return MB/s of us and of the peers that are here, medians over rounds."""
    candidates: dict[str, tuple[Callable[[list[str]], float], list[str]]] = {
        "textmill": (lambda part: cpu_seconds(OURS[work], part), texts)
    }
    part = [text.decode() for text in take_bytes((text.encode() for text in texts), PEER_BYTES[work])]
    if work == "language":
        candidates["py3langid"] = (lambda part: cpu_seconds(py3langid, part), part)
    elif python:
        candidates["datatrove"] = (lambda part: datatrove_seconds(python, work, part), part)
    for function, _ in candidates.values():
        function(texts[:10])  # compiles, and loads models
    rates = defaultdict(list)
    for _ in range(rounds):
        for name, (seconds, part) in candidates.items():
            rates[name].append(megabytes(part) / seconds(part))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(OURS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=20, help="of text that we read in a round")
    parser.add_argument("--datatrove", metavar="PYTHON", help="of an environment with datatrove, xxhash<4 and spacy")
    options = parser.parse_args()
    results = []
    for name, texts in corpora(int(options.megabytes * 1e6)):
        for work in options.only:
            rates = measure(work, texts, options.rounds, options.datatrove)
            others = {peer: rates["textmill"] / rate for peer, rate in rates.items() if peer != "textmill"}
            print(f"{work:10} {name:6}", *(f"{peer} {rate:8.2f} MB/s" for peer, rate in rates.items()), flush=True)
            results.append({"work": work, "text": name, "rates": rates, "ratios": others})
    print(json.dumps({"results": results, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
