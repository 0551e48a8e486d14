"""Schemas of the JSON files below a root, and the functions that read them.

A root may come from an untrusted place. A file without the expected schema counts as missing, so no reader meets a path
outside its directory, or an unexpected number, depth or type. Figures and ingredients of a manifest may have any shape.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

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
_T = TypeVar("_T")


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


class _Splits(_Schema, Generic[_T]):
    train: _T
    valid: _T


class _Statistics(_Schema):
    documents: _Size
    replaced: _Size
    separators_removed: _Size
    lengths: Annotated[list[_Size], Field(min_length=256, max_length=256)]


class _Text(_Schema):
    file: _Path | None
    source: _Size | None
    bytes: _Size
    ranges: list[_Interval]
    rows: list[_Interval] = []


class _GroupTexts(_Schema):
    kept: list[_Text]
    held_out_bytes: _Size
    held_out_rows: list[_Interval] = []
    separator: str = ""
    kept_statistics: _Statistics
    held_out_statistics: _Statistics


class _TextGroup(_Schema):
    group: _Size | None
    interval: _Interval | None
    bytes: _Size
    digest: str


class _Range(_Schema):
    text: _Size
    start: _Size
    end: _Size
    last: bool
    sha256: _Digest
    separator: str = ""
    special_texts: _Size = 0


class _Group(_Schema):
    chunks: _Size
    sha256: _Digest
    start: _Size
    end: _Size


class _ChunkGroup(_Schema):
    part: _Size
    group: _Group


class _Totals(_Schema):
    tokens: _Size
    documents: _Size
    bytes: _Size


class _Index(_Splits[_Totals]):
    vocab_size: _Size
    separator: str
    tokenizer: _Digest


class _Training(_Schema):
    best: _Path


class _Examples(_Schema):
    reward: str
    damaged: list[str]


class _Answer(_Schema):
    prompt: str
    response: str
    tokens: _Size
    ground_truth: Any
    rewards: dict[str, float] | None


class _Sample(_Schema):
    prompt: str
    text: str


class _Trial(_Schema):
    state: Literal["finished", "pruned", "diverged", "refused"]
    reason: str
    steps: _Size
    tokens: _Size
    parameters: _Size
    flops: float
    train_loss: float | None
    valid_loss: float | None
    valid_bits_per_byte: float | None
    curve: list[dict[str, int | float | None]]
    model: _Digest | None


class _PowerLaw(_Schema):
    coefficient: float
    exponent: float
    exponent_error: float | None


class _Measurement(_Schema):
    budget: float
    parameters: float
    tokens: float
    loss: float


class _Parabola(_Schema):
    budget: float
    curvature: float
    best_parameters: float
    best_tokens: float
    best_loss: float
    is_inside: bool


class _ScalingLaw(_Schema):
    parabolas: list[_Parabola]
    parameters: _PowerLaw
    tokens: _PowerLaw
    loss: _PowerLaw
    irreducible_loss: float = 0.0
    loss_noise: float
    law_noise: float


class _Prediction(_Schema):
    budget: float
    parameters: float
    tokens: float
    loss: float
    low: float
    high: float


class _Law(_Schema):
    measurements: list[_Measurement]
    law: _ScalingLaw
    prediction: _Prediction | None
    best_of_largest_budget: _Size


class _Choice(_Schema):
    vocab_size: int
    model: dict[str, Any]
    train: dict[str, Any]


_CHUNK = TypeAdapter(list[_Range])
_CONTENTS: dict[str, TypeAdapter[Any]] = {
    "texts.json": TypeAdapter(_GroupTexts),
    "text_groups.json": TypeAdapter(_Splits[list[_TextGroup]]),
    "choice.json": TypeAdapter(_Choice),
    "groups.json": TypeAdapter(list[_Group]),
    "chunk_groups.json": TypeAdapter(_Splits[list[_ChunkGroup]]),
    "shard.json": TypeAdapter(_Totals),
    "index.json": TypeAdapter(_Index),
    "training.json": TypeAdapter(_Training),
    "samples.json": TypeAdapter(list[_Sample]),
    "examples.json": TypeAdapter(_Examples),
    "trial.json": TypeAdapter(_Trial),
    "law.json": TypeAdapter(_Law),
    "answers.json": TypeAdapter(dict[str, list[_Answer]]),
}


def read_json_content(path: Path) -> Any:
    """Read a JSON file of an output. Raises UserError if it does not have the schema for its name."""
    content = read_json(path)
    try:
        _CONTENTS[path.name].validate_python(content)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path} is not valid: {field}: {error.errors()[0]['msg']}.") from None
    return content


def parse_chunks(lines: bytes) -> list[dict[str, Any]] | None:
    """Return the ranges of all chunks in lines of ``chunks.jsonl``; None if they are not valid."""
    try:
        return [part.model_dump() for line in lines.splitlines() for part in _CHUNK.validate_json(line)]
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
