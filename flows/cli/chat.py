"""The chat in the terminal."""

from contextlib import suppress
from dataclasses import replace

from flows.run_record import latest_model
from lm.data.dialogs import Message
from lm.inference.chat_template import PLAIN_STOP, PlainAnswer, render_plain
from lm.inference.completion import encode_prompt, stream_text
from lm.inference.config import SampleConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from tasks.sample import load_for_inference


def chat(root: str, config: SampleConfig, device: str) -> None:
    """Answer the user's lines until Ctrl-D or ``/quit``. Ctrl-C stops an answer."""
    config = replace(config, stop=[*config.stop, PLAIN_STOP])
    model, tokenizer = load_for_inference(*latest_model(root), device)
    print("Ctrl-C stops an answer; Ctrl-D or /quit ends the chat.")
    messages: list[Message] = []
    while True:
        try:
            line = input("User: ")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line.strip() == "/quit":
            return
        messages.append(Message(role="user", content=line))
        messages.append(Message(role="assistant", content=_answer(model, tokenizer, messages, config)))


def _answer(model: TransformerLM, tokenizer: Tokenizer, messages: list[Message], config: SampleConfig) -> str:
    """Stream an answer to the terminal until Ctrl-C. Delete the oldest messages if the context is too short."""
    context_length = model.config.context_length
    max_prompt_tokens = context_length - min(config.max_new_tokens, context_length // 2)
    answer = PlainAnswer()
    print("Assistant: ", end="", flush=True)
    with suppress(KeyboardInterrupt):
        while len(messages) > 1 and len(encode_prompt(tokenizer, render_plain(messages))) > max_prompt_tokens:
            del messages[:2]  # a question and its answer
        for piece in stream_text(model, tokenizer, render_plain(messages), config):
            print(answer.add(piece), end="", flush=True)
    print()
    return answer.text
