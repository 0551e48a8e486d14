"""The name of the served model for clients, and what the server tells about the model."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from lm.data.chat_template import add_chat_tokens
from lm.model.transformer import TransformerLM
from tests.helpers.generating import LoadedModel, make_model
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli import tools
from textmill.cli.main import main
from textmill.server.app import build_app

PLAIN = bytes_tokenizer(["<|endoftext|>"])
RUN = "20260102-031500-full-story"


def open_client(name: str, **options: Any) -> TestClient:
    return TestClient(build_app(make_model(257, 64).eval(), PLAIN, name, 2, **options))


@pytest.mark.parametrize("name", [RUN, "org/my model ä", "textmill"])
def test_the_model_answers_to_its_name_and_to_textmill(name: str) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    messages = [{"role": "user", "content": "a"}]
    with open_client(name) as client:
        [listed] = client.get("/v1/models").json()["data"]
        assert (listed["id"], listed["aliases"]) == (name, ["textmill"] if name != "textmill" else [])
        for model in (name, "textmill", None):
            assert client.post("/v1/completions", json=body | {"model": model}).json()["model"] == name
            chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "model": model})
            assert chat.json()["model"] == name
        for model in (name, "textmill"):
            assert client.get(f"/v1/models/{model}").json() == listed
        for response in (client.post("/v1/completions", json=body | {"model": "gpt"}), client.get("/v1/models/gpt")):
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert error["message"] == f"There is no model 'gpt'; this is {name!r}."


def test_the_model_is_described() -> None:
    with open_client(RUN) as client:
        [listed] = client.get("/v1/models").json()["data"]
    model = make_model(257, 64)
    assert listed["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert listed["max_model_len"] == 64


@pytest.mark.parametrize(
    ("tokenizer", "is_post_trained", "tab"),
    [(PLAIN, False, "completion"), (PLAIN, True, "chat"), (add_chat_tokens(PLAIN), False, "chat")],
    ids=["base", "post-trained", "template"],
)
def test_the_page_opens_on_the_tab_of_the_model(tokenizer: Any, is_post_trained: bool, tab: str) -> None:
    model = make_model(tokenizer.size, 64).eval()
    with TestClient(build_app(model, tokenizer, RUN, 2, api_key="k", is_post_trained=is_post_trained)) as client:
        page = client.get("/").text
    assert f'data-first-tab="{tab}"' in page
    assert RUN not in page, "who has no key learns no name"


class _Model(LoadedModel):
    def __init__(self, model: TransformerLM, public_name: str) -> None:
        super().__init__(model, PLAIN)
        self.public_name = public_name


@pytest.mark.parametrize(
    ("public_name", "options", "name"),
    [
        (RUN, [], RUN),
        (RUN, ["--served-model-name", "my-llama"], "my-llama"),
        (RUN, ["--served_model_name", "textmill"], "textmill"),
        ("bad\udcff", [], "textmill"),
        ("a\nb", [], "textmill"),
        ("", [], "textmill"),
    ],
)
def test_the_command_names_the_model(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    public_name: str,
    options: list[str],
    name: str,
) -> None:
    """A file system allows names of directories that JSON or a terminal does not."""
    monkeypatch.setattr(tools, "resolve_model", lambda *_: _Model(make_model(257, 8).eval(), public_name))
    apps: list[Any] = []

    def run(server: Any, sockets: Any) -> None:
        apps.append(server.config.app)
        raise KeyboardInterrupt

    monkeypatch.setattr("uvicorn.Server.run", run)
    assert main(["serve", "--port", "0", *options]) == 0
    assert f"Model name for clients: {name}\n" in capsys.readouterr().out
    with TestClient(apps[0], base_url="http://localhost") as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == name


@pytest.mark.parametrize("name", [" ", "a ", "a\nb", "\udcff"], ids=json.dumps)
def test_a_name_that_clients_cannot_send_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(tools, "resolve_model", lambda *_: LoadedModel(make_model(257, 8).eval(), PLAIN))
    assert main(["serve", "--port", "0", "--served_model_name", name]) == 2
    assert "--served_model_name must be printable text without spaces around it" in capsys.readouterr().err
