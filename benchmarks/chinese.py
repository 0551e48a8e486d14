"""Compare Chinese tokens within words (jieba) with those of GPT-2's pattern, on the manual pages of a directory.

``python -m benchmarks.chinese DIRECTORY [--vocab-size 4096] [--megabytes 8]``. The directory is that of the man pages
of the Debian package manpages-zh, such as ``/usr/share/man/zh_CN``. For each pattern the pipeline trains a tokenizer
and a small model, which reads the same number of bytes. Prints for each: tokens per character, the share of the
vocabulary that occurs in the validation text, the share of merges that cross a word, and the loss in bits per byte. The
last line is JSON.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import regex

from lm.text.patterns import PATTERNS
from lm.text.pretokenize import END_OF_TEXT, JIEBA, pretokenize
from lm.tokenizer.tokenizer import Tokenizer

_ESCAPES = regex.compile(r"\\f.|\\[,/&|%]|\\\(..")
_VALID_SHARE = 20  # every twentieth page
_BATCH, _CONTEXT = 8, 128
_SHAPE = {"context_length": _CONTEXT, "d_model": 128, "num_layers": 3, "num_heads": 4, "d_ff": 352}
_TRAIN = {"batch_size": _BATCH, "optimizer": "adamw", "max_lr": 0.003, "min_lr": 0, "sample_tokens": 0}


def write_texts(pages: Path, directory: Path) -> dict[str, Path]:
    """Write the text of the pages, without formatting, as a file to train on and one to validate on."""
    texts: dict[str, list[str]] = {"train": [], "valid": []}
    for number, path in enumerate(sorted(pages.rglob("*.gz"))):
        page = gzip.decompress(path.read_bytes()).decode("utf-8", "ignore")
        lines = [line for line in page.splitlines() if not line.startswith((".", "'"))]
        text = _ESCAPES.sub("", "\n".join(lines)).replace("\\-", "-").replace("\\", "")
        texts["train" if number % _VALID_SHARE else "valid"].append(text + "\n")
    if not texts["valid"]:
        raise SystemExit(f"There are no compressed manual pages in {pages}.")
    paths = {name: directory / f"{name}.txt" for name in texts}
    for name, path in paths.items():
        path.write_text("".join(f"{text}{END_OF_TEXT}\n" for text in texts[name]), encoding="utf-8")
    return paths


def run(root: Path, texts: dict[str, Path], until: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run the pipeline and return the record of the run."""
    options = {f"data.{name}": [str(path)] for name, path in texts.items()} | options
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code = "import sys; from textmill.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "--root", str(root), "--until", until, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    record: dict[str, Any] = json.loads((root / "runs" / "latest.json").read_text(encoding="utf-8"))
    return record


def output(root: Path, record: dict[str, Any], stage: str) -> tuple[Path, dict[str, Any]]:
    """Return the files of a stage, and its manifest."""
    directory = root / stage / record["stages"][stage]["key"]
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    return directory / manifest["attempt"], manifest


def measure(pattern: str, root: Path, texts: dict[str, Path], vocab_size: int, train_bytes: int) -> dict[str, float]:
    """Train a tokenizer and a model, and return their figures."""
    options: dict[str, Any] = {"tokenizer.pattern": pattern, "tokenizer.vocab_size": vocab_size}
    options |= {f"model.{name}": value for name, value in _SHAPE.items()}
    record = run(root, texts, "encode", options)
    tokenizer = Tokenizer.load(output(root, record, "merge")[0] / "tokenizer")
    text, valid = (texts[name].read_text(encoding="utf-8") for name in ("train", "valid"))
    ids = tokenizer.encode(valid)
    tokens_per_byte = len(tokenizer.encode(text)) / len(text.encode())
    steps = round(train_bytes * tokens_per_byte / (_BATCH * _CONTEXT))
    train = {**_TRAIN, "steps": steps, "warmup_steps": steps // 10, "eval_interval": steps}
    record = run(root, texts, "train", options | {f"train.{name}": value for name, value in train.items()})
    words = Counter(word.encode() for word in pretokenize(text, JIEBA))
    within_words = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, len(word) + 1)}
    crossing = sum(left + right not in within_words for left, right in tokenizer.merges)
    return {
        "tokens_per_character": len(ids) / len(valid),
        "vocabulary_used": len(set(ids)) / tokenizer.size,
        "crossing_merges": crossing / len(tokenizer.merges),
        "steps": steps,
        "bits_per_byte": output(root, record, "train")[1]["figures"]["valid_bits_per_byte"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--megabytes", type=float, default=8, help="text that each model reads")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as home:
        texts = write_texts(options.directory, Path(home))
        print({name: f"{path.stat().st_size / 1e6:.2f} MB" for name, path in texts.items()})
        for name, pattern in (("gpt2", PATTERNS["gpt2"]), ("jieba", JIEBA)):
            root = Path(home, "root")
            results[name] = measure(pattern, root, texts, options.vocab_size, int(options.megabytes * 1e6))
            print(name, {figure: round(value, 4) for figure, value in results[name].items()})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
