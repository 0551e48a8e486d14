"""Schemas of the JSON files below a root, and the functions that read them.

A root may come from an untrusted place. A file without the expected schema counts as missing, so no reader meets a path
outside its directory, or an unexpected number, depth or type. Figures and ingredients of a manifest may have any shape.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model, with_config

from lm.common.errors import UserError
from lm.files.checksum import loads_with_checksum
from lm.files.json import read_json
from tasks.runtime.store import Store

STAGE_NAME = "[a-z][a-z0-9_-]{0,63}"
ATTEMPT_NAME = re.compile("[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")
RUN_NAME = re.compile(r"\d{8}-\d{6}-[\w.-]{1,200}", re.ASCII)
_NAME = r"\.*[A-Za-z0-9_-][A-Za-z0-9_.-]*"  # neither "." nor ".."
_Path = Annotated[str, Field(pattern=f"^{_NAME}(/{_NAME})*$", max_length=255)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_StageName = Annotated[str, Field(pattern=f"^{STAGE_NAME}$")]
_Size = Annotated[int, Field(ge=0, lt=1 << 63)]
_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Interval = Annotated[list[_Size], Field(min_length=2, max_length=2)]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _File(_Schema):
    path: _Path
    bytes: _Size
    sha256: _Digest


class _Source(_Schema):
    url: str
    bytes: _Size
    sha256: _Digest


class _Provenance(_Schema):
    run: str
    at: str
    started: _Seconds
    seconds: _Seconds
    host: str


class Manifest(_Schema):
    """``<stage>/<key>/manifest.json``: a finished output."""

    stage: _StageName
    format: int
    key: _Digest
    attempt: Annotated[str, Field(pattern=f"^{ATTEMPT_NAME.pattern}$")]
    ingredients: dict[str, Any]
    sources: list[_Source]
    files: list[_File]
    """The content."""
    records: list[_File]
    """Files that describe the run. They are checked like the content."""
    page: _File | None
    """The Markdown page. If it is damaged, it is not shown, and the output still counts as intact."""
    etags: dict[_Path, str]
    """ETags of the files when they were published, on an object store."""
    figures: dict[str, Any]
    made: _Provenance


class _StageResult(_Schema):
    key: _Digest
    state: Literal["made", "cached"]
    seconds: _Seconds


class RunRecord(_Schema):
    """``runs/<name>.json``: the outputs that a run made or used."""

    name: str
    at: str = ""
    """Start, in ISO format."""
    config: dict[str, Any] = {}
    """Fields of the flow's configuration."""
    until: str | None = None
    """Last stage; None: the last of the flow."""
    state: str = ""
    error: str = ""
    title: str = ""
    """Name that a user gave the run later."""
    stages: dict[_StageName, _StageResult]
    report: _File | None = None
    """The Markdown report of a finished run."""


class LatestOutput(_Schema):
    """``<stage>/latest.json``: the key of the last output that was made."""

    key: _Digest


class SourceRecord(_Schema):
    """``sources/….json``: the digest of a source, and the version of the source when it was read."""

    source: _Source
    version: tuple[int, str] | None


class GateEntry(_Schema):
    """``gate-ledger/<number>.json``: a look at one comparison of the gate."""

    comparison: _Digest
    """Of the text, and of the configurations of both arms without their seeds."""
    evidence: _Digest
    """Of the results of all trainings."""
    at: str
    run: str
    variant: dict[str, Any]
    sizes: list[dict[str, Any]]
    """Options of the sizes."""
    seeds: Annotated[int, Field(ge=3, lt=1 << 31)]
    level: Annotated[float, Field(ge=0, le=1)]
    """Error that the look may spend."""
    verdict: Literal["accepted", "rejected", "undecided"]
    reason: str
    p: list[Annotated[float, Field(ge=0, le=1)]]
    """At each size; empty if the variant diverged."""
    speedups: list[float | None]
    """Effective speed-ups in FLOPs."""
    speedups_in_time: list[float | None]


def _record(**fields: Any) -> Any:
    """Return the schema of an object: the type of each field, or the type and the default."""
    types: dict[str, Any] = {
        name: field if isinstance(field, tuple) else (field, ...) for name, field in fields.items()
    }
    return create_model("Record", __base__=_Schema, **types)


def _list(item: Any) -> Any:
    return GenericAlias(list, (item,))


def _splits(schema: Any) -> Any:
    return _record(train=schema, valid=schema)


_STATISTICS = _record(
    documents=_Size,
    replaced=_Size,
    separators_removed=_Size,
    lengths=Annotated[list[_Size], Field(min_length=256, max_length=256)],
)
_INTERVALS = list[_Interval]
_TEXT = _record(file=_Path | None, source=_Size | None, bytes=_Size, ranges=_INTERVALS, rows=(_INTERVALS, []))
_GROUP = _record(chunks=_Size, sha256=_Digest, start=_Size, end=_Size)
_TOTALS = _record(tokens=_Size, documents=_Size, bytes=_Size)

