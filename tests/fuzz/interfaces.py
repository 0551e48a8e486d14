"""Fuzz targets for the manifests and records of a root, for configs, and for requests to the server."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from starlette.types import Message

from flows.config import PipelineConfig, complete
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.files.checksum import dumps_with_checksum
from tasks.maintenance.gc import find_garbage
from tasks.maintenance.verify import verify
from tasks.runs.models import resolve_model
from tasks.runs.run_report import format_figures
from tasks.runtime.output import FORMAT, Ref, read_output
from tasks.runtime.store import Store, describe_files
from tests.fuzz.choices import DEEP, Choices, json_bytes, mutate, mutate_bytes
from tests.helpers.generating import make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli.parser import build_parser, parse
from textmill.server.app import build_app

ATTEMPT = "20260101T000000-00000000"
REF = Ref("train", "0" * 64)
USED = {"key": REF.key, "state": "made", "seconds": 1.0}
RUN = {"name": "a", "root": "b", "at": "", "stages": {"train": USED, "merge": USED}}


def _manifest(files: list[dict[str, Any]]) -> dict[str, Any]:
    made = {"run": "a", "at": "2026-01-01T00:00:00+00:00", "started": 1.0, "seconds": 1.0, "host": "b"}
    return {
        "stage": REF.stage,
        "format": FORMAT,
        "key": REF.key,
        "attempt": ATTEMPT,
        "ingredients": {"format": FORMAT, "parameters": {"config": {"steps": 3}}, "source": {}, "libraries": {}},
        "sources": [{"url": "/a", "bytes": 1, "sha256": "0" * 64}],
        "files": files[:1],
        "records": files[1:],
        "page": None,
        "figures": {"train": {"tokens": 3}},
        "made": made,
    }


def _with_checksum(content: Any, choices: Choices) -> bytes:
    """Return JSON with a valid checksum, as an attacker would write it, or damaged JSON."""
    if isinstance(content, dict) and choices.below(8) < 7:
        with suppress(RecursionError, ValueError):  # too deep for JSON, or text that is not valid Unicode
            return dumps_with_checksum(content).encode()
    return json_bytes(content, choices)


def manifest(choices: Choices, folder: Path) -> None:
    """Read a manifest, the files of its output and a run record in all ways."""
    root = folder / "root"
    directory = root / REF.stage / REF.key
    (directory / ATTEMPT / "step-1").mkdir(parents=True, exist_ok=True)
    (root / "runs").mkdir(exist_ok=True)
    (directory / ATTEMPT / "training.json").write_bytes(json_bytes({"best": "step-1"}, choices))
    (directory / ATTEMPT / "step-1" / "data").write_text("data")
    files = describe_files(directory / ATTEMPT)
    (directory / "manifest.json").write_bytes(_with_checksum(mutate(_manifest(files), choices), choices))
    (root / "runs" / "a.json").write_bytes(
        _with_checksum(mutate(RUN, choices, 2) if choices.below(2) else RUN, choices)
    )
    for read in (
        _read_output,
        lambda store: list(verify(store)),
        find_garbage,
        lambda store: resolve_model("", str(root)),
    ):
        with suppress(UserError):
            read(Store(str(root)))


def _read_output(store: Store) -> None:
    output = read_output(store, REF)
    assert len(output.digest) == 64
    output.is_intact()
    "".join(format_figures(output.manifest["figures"]))
    assert output.page is None or isinstance(output.page, str)
    for name in ("training.json", "step-1/data"):
        attempt = Path(store.path(*REF, ATTEMPT)).resolve()
        path = output.path(name)
        assert attempt in path.resolve().parents, f"{path} leaves the attempt"
    output.json("training.json")
    output.directory("step-1")


@cache
def _preset(name: str) -> Any:
    return yaml.safe_load(PipelineConfig.preset_path(name).read_text(encoding="utf-8"))


@cache
def _adapter() -> TypeAdapter[PipelineConfig]:
    return TypeAdapter(PipelineConfig)


@cache
def _parser() -> Any:
    return build_parser()


_TAGS = [
    *("!!python/object/apply:os.getcwd []", "!!python/name:os.system ''", "&a [*a]", "*nothing", "!!binary x", "? [a]"),
    *("2026-01-01", "0x10", "1_000", "1e3", "~", "=", "!!set {a}", "<<: 5", "{class_path: os.system}", "- -"),
]


def _yaml(choices: Choices) -> str:
    content = mutate(_preset(choices.pick(["demo", "stories-fast", "owt"])), choices)
    text = yaml.safe_dump(content) if choices.below(2) else json.dumps(content)
    text = text.replace(f'"{DEEP}"', "[" * 400 + "]" * 400)
    if choices.below(4) == 3:
        i = choices.below(len(text) + 1)
        text = text[:i] + choices.pick(_TAGS) + text[i:]
    data = text.encode("utf-8", "surrogatepass")
    return (mutate_bytes(data, choices) if choices.below(4) == 3 else data).decode("utf-8", "replace")


def config(choices: Choices, folder: Path) -> None:
    """Validate the parameters of a deployment as Prefect does."""
    try:
        content = yaml.safe_load(_yaml(choices))
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # Prefect gets JSON, not YAML
        raise UserError(str(error)) from None
    try:
        _adapter().validate_python(
            content if choices.below(8) else complete(content, PipelineConfig.load_preset("demo"))
        )
    except ValidationError as error:
        raise UserError(str(error)) from None


def preset(choices: Choices, folder: Path) -> None:
    """Parse a YAML file of options for the command line."""
    path = folder / "mine.yaml"
    path.write_bytes(_yaml(choices).encode("utf-8", "replace"))
    options = _parser().instantiate(parse(_parser(), ["run", "--config", str(path)]))["run"]
    PipelineConfig(**{name: options[name] for name in PipelineConfig.__dataclass_fields__})


COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "One <|endoftext|>", "max_tokens": 2, "temperature": 0.5}
COMPLETION |= {"top_p": 0.9, "stop": ["a"], "stream": True, "echo": True, "logprobs": 2, "n": 2, "seed": 1, "top_k": 3}
COMPLETION |= {"best_of": 2, "suffix": "", "logit_bias": {"5": 3.5, "97": -100}, "frequency_penalty": 0.5}
COMPLETION |= {"min_tokens": 1, "stop_token_ids": [97, 256]}
CHAT: dict[str, Any] = {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
CHAT |= {"max_tokens": 2, "stream_options": {"include_usage": True}, "stream": True, "min_p": 0.1, "n": 1}
CHAT |= {"logprobs": True, "top_logprobs": 2, "presence_penalty": -1.5, "logit_bias": {"0": 1}, "tools": []}
CHAT |= {"min_tokens": 1, "stop_token_ids": [97]}
INFILL = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
KEY = b"correct-horse"


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _app(has_chat_template: bool) -> Any:
    plain = bytes_tokenizer(["<|endoftext|>"])
    tokenizer = add_chat_tokens(bytes_tokenizer(["<|endoftext|>", *INFILL])) if has_chat_template else plain
    return build_app(make_model(tokenizer.size, 32).eval(), tokenizer, "tiny", 4, 4, prefix_cache_bytes=1 << 16)


@cache
def _app_with_key() -> Any:
    model, tokenizer = make_model(256, 32).eval(), bytes_tokenizer()
    return build_app(model, tokenizer, "tiny", 4, 4, api_key=KEY.decode(), max_requests_per_client=1)


async def _send_request(
    app: Any, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """Return the status and the body of the response, without a network."""
    messages: asyncio.Queue[Message] = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
    response: list[Message] = []

    async def send(message: Message) -> None:
        response.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app(
        {**scope, "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": ""}, messages.get, send
    )
    return response[0]["status"], b"".join(message.get("body", b"") for message in response)


def send(app: Any, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of its response."""
    return _loop().run_until_complete(_send_request(app, path, body, headers))


