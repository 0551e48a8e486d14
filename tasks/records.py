"""The JSON files below a root, and the one way to read them.

A root may come from elsewhere. What is not of these shapes counts as not there: no path that leaves its directory, no
number, depth or type that a reader does not expect. (What a manifest says for a person, its figures and ingredients, is
of any shape.)
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lm.errors import UserError
from lm.formats import read_json
from lm.signed import read_signed
from tasks.store import Store

_PART = r"\.*[A-Za-z0-9_-][A-Za-z0-9_.-]*"  # neither "." nor ".."
_Path = Annotated[str, Field(pattern=f"^{_PART}(/{_PART})*$", max_length=255)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_StageName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]{0,63}$")]
_Size = Annotated[int, Field(ge=0, lt=1 << 63)]
_Seconds = Annotated[float, Field(ge=0, le=1e12)]


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _File(_Shape):
    path: _Path
    bytes: _Size
    sha256: _Digest


class _Source(_Shape):
    url: str
    bytes: _Size
    sha256: _Digest


class _Made(_Shape):
    run: str
    at: str
    started: _Seconds
    seconds: _Seconds
    host: str


class Manifest(_Shape):
    """``<stage>/<key>/manifest.json``: a finished output."""

    stage: _StageName
    format: int
    key: _Digest
    attempt: Annotated[str, Field(pattern="^[0-9]{8}T[0-9]{6}-[0-9a-f]{8}$")]
    ingredients: dict[str, Any]
    sources: list[_Source]
    files: list[_File]
    """The content."""
    records: list[_File]
    """What tells of the run; as well kept as the content."""
    page: _File | None
    """What only a person reads: not made anew where it is damaged, and then not shown either."""
    figures: dict[str, Any]
    made: _Made


class _Use(_Shape):
    key: _Digest
    state: Literal["made", "cached"]
    seconds: _Seconds


class RunRecord(_Shape):
    """``runs/<name>.json``: what a run has used."""

    name: str
    stages: dict[_StageName, _Use]
    report: _File | None = None
    """The page for a person, once there is one."""


class Latest(_Shape):
    """``<stage>/latest.json``: the last output made."""

    key: _Digest


class Remembered(_Shape):
    """``sources/….json``: a source as it was last seen."""

    source: _Source
    version: tuple[int, str] | None


class _Text(_Shape):
    file: _Path | None
    source: _Size | None


class _Texts(_Shape):
    train: list[_Text]
    valid: list[_Text]


class _Range(_Shape):
    text: _Size
    start: _Size
    end: _Size
    last: bool
    sha256: _Digest


class _Chunks(_Shape):
    train: list[list[_Range]]
    valid: list[list[_Range]]


class _Totals(_Shape):
    tokens: _Size
    documents: _Size
    bytes: _Size


class _Index(_Shape):
    vocab_size: _Size
    separator: str
    tokenizer: _Digest
    train: _Totals
    valid: _Totals


class _Training(_Shape):
    best: _Path


class _Sample(_Shape):
    prompt: str
    text: str


_CONTENTS: dict[str, TypeAdapter[Any]] = {
    "texts.json": TypeAdapter(_Texts),
    "chunks.json": TypeAdapter(_Chunks),
    "shard.json": TypeAdapter(_Totals),
    "index.json": TypeAdapter(_Index),
    "training.json": TypeAdapter(_Training),
    "samples.json": TypeAdapter(list[_Sample]),
}


def read_content(path: Path) -> Any:
    """A JSON file that is the content of an output; raises UserError where it is not as its stage writes it."""
    content = read_json(path)
    try:
        _CONTENTS[path.name].validate_python(content)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(f"{path} is not as its stage writes it: {place}: {error.errors()[0]['msg']}.") from None
    return content


def read(shape: type[_Shape], store: Store, *parts: str) -> dict[str, Any] | None:
    """A JSON file of the root; None where it is missing, is not as it was written, or has another shape."""
    data = store.read_bytes(*parts) or b""
    try:
        shape.model_validate_json(data)
    except ValidationError:
        return None
    return read_signed(data)
