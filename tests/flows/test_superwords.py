"""Superwords in the pipeline: from text to sampled text, and the keys of a run without them."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from lm.text.patterns import SEGMENT_PATTERNS
from lm.tokenizer.config import TokenizerConfig
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.pipelines import STAGES, Runner

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.slow
def test_a_run_with_superwords(run: Runner, config: PipelineConfig) -> None:
    config = replace(config, tokenizer=TokenizerConfig(vocab_size=400, superwords=100))
    assert run(config) == STAGES
    assert run(config) == []
    merge = run.output("merge")
    tokenizer = Tokenizer.load(merge.directory("tokenizer"))
    assert tokenizer.size == 400
    assert tokenizer.pattern == SEGMENT_PATTERNS["gpt2"]
    assert max(token.count(b" ") for token in tokenizer.vocab.values()) >= 2
    figures = merge.manifest["figures"]["superwords"]
    assert figures["merges"] == 100
    assert f"at least {figures['min_frequency']:,} times" in (merge.page or "")
    texts = [Path(name).read_text(encoding="utf-8") for name in (*config.data.train, *config.data.valid)]
    index = run.output("encode").json("index.json")
    for split, text in zip(("train", "valid"), texts, strict=True):
        assert index[split]["tokens"] == len(tokenizer.encode_reference(text)), "chunks are cut between segments"
    # Threads do not change what is learned.
    other = replace(config, execution=replace(config.execution, threads=1))
    digest = merge.digest
    assert run(other, refresh=("merge",)) == ["merge"]
    assert run.output("merge").digest == digest
