"""Dialogs: how they become a prompt, and the loop in the terminal."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flows import chat
from lm import dialog
from lm.completion import complete, prompt_ids
from lm.dialog import Message
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tests.generating import make_model

TOKENIZER = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], ["<|endoftext|>"])
CONTEXT = 96
CONFIG = SampleConfig(temperature=0, max_new_tokens=6, stop=[dialog.STOP])


def test_a_dialog_as_text() -> None:
    said = [Message("system", "Be kind."), Message("user", " Hi!\n"), Message("assistant", "Ho."), Message("user", "?")]
    assert dialog.render(said) == "System: Be kind.\nUser: Hi!\nAssistant: Ho.\nUser: ?\nAssistant:"


def test_an_answer_begins_with_a_word() -> None:
    answer = dialog.Answer()
    assert [answer.add(piece) for piece in (" ", "\n", " a", " b ", "c")] == ["", "", "a", " b ", "c"]
    assert answer.text == "a b c"


Typed = Callable[..., list[str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Chats with a small model, typing lines or causing what the keys cause; gives the prompts it was asked with."""
    model = make_model(257, CONTEXT).eval()
    monkeypatch.setattr(chat, "latest_model", lambda root: (root, None))
    monkeypatch.setattr(chat, "load", lambda *arguments: (model, TOKENIZER))

    def run(*lines: str | type[BaseException], config: SampleConfig = CONFIG) -> list[str]:
        left, prompts = iter(lines), list[str]()

        def read(question: str) -> str:
            line = next(left)
            if isinstance(line, str):
                return line
            raise line

        def spy(given: Any, tokenizer: Tokenizer, prompt: str, wanted: SampleConfig) -> Iterator[str]:
            prompts.append(prompt)
            return original(given, tokenizer, prompt, wanted)

        original = chat.stream_text
        with monkeypatch.context() as patch:
            patch.setattr("builtins.input", read)
            patch.setattr(chat, "stream_text", spy)
            chat.chat_command("root", config, "cpu")
        assert next(left, None) is None
        return prompts

    return run


def test_answers_are_streamed_and_remembered(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = typed("Hi", "Go on", "/quit")
    expected = SampleConfig(**{**vars(CONFIG), "prompts": [first]})
    text = complete(make_model(257, CONTEXT).eval(), TOKENIZER, expected)[0].text.lstrip()
    assert f"Assistant: {text}\n" in capsys.readouterr().out
    assert second == f"{first} {text.strip()}\nUser: Go on\nAssistant:"


def test_what_is_long_ago_is_forgotten(typed: Typed) -> None:
    prompts = typed(*["Hello there"] * 5, EOFError)
    assert all(len(prompt_ids(TOKENIZER, prompt)) + CONFIG.max_new_tokens <= CONTEXT for prompt in prompts)
    assert all(prompt.endswith("User: Hello there\nAssistant:") for prompt in prompts)
    one = len(prompt_ids(TOKENIZER, "User: Hello there\nAssistant:"))
    assert all(len(prompt) + one + 3 * CONFIG.max_new_tokens > CONTEXT for prompt in prompts[1:]), (
        "one more had found room"
    )


def test_an_answer_that_may_be_long_leaves_room_for_what_was_said(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "stream_text", lambda *arguments: iter([" Well"]))
    prompts = typed("Hi", "Hm", EOFError, config=SampleConfig(max_new_tokens=10 * CONTEXT))
    assert prompts[1] == "User: Hi\nAssistant: Well\nUser: Hm\nAssistant:"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> Iterator[str]:
        yield " Well"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "stream_text", interrupted)
    prompts = typed("Hi", KeyboardInterrupt, "And?", EOFError)
    assert prompts[1] == "User: Hi\nAssistant: Well\nUser: And?\nAssistant:"
    assert "Assistant: Well\n" in capsys.readouterr().out

    def early(*arguments: Any) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "prompt_ids", early)
    assert typed("Hi", "Ho", EOFError) == ["User: Hi\nAssistant:"]
