"""``textmill chat``: a dialog with the model of the latest run, in the terminal."""

from contextlib import suppress

from flows.console import latest_model
from lm import dialog
from lm.completion import prompt_ids, stream_text
from lm.model import TransformerLM
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer
from tasks.sample import load


def chat_command(root: str, config: SampleConfig, device: str) -> None:
    """Answer what is typed until Ctrl-D or ``/quit``; Ctrl-C stops an answer."""
    model, tokenizer = load(*latest_model(root), device)
    print("Ctrl-C stops an answer; Ctrl-D or /quit ends.")
    said: list[dialog.Message] = []
    while True:
        try:
            words = input("User: ")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if words.strip() == "/quit":
            return
        said.append(dialog.Message("user", words))
        said.append(dialog.Message("assistant", _answer(model, tokenizer, said, config)))


def _answer(model: TransformerLM, tokenizer: Tokenizer, said: list[dialog.Message], config: SampleConfig) -> str:
    """Print the answer as it comes, up to Ctrl-C; what was said longest ago is forgotten where the context is full."""
    context = model.config.context_length
    room = context - min(config.max_new_tokens, context // 2)  # a long answer may forget what it began with
    answer = dialog.Answer()
    print("Assistant: ", end="", flush=True)
    with suppress(KeyboardInterrupt):
        while len(said) > 1 and len(prompt_ids(tokenizer, dialog.render(said))) > room:
            del said[:2]  # a question with its answer
        for piece in stream_text(model, tokenizer, dialog.render(said), config):
            print(answer.add(piece), end="", flush=True)
    print()
    return answer.text
