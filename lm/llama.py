"""The interface of Meta's Llama 2 code: completions of prompts and of chats, from any checkpoint that we read.

Sources: Touvron et al. 2023 (Llama 2) and Meta's code of it (``llama/generation.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

import torch
from torch import nn

from lm.checkpoint import load_model
from lm.completion import check_vocabulary
from lm.convert import load_hugging_face, load_meta
from lm.errors import UserError
from lm.generate import Generation, generate, stream
from lm.inference import prepare
from lm.llama_tokenizer import LlamaTokenizer
from lm.model import TransformerLM
from lm.sampling import SampleConfig

TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
TAGS_ANSWER = "Error: special tags are not allowed in messages."


class Message(TypedDict):
    """What one side says in a dialog."""

    role: Literal["system", "user", "assistant"]
    content: str


class CompletionPrediction(TypedDict):
    """What a prompt goes on with; with log-probabilities, also its tokens one by one."""

    generation: str
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


class ChatPrediction(TypedDict):
    """The answer to a dialog; with log-probabilities, also its tokens one by one."""

    generation: Message
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


def encode_dialog(
    tokenizer: LlamaTokenizer, dialog: Sequence[Message], system: str | None = None, name: str = "The dialog"
) -> list[int] | None:
    """The ids that ask for an answer to ``dialog``, in the format of Llama 2's chat models; None where a message holds
    one of ``TAGS``, which could pass for the format's own.

    A system message, which may come first, becomes a part of the user's first; ``system`` stands for it where there is
    none. Raises UserError for a message without content, and where the others are not the user's and the assistant's
    by turns, from the user's to the user's.
    """
    for number, message in enumerate(dialog):
        if not (isinstance(message, Mapping) and isinstance(message.get("content"), str)):
            raise UserError(f"{name}: message {number} has no content; it must be an object with a role and a text.")
    turns = list(dialog)
    if turns and turns[0].get("role") == "system":
        system = turns.pop(0)["content"]
    start = len(dialog) - len(turns)
    for number, (message, role) in enumerate(zip(turns, cycle(("user", "assistant")), strict=False), start):
        if message.get("role") != role:
            raise UserError(
                f"{name}: message {number} has the role {message.get('role')!r}, not {role!r}; they are system (or "
                "none), user, assistant, user and so on."
            )
    if len(turns) % 2 == 0:
        raise UserError(f"{name} lacks message {len(dialog)}, the user's to be answered.")
    contents = [message["content"] for message in turns]
    if any(tag in content for tag in TAGS for content in (*contents, system or "")):
        return None
    if system is not None:
        contents[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}"
    contents = [content.strip() for content in contents]
    ids = []
    for question, answer in zip(contents[::2], contents[1::2], strict=False):
        ids += tokenizer.encode(f"[INST] {question} [/INST] {answer} ", bos=True, eos=True)
    return ids + tokenizer.encode(f"[INST] {contents[-1]} [/INST]", bos=True, eos=False)


def _cut_padding(model: TransformerLM, size: int) -> None:
    """Take away the rows of embedding and head from ``size`` on: those that make a vocabulary a round number."""
    if (model.config.vocab_size or 0) > size:
        model.config = replace(model.config, vocab_size=size)
        model.token_embeddings.weight = nn.Parameter(model.token_embeddings.weight[:size].detach())
        if model.lm_head is not None:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight[:size].detach())


class Llama:
    """A model and its tokenizer, for up to ``max_batch_size`` sequences of up to ``max_seq_len`` tokens at a time.

    Sequence number i of a call draws with the seed + i, so that the same call gives the same again, and whom a
    sequence is batched with changes nothing. With temperature 0 it is always the likeliest token. Not for
    several threads at once. Raises UserError where model and tokenizer do not belong together, and for sizes that the
    model does not have.
    """

    def __init__(self, model: TransformerLM, tokenizer: LlamaTokenizer, max_seq_len: int, max_batch_size: int) -> None:
        check_vocabulary(model, tokenizer.n_words)
        longest = model.config.context_length
        if not 1 <= max_seq_len <= longest:
            raise UserError(f"max_seq_len is {max_seq_len}; this model takes 1 to {longest} tokens.")
        if max_batch_size < 1:
            raise UserError(f"max_batch_size is {max_batch_size}; it must be at least 1.")
        self.model, self.tokenizer = model, tokenizer
        self.max_seq_len, self.max_batch_size = max_seq_len, max_batch_size

    @classmethod
    def build(
        cls,
        ckpt_dir: str | Path,
        tokenizer_path: str | Path,
        max_seq_len: int,
        max_batch_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "Llama":
        """Read a checkpoint of Meta (a directory with ``params.json``), Hugging Face (``config.json``) or a training
        of ours (``checkpoint.json``), and a tokenizer as :meth:`LlamaTokenizer.load` does.

        ``dtype`` is by default that of the files. Raises UserError where something is missing, damaged or unknown.
        """
        directory, tokenizer = Path(ckpt_dir), LlamaTokenizer.load(Path(tokenizer_path))
        if (directory / "params.json").exists():
            model = load_meta(directory, max_seq_len, device)
        elif (directory / "config.json").exists():
            model = load_hugging_face(directory, max_seq_len, device)
        elif (directory / "checkpoint.json").exists():
            model = load_model(directory, device)
        else:
            raise UserError(
                f"{directory} is no checkpoint: it has neither Meta's params.json, nor Hugging Face's config.json, nor "
                "checkpoint.json, which a training of ours writes."
            )
        _cut_padding(model, tokenizer.n_words)
        return cls(prepare(model, dtype), tokenizer, max_seq_len, max_batch_size)

    def generate(
        self,
        prompt_tokens: Sequence[Sequence[int]],
        max_gen_len: int | None = None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        seed: int = 0,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """New ids for each prompt, as many as ``max_gen_len`` and ``max_seq_len`` have room for, up to the first end
        of text, which is left out. With ``echo`` the prompt's own come first.

        The second are the log-probabilities of the same ids under the model, in nats; 0.0 for the first id of a prompt,
        which nothing comes before. Raises UserError for too many prompts, and for one that is empty, longer than
        ``max_seq_len`` or has ids outside the vocabulary.
        """
        self._check_batch(prompt_tokens)
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        generations = [
            self._generation(f"Prompt {number}", prompt, max_gen_len, sampling, logprobs, seed + number)
            for number, prompt in enumerate(prompt_tokens)
        ]
        generate(self.model, generations)
        ids = [[*(one.prompt if echo else ()), *one.ids] for one in generations]
        if not logprobs:
            return ids, None
        return ids, [[*([0.0, *one.prompt_logprobs] if echo else ()), *one.logprobs] for one in generations]

    def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        seed: int = 0,
    ) -> list[CompletionPrediction]:
        """What :meth:`generate` makes of texts, in which special tokens are plain text. Raises as it does."""
        prompt_tokens = [self.tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
        all_ids, all_logprobs = self.generate(prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo, seed)
        if all_logprobs is None:
            return [{"generation": self.tokenizer.decode(ids)} for ids in all_ids]
        return [
            {"generation": self.tokenizer.decode(ids), "tokens": self._tokens(ids), "logprobs": scores}
            for ids, scores in zip(all_ids, all_logprobs, strict=True)
        ]

    def chat_completion(
        self,
        dialogs: Sequence[Sequence[Message]],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        default_system: str | None = None,
        seed: int = 0,
    ) -> list[ChatPrediction]:
        """The assistant's next message in each dialog. ``default_system`` stands where a dialog has no system message.

        A dialog with one of ``TAGS`` in a message is not obeyed: its answer is ``TAGS_ANSWER``, of no tokens. Raises
        UserError as :meth:`generate` and :func:`encode_dialog` do.
        """
        self._check_batch(dialogs)
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        generations: list[Generation | None] = []
        for number, dialog in enumerate(dialogs):
            name = f"Dialog {number}"
            prompt = encode_dialog(self.tokenizer, dialog, default_system, name)
            if prompt is None:
                generations.append(None)
            else:
                generations.append(self._generation(name, prompt, max_gen_len, sampling, logprobs, seed + number))
        generate(self.model, [one for one in generations if one])
        answers: list[ChatPrediction] = []
        for one in generations:
            content = self.tokenizer.decode(one.ids) if one else TAGS_ANSWER
            answer: ChatPrediction = {"generation": {"role": "assistant", "content": content}}
            if logprobs:
                answer["tokens"], answer["logprobs"] = (self._tokens(one.ids), one.logprobs) if one else ([], [])
            answers.append(answer)
        return answers

    def chat_stream(
        self,
        dialog: Sequence[Message],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        default_system: str | None = None,
        seed: int = 0,
    ) -> Iterator[str]:
        """What :meth:`chat_completion` answers to one dialog, as it comes, in whole characters. Raises as it does, and
        at once."""
        prompt = encode_dialog(self.tokenizer, dialog, default_system)
        if prompt is None:
            return iter([TAGS_ANSWER])
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        generation = self._generation("The dialog", prompt, max_gen_len, sampling, False, seed)
        return filter(None, self.tokenizer.pieces(stream(self.model, generation)))

    def _tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token_id]) for token_id in ids]

    def _check_batch(self, batch: Sequence[object]) -> None:
        if len(batch) > self.max_batch_size:
            raise UserError(
                f"{len(batch)} are more than max_batch_size {self.max_batch_size}; give fewer at a time, or build with "
                "a larger one."
            )

    def _generation(
        self,
        name: str,
        prompt: Sequence[int],
        max_gen_len: int | None,
        sampling: SampleConfig,
        logprobs: bool,
        seed: int,
    ) -> Generation:
        room = self.max_seq_len - len(prompt)
        if room < 0:
            raise UserError(
                f"{name} has {len(prompt)} tokens, more than max_seq_len {self.max_seq_len}; shorten it, or build with "
                "a larger one."
            )
        if max_gen_len is not None and max_gen_len < 0:
            raise UserError(f"max_gen_len is {max_gen_len}; it must be at least 0.")
        most = room if max_gen_len is None else min(room, max_gen_len)
        return Generation(prompt, most, sampling, frozenset([self.tokenizer.eos_id]), seed, logprobs)
