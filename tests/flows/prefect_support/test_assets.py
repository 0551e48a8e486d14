"""The asset events of a run: keys, inputs and what they leave out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.assets import Asset
from prefect.events.worker import EventsWorker

from flows.prefect_support import assets
from flows.prefect_support.assets import MATERIALIZED, NOT_FINITE, REFERENCED, AssetEvents, asset_key
from lm.text.config import DataConfig
from lm.text.sources import Source
from tasks.runtime.output import Output, Ref
from tasks.runtime.run_context import RunContext

DIGEST = "d" * 64


class Recorded(AssetEvents):
    """The events of a run below ``/root``, without Prefect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, list[str], dict[str, Any]]] = []
        monkeypatch.setattr(assets, "emit_event", self._record)
        monkeypatch.setattr(EventsWorker, "instance", lambda: None)
        super().__init__(RunContext("/root", "run"))

    def _record(
        self, event: str, resource: dict[str, str], related: list[dict[str, str]], payload: dict[str, Any]
    ) -> None:
        Asset(key=resource["prefect.resource.id"])  # it refuses invalid keys
        ids = [item["prefect.resource.id"] for item in related if item["prefect.resource.role"] == "asset"]
        self.events.append((event, resource["prefect.resource.id"], ids, payload))

    def finish(self, ref: Ref, is_made: bool = True, **manifest: Any) -> None:
        base = {"format": 1, "files": [], "sources": [], "figures": {}, "made": {"run": "earlier"}, "ingredients": {}}
        self.emit(Output(self._run.store, ref, base | manifest), is_made, None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("/data/my texts/50%.txt", "file:///data/my_texts/50_.txt"),
        ("demo:400", "demo://400"),
        ("s3://bucket/a/b.txt", "s3://bucket/a/b.txt"),
        ("https://me:secret@host/a.txt", "https://host/a.txt"),
        ("/data/\udcff.txt", "file:///data/_.txt"),
    ],
)
def test_the_key_of_an_asset_is_a_url(url: str, key: str) -> None:
    assert asset_key(url) == key


def test_a_key_has_no_secret_and_is_still_that_of_one_file() -> None:
    first, second = (asset_key(f"https://host/file?id={number}&signature=secret") for number in (1, 2))
    assert first != second and "secret" not in first + second


@given(st.text(min_size=1))
def test_prefect_takes_the_key_of_any_path(path: str) -> None:
    Asset(key=asset_key(f"/{path}"[:400]))


def test_groups_are_no_assets_and_their_stage_has_their_inputs(recorded: Recorded) -> None:
    source = Source("/texts/a.txt", 5, DIGEST)
    ingest, chunk, count = (Ref(stage, DIGEST) for stage in ("ingest", "chunk", "count"))
    groups = {
        stage: [Ref(f"{stage}-group", str(number)) for number in range(3)] for stage in ("ingest", "chunk", "count")
    }
    sums = [Ref("count-sum", "0")]
    recorded.note_inputs(groups["ingest"], [{"group": [source]}])
    recorded.note_inputs([ingest], [{"train": groups["ingest"], "data": DataConfig()}])
    recorded.finish(ingest)
    recorded.note_inputs(groups["chunk"], [{"group": groups["ingest"]}])
    recorded.note_inputs([chunk], [{"train": groups["chunk"]}])
    recorded.finish(chunk, is_made=False)
    recorded.note_inputs(groups["count"], [{"group": groups["chunk"][0]}, {"group": groups["ingest"][0]}])
    recorded.note_inputs(sums, [{"counts": groups["count"]}])
    recorded.note_inputs([count], [{"counts": sums}])
    recorded.finish(count)
    recorded.finish(count)
    keys = {ref.stage: f"file:///root/{ref.stage}/{DIGEST}" for ref in (ingest, chunk, count)}
    assert [event[:3] for event in recorded.events] == [
        (MATERIALIZED, keys["ingest"], ["file:///texts/a.txt"]),
        (REFERENCED, keys["chunk"], [keys["ingest"]]),
        (MATERIALIZED, keys["count"], [keys["chunk"], keys["ingest"]]),
    ]


def test_an_event_of_many_sources_names_their_directories(recorded: Recorded) -> None:
    sources = [Source(f"/texts/{number % 2}/{number}.txt", 5, DIGEST) for number in range(1_000)]
    recorded.note_inputs([Ref("ingest", DIGEST)], sources)
    recorded.finish(Ref("ingest", DIGEST))
    assert recorded.events[0][2] == ["file:///texts/0/", "file:///texts/1/"]
    refs = [Ref("train", f"{number:064}") for number in range(1_000)]
    recorded.note_inputs([Ref("sweep", DIGEST)], refs)
    recorded.finish(Ref("sweep", DIGEST))
    assert len(recorded.events[1][2]) == 80, "Prefect refuses an event with more than 100 related resources"


def test_the_model_of_a_sweep_is_made_from_what_its_manifest_names(recorded: Recorded) -> None:
    """A trial trains it, so that the run never calls its stage."""
    encode, group, model = Ref("encode", "1"), Ref("encode-group", "2"), Ref("train", DIGEST)
    recorded._run.digests.update({encode: "a" * 64, group: "b" * 64})
    recorded.note_inputs([group], [Source("/a.txt", 5, DIGEST)])
    recorded.note_inputs([encode], [group])
    recorded.finish(encode)
    named = {"index": {"encode": "a" * 64}, "shards": [{"encode-group": "b" * 64}], "tokenizer": {"merge": DIGEST}}
    recorded.finish(model, ingredients={"parameters": named})
    assert recorded.events[1][2] == ["file:///root/encode/1"]


def test_an_output_of_an_earlier_run_that_was_given_to_this_one_has_no_event(recorded: Recorded) -> None:
    recorded.finish(Ref("merge", DIGEST), is_made=False)
    assert recorded.events == []


def test_the_payload_has_digest_size_and_figures(recorded: Recorded) -> None:
    ref = Ref("train", DIGEST)
    files = [{"path": name, "bytes": 7, "sha256": DIGEST} for name in ("a", "b")]
    figures = {"valid_loss": 2.5, "best": "step-1", "skipped_steps": 3}
    recorded.finish(ref, files=files, figures=figures)
    (event, _, _, payload), (warning, _, _, reason) = recorded.events
    digest = Output(recorded._run.store, ref, {"format": 1, "files": files, "sources": []}).digest
    assert (event, payload["digest"], payload["bytes"]) == (MATERIALIZED, digest, 14)
    assert payload["figures"] == {"valid_loss": 2.5, "skipped_steps": 3}
    assert warning == NOT_FINITE and reason["message"].startswith("3 steps were skipped")
    recorded.finish(Ref("train", "e" * 64), is_made=False, figures=figures)
    assert len(recorded.events) == 2, "the run that trained the model has told of the steps"


def test_an_event_that_cannot_be_sent_is_no_error(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("too large")

    monkeypatch.setattr(assets, "emit_event", fail)
    recorded.finish(Ref("train", DIGEST))
    assert "Prefect gets no event" in caplog.text and "too large" in caplog.text
