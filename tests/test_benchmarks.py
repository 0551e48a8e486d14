"""The benchmark of the tokenizer, on a text too small to tell anything about speed: that it runs, and compares."""

import json
import subprocess
import sys
from pathlib import Path

from lm.demo_corpus import demo_stories


def test_the_tokenizers_benchmark_compares_results(shared_data: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(demo_stories(3000)), encoding="utf-8")
    vocabulary = ["--vocab", str(shared_data / "gpt2_vocab.json"), "--merges", str(shared_data / "gpt2_merges.txt")]
    command = [sys.executable, "-m", "benchmarks.tokenizer", "--corpus", str(corpus), *vocabulary]
    done = subprocess.run(
        [*command, "--only", "encode,count", "--rounds", "1", "--directory", str(tmp_path / "work"), "--json"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] is True
    assert result["checks"]
    assert all(ratio > 0 for ratio in result["ratios"].values())
