"""The chat format of Llama 2: dialogs with the tags of its chat models. Source: Meta's inference code."""

from collections.abc import Sequence

from lm.common.errors import UserError
from lm.data.dialogs import Message, find_role_problem
from lm.inference.llama_tokenizer import LlamaTokenizer

LLAMA_TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")


def encode_llama_dialog(
    tokenizer: LlamaTokenizer, dialog: Sequence[Message], default_system: str | None = None, name: str = "The dialog"
) -> list[int] | None:
    """Return the prompt's ids for the answer to ``dialog`` in the format of Llama 2's chat models.

    The system message, or else ``default_system``, becomes a part of the first user message. Returns None if a message
    holds one of ``LLAMA_TAGS``, which could imitate the format. Raises UserError unless each message has a content and
    the roles are system (optional), user, assistant, user, …, user; the error calls the dialog ``name``.
    """
    if problem := find_role_problem(dialog, "user"):
        raise UserError(f"{name}: {problem}.")
    turns, system = list(dialog), default_system
    if turns[0]["role"] == "system":
        system = turns.pop(0)["content"]
    contents = [message["content"] for message in turns]
    if any(tag in content for tag in LLAMA_TAGS for content in (*contents, system or "")):
        return None
    if system is not None:
        contents[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}"
    contents = [content.strip() for content in contents]
    ids = []
    for question, answer in zip(contents[::2], contents[1::2], strict=False):
        ids += tokenizer.encode(f"[INST] {question} [/INST] {answer} ", bos=True, eos=True)
    return ids + tokenizer.encode(f"[INST] {contents[-1]} [/INST]", bos=True, eos=False)