def request(choices: Choices, folder: Path) -> None:
    """Send a request body. The response must be a result or an error message."""
    path, valid_body = choices.pick([("completions", COMPLETION), ("chat/completions", CHAT)])
    if path == "completions" and choices.below(4) == 3:
        valid_body = {**valid_body, "suffix": "b<|fim_middle|>", "echo": False}
    if choices.below(4) == 3:
        valid_body = {**valid_body, "prompt": choices.pick([[1, 2], [[1], [2]], ["a", "b"], [256], "é" * 20, ""])}
    body = json_bytes(mutate(valid_body, choices), choices)
    app = _app(has_chat_template=choices.below(2) == 1)
    status, response = send(app, f"/v1/{path}", body)
    assert status in (200, 400, 404, 413, 429), (status, response)
    if response.startswith(b"data: "):
        assert response.endswith(b"data: [DONE]\n\n") and b"server_error" not in response, response
        for event in response.split(b"\n\n")[:-2]:
            json.loads(event.removeprefix(b"data: "), parse_constant=refuse_constant)
    else:
        assert ("error" in json.loads(response, parse_constant=refuse_constant)) == (status != 200)


EMBEDDINGS: dict[str, Any] = {"model": "tiny", "input": ["a", "é<|endoftext|>"], "encoding_format": "base64"}
EMBEDDINGS |= {"user": "u", "truncate_prompt_tokens": None}


