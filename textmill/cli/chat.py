"""The chat in the terminal."""

import io
import sys
from contextlib import suppress
from dataclasses import replace

from flows.prefect_support.signals import Terminated
from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.inference.chat_format import PLAIN_NOTICE, Answer, ChatFormat
from lm.inference.completion import check_vocabulary, stream_text
from lm.inference.config import SampleConfig
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer


def chat(model: TransformerLM, tokenizer: TextTokenizer, config: SampleConfig, system: str = "") -> None:
    """Answer the user's lines until Ctrl-D or ``/quit``. Ctrl-C stops an answer.

    ``system`` is the system message; if empty, there is none. Raise UserError if model and tokenizer do not match.
    """
    check_vocabulary(model, tokenizer.size)
    chat_format = ChatFormat(tokenizer)
    config = replace(config, stop=[*config.stop, *chat_format.stop])
    if not chat_format.has_template:
        print(PLAIN_NOTICE)
    print("Ctrl-C stops an answer; Ctrl-D or /quit ends the chat.")
    messages = [Message(role="system", content=system)] if system else []
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then has arrow keys and a history
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 must not end the dialog
    while True:
        try:
            line = input("User: ")
        except Terminated:
            raise
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line.strip() == "/quit":
            return
        messages.append(Message(role="user", content=line))
        try:
            answer = _answer(model, chat_format, messages, config)
        except UserError as error:
            print(error)
            messages.pop()
        else:
            messages.append(Message(role="assistant", content=answer))


def _answer(model: TransformerLM, chat_format: ChatFormat, messages: list[Message], config: SampleConfig) -> str:
    """Stream an answer to the terminal until Ctrl-C. Raise UserError as :func:`_fit_into_context` does."""
    answer = Answer(chat_format)
    try:
        prompt = _fit_into_context(chat_format, messages, model.config.context_length, config.max_new_tokens)
        if chat_format.has_template:  # beyond the context, the model would no longer see where the dialog begins
            free_tokens = model.config.context_length - len(prompt)
            config = replace(config, max_new_tokens=min(config.max_new_tokens, free_tokens))
        print("Assistant: ", end="", flush=True)
        for piece in stream_text(model, chat_format.tokenizer, prompt, config):
            print(answer.add(piece), end="", flush=True)
    except Terminated:
        raise
    except KeyboardInterrupt:
        pass  # the answer ends here
    print()
    return answer.text


def _fit_into_context(
    chat_format: ChatFormat, messages: list[Message], context_length: int, max_new_tokens: int
) -> list[int]:
    """Return the prompt's ids. Delete the oldest messages, except a system message, if the context is too short.

    Raise UserError, and delete nothing, if it is too short even for the last message.
    """
    max_prompt_tokens = context_length - min(max_new_tokens, context_length // 2)
    oldest = int(messages[0]["role"] == "system")
    kept = [*messages]
    ids = chat_format.encode(kept)
    while len(kept) > oldest + 1 and len(ids) > max_prompt_tokens:
        del kept[oldest : oldest + 2]  # a question and its answer
        ids = chat_format.encode(kept)
    if len(ids) >= context_length:
        raise UserError(
            f"The message is too long: the prompt has {len(ids)} tokens, the model's context {context_length}. Shorten "
            "the message, or the system message."
        )
    messages[:] = kept
    return ids
