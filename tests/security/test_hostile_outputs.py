"""JSON files of outputs from an untrusted place: each has its schema, and its numbers exist."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.experiments.scaling_law import Measurement, Parabola, PowerLaw, ScalingLaw
from lm.experiments.trial import TrialResult
from lm.text.chunks import Range
from lm.text.documents import TextStatistics
from lm.text.held_out import Selection
from lm.text.ingest import GroupTexts, Text
from lm.text.sources import Source
from tasks.runtime.inputs import ChunkGroup, TextGroup, read_groups, read_text_groups, write_groups
from tasks.runtime.output import read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.schemas import read_json_content
from tasks.runtime.stage import Stage
from tests.helpers.roots import materialize, run_context


@pytest.fixture
def run(tmp_path: Path) -> RunContext:
    return run_context(tmp_path / "root")


_GROUP = {"chunks": 1, "sha256": "ab" * 32, "start": 0, "end": 9}
_TOTALS = {"tokens": 1, "documents": 1, "bytes": 5}
_POWER = PowerLaw(1.0, 0.5, 0.1)
_LAW = ScalingLaw([Parabola(1e12, 0.1, 1e6, 1e5, 3.0, True)], _POWER, _POWER, _POWER, 0.0, 0.1, 0.1)
CONTENTS: dict[str, Any] = {
    "texts.json": {
        "kept": [{"file": None, "source": 0, "bytes": 5, "ranges": [[0, 5]]}],
        "held_out_bytes": 0,
        "kept_statistics": asdict(TextStatistics()),
        "held_out_statistics": asdict(TextStatistics()),
    },
    "text_groups.json": {
        "train": [{"group": 0, "interval": None, "bytes": 5, "digest": "ab" * 32}],
        "valid": [],
    },
    "groups.json": [_GROUP],
    "chunk_groups.json": {"train": [{"part": 0, "group": _GROUP}], "valid": []},
    "shard.json": _TOTALS,
    "index.json": {"vocab_size": 300, "separator": "x", "tokenizer": "ab" * 32, "train": _TOTALS, "valid": _TOTALS},
    "training.json": {"best": "step-0000001"},
    "samples.json": [{"prompt": "a", "text": "b"}],
    "trial.json": {
        **asdict(TrialResult("finished", "", 9, 90, 1000, 1e9, 3, 2.5, None, [{"step": 9, "valid_loss": None}])),
        "model": "ab" * 32,
    },
    "law.json": {
        "measurements": [asdict(Measurement(1e12, 1e6, 1e5, 3.0))],
        "law": asdict(_LAW),
        "prediction": None,
        "surface": None,
        "best_of_largest_budget": 0,
    },
}


@pytest.mark.parametrize("name", CONTENTS)
def test_json_content_with_another_schema_is_refused(tmp_path: Path, name: str) -> None:
    path, content = tmp_path / name, CONTENTS[name]
    path.write_text(json.dumps(content))
    assert read_json_content(path) == content
    invalid: list[Any] = [None, 7, "x", [7], {"train": 7}, {}, {"train": [[7]], "valid": []}, [{"prompt": "a"}]]
    invalid += [{**content, key: [-1]} for key in content] if isinstance(content, dict) else []
    for other in invalid:
        path.write_text(json.dumps(other))
        with pytest.raises(UserError, match=f"{name} is not valid"):
            read_json_content(path)


@pytest.mark.parametrize(("part", "source", "text"), [("texts", 1, 0), ("texts", None, 0), ("chunks", 0, 1)])
def test_a_chunk_of_a_missing_text(run: RunContext, part: str, source: int | None, text: int) -> None:
    """The digests are valid, but an index is past the end or missing."""
    texts = GroupTexts(kept=[Text(None, source, 5, [(0, 5)])])
    ranges = [Range(text, 0, 5, True, "ab" * 32)]

    def ingest(out: Attempt, text: str) -> None:
        out.sources = [Source("a.txt", 5, "ab" * 32)]
        (out.directory / "texts.json").write_text(json.dumps(asdict(texts)))

    def chunk(out: Attempt, text: str) -> None:
        write_groups(out.directory, [ranges], 0)

    refs = [materialize(Stage(body.__name__, body), run, "x") for body in (ingest, chunk)]
    (group,) = read_output(run.store, refs[1]).json("groups.json")
    with pytest.raises(UserError, match=f"Refresh the {'ingest' if part == 'texts' else 'chunk'} stage"):
        ChunkGroup(TextGroup(refs[0], "ab" * 32, Selection(0), 0), refs[1], **group).open(run.store)


def test_a_list_of_groups_that_do_not_exist(run: RunContext) -> None:
    def write(out: Attempt, name: str) -> None:
        (out.directory / name).write_text(json.dumps(CONTENTS[name]))

    texts, chunks = (materialize(Stage("x", write), run, name) for name in ("text_groups.json", "chunk_groups.json"))
    with pytest.raises(UserError, match="Refresh the ingest stage"):
        read_text_groups(run.store, texts, [], "train")
    with pytest.raises(UserError, match="Refresh the chunk stage"):
        read_groups(run.store, chunks, [], [], "train")


@pytest.mark.parametrize("curve", [[{"step": "9"}], [{"step": [9]}], [9]])
def test_a_curve_of_a_trial_has_numbers_only(tmp_path: Path, curve: list[Any]) -> None:
    path = tmp_path / "trial.json"
    path.write_text(json.dumps({**CONTENTS["trial.json"], "curve": curve}))
    with pytest.raises(UserError, match=r"trial\.json is not valid: curve\.0"):
        read_json_content(path)


@pytest.mark.parametrize("value", ['"1"', "NaN", "1e999", "null"])
def test_a_law_has_finite_numbers_only(tmp_path: Path, value: str) -> None:
    path = tmp_path / "law.json"
    path.write_text(json.dumps(CONTENTS["law.json"]).replace('"coefficient": 1.0', f'"coefficient": {value}'))
    with pytest.raises(UserError, match=r"law\.json is not valid: law\.parameters\.coefficient"):
        read_json_content(path)
