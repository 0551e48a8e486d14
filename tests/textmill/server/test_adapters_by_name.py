"""``textmill serve --adapters``: clients choose an adapter by the model name, and get what it gives alone."""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file

from lm.model.config import AdapterConfig
from tests.lm.checkpoint.test_peft import LLAMA, adapt, write_adapter, write_base
from textmill.cli.main import main

NAMES = ("first", "second")
TEXTS = ["a", "One day", "b" * 17]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two adapters, of other ranks and layers."""
    folder = tmp_path_factory.mktemp("models")
    base = write_base(folder / "base")
    configs = AdapterConfig(rank=2, alpha=32), AdapterConfig(rank=5, alpha=60, targets=["q_proj", "v_proj", "w2"])
    for seed, (name, config) in enumerate(zip(NAMES, configs, strict=True)):
        write_adapter(folder / name, adapt(base, config, seed), base)
    return folder


def serve(*options: str) -> tuple[int, list[Any]]:
    """Run ``textmill serve`` up to the moment when it listens; return its exit code and its application."""
    apps: list[Any] = []

    def run(server: Any, sockets: Any) -> None:
        apps.append(server.config.app)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.Server.run", run)
        return main(["serve", "--port", "0", "--device", "cpu", "--kv_memory", "1MB", *options]), apps


def open_client(*options: str) -> TestClient:
    code, [app] = serve(*options)
    assert code == 0
    return TestClient(app, base_url="http://localhost")


@pytest.fixture(scope="module")
def client(files: Path) -> Iterator[TestClient]:
    pairs = [f"{name}={files / name}" for name in NAMES]
    with open_client("--model", str(files / "base"), "--adapters", *pairs) as client:
        yield client


def ask(client: TestClient, model: str | None, text: str) -> dict[str, Any]:
    body = {"model": model, "prompt": text, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_answers_at_once_equal_those_of_each_alone(files: Path, client: TestClient) -> None:
    requests = [(model, text) for text in TEXTS for model in ("base", *NAMES, "textmill", None)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = dict(zip(requests, pool.map(lambda request: ask(client, *request), requests), strict=True))
    for name in ("base", *NAMES):
        with open_client("--model", str(files / name)) as alone:
            for text in TEXTS:
                [expected], [actual] = ask(alone, None, text)["choices"], answers[name, text]["choices"]
                assert answers[name, text]["model"] == name
                assert actual["text"] == expected["text"]
                theirs = expected["logprobs"]["token_logprobs"]
                assert actual["logprobs"]["token_logprobs"] == pytest.approx(theirs, abs=1e-3)
                vector = alone.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"]
                embedded = client.post("/v1/embeddings", json={"model": name, "input": text}).json()
                assert embedded["model"] == name
                assert embedded["data"][0]["embedding"] == pytest.approx(vector, abs=1e-4)
    for text in TEXTS:
        texts = {model: answers[model, text]["choices"][0]["text"] for model in ("base", *NAMES, "textmill", None)}
        assert texts["textmill"] == texts[None] == texts["base"]
        assert answers["textmill", text]["model"] == "base"
        assert len(set(texts.values())) == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("responses", {"input": "a", "max_output_tokens": 3}),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_each_form_of_request_chooses(client: TestClient, path: str, body: dict[str, Any]) -> None:
    answers = {}
    for model in ("base", *NAMES):
        response = client.post(f"/v1/{path}", json={**body, "model": model, "temperature": 0}).json()
        assert response["model"] == model
        answers[model] = json.dumps([response.get(key) for key in ("choices", "content")]) + _output_text(response)
    assert len(set(answers.values())) == 3
    assert client.post(f"/v1/{path}", json={**body, "model": "third"}).status_code == 404


def _output_text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response.get("output", []) for part in item["content"])


def test_models_are_listed(client: TestClient) -> None:
    base, *adapters = client.get("/v1/models").json()["data"]
    assert (base["id"], base["aliases"]) == ("base", ["textmill"])
    assert [(model["id"], model["aliases"], model["parent"]) for model in adapters] == [(n, [], "base") for n in NAMES]
    assert len({model["identity"] for model in (base, *adapters)}) == 3
    assert client.get("/v1/models/second").json() == adapters[1]
    for response in (client.get("/v1/models/third"), client.post("/v1/embeddings", json={"input": "a", "model": "x"})):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "this is 'base' with the adapters first, second" in error["message"]


@pytest.mark.slow
def test_an_int8_base(files: Path) -> None:
    options = ["--model", str(files / "base"), "--quantize", "int8"]
    with open_client(*options, "--adapters", f"first={files / 'first'}") as client:
        assert ask(client, "first", "One day")["choices"] != ask(client, "base", "One day")["choices"]


def _no_longer_fitting(files: Path, folder: Path) -> list[str]:
    """An adapter of a wider model, whose base is not stated."""
    wide = write_base(folder / "wide", replace(LLAMA, d_model=40))
    adapter = write_adapter(folder / "adapter", adapt(wide), wide)
    save_file(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.safetensors")
    return [f"other={adapter}"]


def _of_another_base(files: Path, folder: Path) -> list[str]:
    shutil.copytree(files / "base", folder / "base")
    tensors = load_file(folder / "base" / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "base" / "model.safetensors")
    return [f"other={write_adapter(folder / 'adapter', adapt(folder / 'base'), folder / 'base')}"]


def _for_the_head(files: Path, folder: Path) -> list[str]:
    shutil.copytree(files / "first", folder / "first")
    path = folder / "first" / "adapter_model.safetensors"
    head = {f"base_model.model.lm_head.lora_{n}.weight": torch.ones(s) for n, s in (("A", (2, 32)), ("B", (257, 2)))}
    save_file(load_file(path) | head, path)
    return [f"other={folder / 'first'}"]


def _empty(files: Path, folder: Path) -> list[str]:
    shutil.copytree(files / "first", folder / "first")
    save_file({}, folder / "first" / "adapter_model.safetensors")
    return [f"other={folder / 'first'}"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _no_longer_fitting,
            r"The adapter other: .*/adapter: the matrices of .*down_proj are A \(3, 48\) and B \(40, 3\)",
        ),
        (_of_another_base, "The adapter other: .*/adapter holds an adapter of another model than .*base: the digest"),
        (_for_the_head, "/first has matrices for lm_head; beside others"),
        (_empty, "/first holds no matrices of an adapter"),
        (lambda files, _: ["first"], "'first' is no such pair"),
        (lambda files, _: [f"={files}"], "is no such pair"),
        (lambda files, _: ["a=x", "a=x"], "There is no model 'x'"),
        (lambda files, _: [f"a={files / 'first'}", f"a={files / 'second'}"], "has the name 'a' twice"),
        (lambda files, _: [f"base={files / 'first'}"], "base is the name of the base"),
        (lambda files, _: [f"textmill={files / 'first'}"], "textmill is the name of the base"),
        (lambda files, _: [f" a={files / 'first'}"], "--adapters must be printable text without spaces around it"),
        (lambda files, _: [f"a={files / 'base'}"], "base holds no adapter"),
    ],
)
def test_a_bad_adapter_ends_the_command(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    code, apps = serve("--model", str(files / "base"), "--adapters", *make(files, tmp_path))
    assert (code, apps) == (2, [])
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize("stored", ["", "adapter.safetensors", "adapter-1-of-2.safetensors"])
def test_adapters_of_an_adapter_are_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: str
) -> None:
    """Of peft, or of a training, whose processes may have stored a part each."""
    model = files / "first"
    if stored:
        model = shutil.copytree(files / "base", tmp_path / "first")
        (model / stored).touch()
    code, _ = serve("--model", str(model), "--adapters", f"second={files / 'second'}")
    assert code == 2
    assert "first is an adapter itself; for several adapters, --model must be their base" in capsys.readouterr().err
