"""Special tokens that a user types are plain text, whichever way the words come in."""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from flows import chat, console
from flows.cli import main
from flows.wanted import Chat, Completion, encoded, parse
from lm.completion import complete, prompt_ids, stream_text
from lm.generate import Generation
from lm.llama import Llama
from lm.llama_tokenizer import LlamaTokenizer
from lm.sampling import SampleConfig
from tests.generating import make_model
from tests.tokenizers_made import bytes_tokenizer
from tests.training import make

SPECIALS = ["<|endoftext|>", "<s>", "</s>"]
TYPED = "a<|endoftext|>b</s><s>"
TOKENIZER = bytes_tokenizer(SPECIALS)
MODEL = make_model(259, 256).eval()
BRIEF = SampleConfig(prompts=[TYPED], max_new_tokens=1, temperature=0, stop=["</s>"])


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that the model is asked to go on with."""
    found: list[list[int]] = []
    original = Generation.__post_init__

    def spy(self: Generation) -> None:
        found.append(list(self.prompt))
        original(self)

    monkeypatch.setattr(Generation, "__post_init__", spy)
    monkeypatch.setattr(chat, "latest_model", lambda root: (root, None))
    monkeypatch.setattr(console, "latest_model", lambda root: (root, None))
    monkeypatch.setattr(chat, "load", lambda *arguments: (MODEL, TOKENIZER))
    monkeypatch.setattr(console, "load", lambda *arguments: (MODEL, TOKENIZER))
    return found


def typed_in_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Iterator[str] = chain([TYPED], ["/quit"])
    monkeypatch.setattr("builtins.input", lambda question: next(lines))
    assert main(["chat", "--max_new_tokens", "1", "--device", "cpu"]) == 0


WAYS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "complete": lambda patch: complete(MODEL, TOKENIZER, BRIEF),
    "stream": lambda patch: list(stream_text(MODEL, TOKENIZER, TYPED, BRIEF)),
    "textmill sample": lambda patch: main(["sample", "--prompt", TYPED, "--max_new_tokens", "1", "--device", "cpu"]),
    "textmill chat": typed_in_chat,
}


@pytest.mark.parametrize("way", WAYS)
def test_typed_special_tokens_are_plain_text(
    way: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    [ids] = prompts
    assert bytes(ids).decode().count(TYPED) == 1, "single bytes, none of them a special token's id"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (Completion, {"prompt": TYPED, "stop": SPECIALS}),
        (Completion, {"prompt": [TYPED, TYPED]}),
        (Chat, {"messages": [{"role": "user", "content": TYPED}]}),
        (Chat, {"messages": [{"role": "system", "content": TYPED}, {"role": "assistant", "content": TYPED}]}),
        (Chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": TYPED}]}]}),
    ],
)
def test_special_tokens_in_a_request_are_plain_text(kind: Any, body: dict[str, Any]) -> None:
    for ids in encoded(parse(kind, json.dumps(body).encode()).prompts(), TOKENIZER):
        assert TYPED in bytes(ids).decode()


def test_ids_in_a_request_are_what_they_are() -> None:
    """A client that gives numbers means them."""
    assert encoded(parse(Completion, b'{"prompt": [97, 256]}').prompts(), TOKENIZER) == [[97, 256]]


@pytest.mark.parametrize("way", ["text", "chat", "stream", "system"])
def test_typed_special_tokens_are_plain_text_for_llama(way: str, prompts: list[list[int]], tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path)
    llama = Llama(MODEL, LlamaTokenizer.load(tmp_path), 256, 4)
    said: Any = [{"role": "user", "content": TYPED}]
    match way:
        case "text":
            llama.text_completion([TYPED], 0, max_gen_len=1)
        case "chat":
            llama.chat_completion([said], 0, max_gen_len=1)
        case "system":
            llama.chat_completion([[{"role": "system", "content": TYPED}, *said]], 0, max_gen_len=1)
        case _:
            list(llama.chat_stream(said, 0, max_gen_len=1))
    [[first, *ids]] = prompts
    assert first == 256, "the one that the program puts there"
    assert TYPED in bytes(ids).decode()


def test_the_prompts_of_a_training_are_plain_text(prompts: list[list[int]], tmp_path: Path) -> None:
    make(tmp_path, steps=1, sample_prompts=[TYPED], sample_tokens=1).run()
    assert prompts and all(bytes(ids).decode() == TYPED for ids in prompts)


def test_only_no_words_begin_with_a_special_token() -> None:
    assert prompt_ids(TOKENIZER, "") == [256]
    assert prompt_ids(TOKENIZER, SPECIALS[0]) == list(SPECIALS[0].encode())
