"""The chat in the terminal."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flows.cli import chat
from lm.inference import chat_template
from lm.inference.completion import complete, encode_prompt
from lm.inference.config import SampleConfig
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import make_model

TOKENIZER = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], ["<|endoftext|>"])
CONTEXT = 96
CONFIG = SampleConfig(temperature=0, max_new_tokens=6, stop=[chat_template.PLAIN_STOP])

RunChat = Callable[..., list[str]]


@pytest.fixture
def run_chat(monkeypatch: pytest.MonkeyPatch) -> RunChat:
    """A function that chats with a small model and returns the model's prompts.

    Its arguments are the user's lines, or the exceptions that keys such as Ctrl-C raise.
    """
    model = make_model(257, CONTEXT).eval()
    monkeypatch.setattr(chat, "latest_model", lambda root: (root, None))
    monkeypatch.setattr(chat, "load_for_inference", lambda *arguments: (model, TOKENIZER))

    def run(*lines: str | type[BaseException], config: SampleConfig = CONFIG) -> list[str]:
        remaining_lines, prompts = iter(lines), list[str]()

        def read_line(question: str) -> str:
            line = next(remaining_lines)
            if isinstance(line, str):
                return line
            raise line

        def record_prompt(model: Any, tokenizer: Tokenizer, prompt: str, config: SampleConfig) -> Iterator[str]:
            prompts.append(prompt)
            return original(model, tokenizer, prompt, config)

        original = chat.stream_text
        with monkeypatch.context() as patch:
            patch.setattr("builtins.input", read_line)
            patch.setattr(chat, "stream_text", record_prompt)
            chat.chat("root", config, "cpu")
        assert next(remaining_lines, None) is None
        return prompts

    return run


def test_answers_are_streamed_and_remembered(run_chat: RunChat, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_chat("Hi", "Go on", "/quit")
    expected = SampleConfig(**{**vars(CONFIG), "prompts": [first]})
    text = complete(make_model(257, CONTEXT).eval(), TOKENIZER, expected)[0].text.lstrip()
    assert f"Assistant: {text}\n" in capsys.readouterr().out
    assert second == f"{first} {text.strip()}\nUser: Go on\nAssistant:"


def test_the_oldest_messages_are_deleted_if_the_context_is_full(run_chat: RunChat) -> None:
    prompts = run_chat(*["Hello there"] * 5, EOFError)
    assert all(len(encode_prompt(TOKENIZER, prompt)) + CONFIG.max_new_tokens <= CONTEXT for prompt in prompts)
    assert all(prompt.endswith("User: Hello there\nAssistant:") for prompt in prompts)
    turn = len(encode_prompt(TOKENIZER, "User: Hello there\nAssistant:"))
    assert all(len(prompt) + turn + 3 * CONFIG.max_new_tokens > CONTEXT for prompt in prompts[1:]), (
        "no more messages are deleted than necessary"
    )


def test_a_large_max_new_tokens_leaves_room_for_earlier_messages(
    run_chat: RunChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "stream_text", lambda *arguments: iter([" Well"]))
    prompts = run_chat("Hi", "Hm", EOFError, config=SampleConfig(max_new_tokens=10 * CONTEXT))
    assert prompts[1] == "User: Hi\nAssistant: Well\nUser: Hm\nAssistant:"


def test_ctrl_c_stops_only_the_answer(
    run_chat: RunChat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt_after_a_word(*arguments: Any) -> Iterator[str]:
        yield " Well"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "stream_text", interrupt_after_a_word)
    prompts = run_chat("Hi", KeyboardInterrupt, "And?", EOFError)
    assert prompts[1] == "User: Hi\nAssistant: Well\nUser: And?\nAssistant:"
    assert "Assistant: Well\n" in capsys.readouterr().out

    def interrupt_at_once(*arguments: Any) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "encode_prompt", interrupt_at_once)
    assert run_chat("Hi", "Ho", EOFError) == ["User: Hi\nAssistant:"]