def embeddings(choices: Choices, folder: Path) -> None:
    """Send a request for embeddings. The response must have one for each text, or an error message."""
    given = choices.pick([["a", "é<|endoftext|>"], "b" * 32, [97, 256], [[97], [98, 99]], [""], []])
    encoding_format = choices.pick(["base64", "float", None])
    body = json_bytes(mutate({**EMBEDDINGS, "input": given, "encoding_format": encoding_format}, choices), choices)
    status, response = _loop().run_until_complete(_send_request(_app(False), "/v1/embeddings", body))
    assert status in (200, 400, 404, 413, 429), (status, response)
    content = json.loads(response, parse_constant=refuse_constant)
    assert ("error" in content) == (status != 200), response
    assert status != 200 or [row["index"] for row in content["data"]] == [*range(len(content["data"]))], response


_SCHEMA: dict[str, Any] = {"type": "object", "additionalProperties": False, "required": ["a", "b"]}
_SCHEMA["properties"] = {
    "a": {"type": "string", "maxLength": 3, "pattern": "^[a-z]+$"},
    "b": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/n"}, {"enum": [None, True]}]}, "maxItems": 2},
}
_SCHEMA["$defs"] = {"n": {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 2}}
_CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True}}},
    {"guided_json": _SCHEMA},
    {"structured_outputs": {"json": _SCHEMA}},
    {"guided_regex": r"(?:ab+|[c-f]{2,3}\d?)*|\p{Lu}$"},
    {"structured_outputs": {"choice": ["yes", "no", "é"]}},
    {"guided_grammar": 'root ::= "a" root | [0-9]+ ("b" | "c")?'},
    {"guided_grammar": 'start: "a" start | /[0-9]+/ B?\nB: "b" | "c"\n%ignore " "\n'},
    {"guided_grammar": 'start: %json {"type": "integer"} | rest[max_tokens=3]\nrest: /.*/'},
]


def structured_output(choices: Choices, folder: Path) -> None:
    """Send a request for an answer of some form. The answer has it, or the request is refused."""
    request = {"prompt": "a", "max_tokens": 12, "temperature": 1, "seed": 1, **choices.pick(_CONSTRAINTS)}
    request = mutate(request, choices, 1 + choices.below(3))
    body = json_bytes(request, choices)
    status, response = send(_app(False), "/v1/completions", body)
    assert status in (200, 400, 404, 413, 429), (status, response)
    if response.startswith(b"data: "):
        return
    content = json.loads(response)
    assert status == 200 or len(content["error"]["message"]) < 600, response
    with suppress(ValueError):
        if status == 200 and json.loads(body).get("guided_json") and content["choices"][0]["finish_reason"] == "stop":
            assert _is_json(content["choices"][0]["text"]), response


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def refuse_constant(name: str) -> None:
    """Raise AssertionError for NaN and the like in JSON."""
    raise AssertionError(f"{name} is not JSON")


def authorization(choices: Choices, folder: Path) -> None:
    """Send a request with hostile headers. Only the key opens the server."""
    value = b"Bearer " + KEY
    mutated = [mutate_bytes(value, choices) if choices.below(4) else value for _ in range(1 + choices.below(2))]
    name = choices.pick([b"authorization", b"authorization", b"x-authorization", b""])
    headers = [(name, value) for value in mutated]
    body = json.dumps({"prompt": "a", "max_tokens": 0}).encode()
    status, response = send(_app_with_key(), "/v1/completions", body, headers)
    scheme, _, key = mutated[0].partition(b" ")
    is_open = name == b"authorization" and len(mutated) == 1 and scheme.lower() == b"bearer" and key.strip() == KEY
    assert status == (200 if is_open else 401), (status, headers)
    assert KEY not in response