_CONTENTS: dict[str, Any] = {
    "texts.json": _record(
        kept=_list(_TEXT),
        held_out_bytes=_Size,
        held_out_rows=(_INTERVALS, []),
        separator=(str, ""),
        kept_statistics=_STATISTICS,
        held_out_statistics=_STATISTICS,
    ),
    "text_groups.json": _splits(_list(_record(group=_Size | None, interval=_Interval | None, bytes=_Size, digest=str))),
    "removed_samples.json": GenericAlias(dict, (str, _list(_record(hash=str, text=str, value=float, source=str)))),
    "repeated_samples.json": _list(_record(hash=str, text=str)),
    "shared_samples.json": _list(_record(hash=str, protected=str, text=str)),
    "least_score.json": float,
    "held_out_scores.json": _record(wanted=list[float], unwanted=list[float]),
    "count.json": int,
    "losing_groups.json": _record(groups=_list(_Size)),
    "choice.json": _record(vocab_size=int, model=dict[str, Any], train=dict[str, Any]),
    "groups.json": _list(_GROUP),
    "chunk_groups.json": _splits(_list(_record(part=_Size, group=_GROUP))),
    "chunks.jsonl": _list(  # each line
        _record(
            text=_Size,
            start=_Size,
            end=_Size,
            last=bool,
            sha256=_Digest,
            separator=(str, ""),
            special_texts=(_Size, 0),
        )
    ),
    "shard.json": _TOTALS,
    "index.json": _record(vocab_size=_Size, separator=str, tokenizer=_Digest, train=_TOTALS, valid=_TOTALS),
    "training.json": _record(best=_Path),
    "base.json": _record(checkpoint=str),
    "samples.json": _list(_record(prompt=str, text=str)),
    "mixture.json": _record(
        sources=list[str],
        tokens=list[_Size],
        max_epochs=list[float | None],
        highest_weights=list[float],
        target=list[float],
        runs=_list(
            _record(
                point=int,
                length=(float, 1.0),
                weights=list[float],
                losses=list[float],
                left_out=list[float],
                target=float,
                left_out_target=float,
            )
        ),
        target_tokens=(float, 0.0),
        law=_record(irreducible=list[float], worths=list[list[float]], exponents=list[float]),
        left_out_error=float,
        mixtures=GenericAlias(
            dict,
            (
                str,
                _record(weights=list[float], losses=list[float], target=float, measured=(list[list[float]], [])),
            ),
        ),
    ),
    "times.json": _record(
        baseline_seconds=list[float | None],
        variant_seconds=list[float | None],
        speedups=list[float | None],
        hours=_Seconds,
        hours_to_needed=(_Seconds | None, None),
        hours_to_largest=_Seconds,
    ),
    "examples.json": _record(reward=str, damaged=list[str]),
}
"""Schemas of the JSON files in outputs, by name; :func:`_content_schema` has those of a sweep."""


@functools.cache
def _content_schema(name: str) -> "TypeAdapter[Any]":
    """Return the schema of the JSON files with a name in outputs. Those of a sweep are lm's dataclasses."""
    if name == "trial.json":
        from lm.experiments.trial import TrialResult

        @with_config(_Schema.model_config)
        @dataclass(frozen=True, kw_only=True)
        class Trial(TrialResult):
            curve: list[dict[str, int | float | None]]
            model: _Digest | None

        return TypeAdapter(Trial)
    if name == "law.json":
        from lm.experiments.loss_surface import LossSurface
        from lm.experiments.scaling_law import Measurement, Prediction, ScalingLaw

        class Surface(_Schema):
            fit: LossSurface
            prediction: Prediction | None

        class Law(_Schema):
            measurements: list[Measurement]
            law: ScalingLaw
            prediction: Prediction | None
            surface: Surface | None
            best_of_largest_budget: _Size

        return TypeAdapter(Law)
    if name == "gate.json":
        from lm.experiments.config import GateConfig
        from lm.experiments.gate import GateResult

        class Gate(_Schema):
            config: GateConfig
            result: GateResult

        return TypeAdapter(Gate)
    if name == "record.json":
        from lm.experiments.config import RecordConfig
        from lm.experiments.record import RecordResult

        class Record(_Schema):
            record: RecordConfig
            text: _Digest
            result: RecordResult

        return TypeAdapter(Record)
    return TypeAdapter(_CONTENTS[name])


def read_json_content(path: Path) -> Any:
    """Read a JSON file of an output. Raises UserError if it does not have the schema for its name."""
    content = read_json(path)
    try:
        _content_schema(path.name).validate_json(path.read_bytes())
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path} is not valid: {field}: {error.errors()[0]['msg']}.") from None
    return content


def parse_chunks(lines: bytes) -> list[dict[str, Any]] | None:
    """Return the ranges of all chunks in lines of ``chunks.jsonl``; None if they are not valid."""
    schema = _content_schema("chunks.jsonl")
    try:
        return [part.model_dump() for line in lines.splitlines() for part in schema.validate_json(line)]
    except ValidationError:
        return None


def read_record(schema: type[_Schema], store: Store, *parts: str) -> dict[str, Any] | None:
    """Read a JSON file with its checksum; None if it is missing, damaged, or has another schema."""
    data = store.read_bytes(*parts) or b""
    try:
        schema.model_validate_json(data)
    except ValidationError:
        return None
    return loads_with_checksum(data)
