"""Special tokens typed by a user are encoded as plain text by every interface."""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lm.inference.chat_format import ChatFormat
from lm.inference.completion import complete, encode_prompt, stream_text
from lm.inference.config import SampleConfig
from lm.inference.generation_request import Generation
from lm.inference.llama import Llama, LlamaTokenizer
from tests.helpers.generating import LoadedModel, make_model
from tests.helpers.tokenizers import bytes_tokenizer
from tests.helpers.training import small_trainer
from textmill.cli import tools
from textmill.cli.main import main
from textmill.server.requests import ChatRequest, CompletionRequest, parse_request

SPECIALS = ["<|endoftext|>", "<s>", "</s>"]
TYPED = "a<|endoftext|>b</s><s>"
TOKENIZER = bytes_tokenizer(SPECIALS)
MODEL = make_model(259, 256).eval()
SHORT_CONFIG = SampleConfig(prompts=[TYPED], max_new_tokens=1, temperature=0, stop=["</s>"])


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the prompt ids of each generation. The commands load a small model."""
    recorded: list[list[int]] = []
    original = Generation.__post_init__

    def spy(self: Generation) -> None:
        recorded.append(list(self.prompt))
        original(self)

    monkeypatch.setattr(Generation, "__post_init__", spy)
    monkeypatch.setattr(tools, "resolve_model", lambda *arguments: LoadedModel(MODEL, TOKENIZER))
    return recorded


def type_in_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = chain([TYPED], ["/quit"])
    monkeypatch.setattr("builtins.input", lambda question: next(lines))
    assert main(["chat", "--max_new_tokens", "1", "--device", "cpu"]) == 0


INTERFACES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "complete": lambda patch: complete(MODEL, TOKENIZER, SHORT_CONFIG),
    "stream": lambda patch: list(stream_text(MODEL, TOKENIZER, TYPED, SHORT_CONFIG)),
    "textmill sample": lambda patch: main(["sample", "--prompt", TYPED, "--max_new_tokens", "1", "--device", "cpu"]),
    "textmill chat": type_in_chat,
}


@pytest.mark.parametrize("interface", INTERFACES)
def test_typed_special_tokens_are_plain_text(
    interface: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    INTERFACES[interface](monkeypatch)
    [ids] = prompts
    assert bytes(ids).decode().count(TYPED) == 1, "bytes only, no id of a special token"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": TYPED, "stop": SPECIALS}),
        (CompletionRequest, {"prompt": [TYPED, TYPED]}),
        (ChatRequest, {"messages": [{"role": "user", "content": TYPED}]}),
        (ChatRequest, {"messages": [{"role": "system", "content": TYPED}, {"role": "assistant", "content": TYPED}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": TYPED}]}]}),
    ],
)
def test_special_tokens_in_a_request_are_plain_text(kind: Any, body: dict[str, Any]) -> None:
    for ids in parse_request(kind, json.dumps(body).encode()).encode_prompts(ChatFormat(TOKENIZER)):
        assert TYPED in bytes(ids).decode()


def test_ids_in_a_request_are_used_unchanged() -> None:
    request = parse_request(CompletionRequest, b'{"prompt": [97, 256]}')
    assert request.encode_prompts(ChatFormat(TOKENIZER)) == [[97, 256]]


@pytest.mark.parametrize("interface", ["text", "chat", "stream", "system"])
def test_typed_special_tokens_are_plain_text_for_llama(
    interface: str, prompts: list[list[int]], tmp_path: Path
) -> None:
    TOKENIZER.save(tmp_path)
    llama = Llama(MODEL, LlamaTokenizer.load(tmp_path), 256, 4)
    dialog: Any = [{"role": "user", "content": TYPED}]
    match interface:
        case "text":
            llama.text_completion([TYPED], 0, max_gen_len=1)
        case "chat":
            llama.chat_completion([dialog], 0, max_gen_len=1)
        case "system":
            llama.chat_completion([[{"role": "system", "content": TYPED}, *dialog]], 0, max_gen_len=1)
        case _:
            list(llama.chat_stream(dialog, 0, max_gen_len=1))
    [[first, *ids]] = prompts
    assert first == 256, "the program adds the begin-of-text token"
    assert TYPED in bytes(ids).decode()


def test_sample_prompts_of_training_are_plain_text(prompts: list[list[int]], tmp_path: Path) -> None:
    small_trainer(tmp_path, steps=1, sample_prompts=[TYPED], sample_tokens=1).run()
    assert prompts and all(bytes(ids).decode() == TYPED for ids in prompts)


def test_only_an_empty_prompt_begins_with_a_special_token() -> None:
    assert encode_prompt(TOKENIZER, "") == [256]
    assert encode_prompt(TOKENIZER, SPECIALS[0]) == list(SPECIALS[0].encode())
