"""The interface of Meta's Llama 2 code (``llama/generation.py``): completion of texts and of chats.

Source: Touvron et al. 2023 (Llama 2) and Meta's code for it.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NotRequired, TypedDict, TypeVar

import torch

from lm.checkpoint.external import load_any_model, load_any_tokenizer
from lm.common.errors import UserError
from lm.data.dialogs import Message, find_role_problem
from lm.inference.completion import TextStream, check_vocabulary
from lm.inference.config import SampleConfig
from lm.inference.engine import generate, stream
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM, shrink_vocabulary
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.text_tokenizer import BEGIN_AND_END, find_text_ends
from lm.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

LLAMA_TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
TAGS_ANSWER = "Error: special tags are not allowed in messages."


class LlamaTokenizer:
    """A tokenizer of any kind, with its BOS and EOS token. ``n_words``: number of ids, the rows that a model needs."""

    def __init__(self, tokenizer: Tokenizer | SentencePieceTokenizer, bos_id: int, eos_id: int) -> None:
        self.n_words, self.bos_id, self.eos_id, self._tokenizer = tokenizer.size, bos_id, eos_id, tokenizer
        self._token_bytes = tokenizer.vocab | dict.fromkeys(tokenizer.special_ids.values(), b"")
        self._space_ids = frozenset[int]()  # begin with a space, which is dropped at the start of a text
        if isinstance(tokenizer, SentencePieceTokenizer):
            self._space_ids = tokenizer.space_ids

    @classmethod
    def load(cls, path: Path) -> "LlamaTokenizer":
        """Read a ``tokenizer.model`` of SentencePiece, a ``tokenizer.json``, or a directory with one of them.

        Raises UserError if it cannot be read, if the ``sentencepiece`` library is missing, or if no BOS and EOS tokens
        are known.
        """
        tokenizer = load_any_tokenizer(path)
        if isinstance(tokenizer, SentencePieceTokenizer):
            return cls(tokenizer, tokenizer.bos_id, tokenizer.eos_id)
        begin, end = find_text_ends(tokenizer)
        if not begin or not end:
            raise UserError(
                f"{path} lacks the special tokens that begin and end a text "
                f"({', '.join(' and '.join(dict.fromkeys(pair)) for pair in BEGIN_AND_END)}); add them and train with "
                "them."
            )
        return cls(tokenizer, tokenizer.special_ids[begin], tokenizer.special_ids[end])

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        """Return the ids of ``text``, whose special tokens are plain text, with the BOS and EOS ids if asked for."""
        return [self.bos_id] * bos + self._tokenizer.encode(text, allowed_special=()) + [self.eos_id] * eos

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return "".join(self.decode_stream(ids))

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of :meth:`decode` piece by piece, in whole characters."""
        text, has_begun = TextStream(self._token_bytes), False
        for token_id in ids:
            piece = text.add(token_id)
            yield piece[1:] if token_id in self._space_ids and not has_begun else piece
            has_begun = has_begun or self._token_bytes.get(token_id, b"") != b""
        yield text.finish()


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
    messages, system = list(dialog), default_system
    if messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    contents = [message["content"] for message in messages]
    if any(tag in content for tag in LLAMA_TAGS for content in (*contents, system or "")):
        return None
    if system is not None:
        contents[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}"
    contents = [content.strip() for content in contents]
    ids = []
    for question, answer in zip(contents[::2], contents[1::2], strict=False):
        ids += tokenizer.encode(f"[INST] {question} [/INST] {answer} ", bos=True, eos=True)
    return ids + tokenizer.encode(f"[INST] {contents[-1]} [/INST]", bos=True, eos=False)


class Prediction(TypedDict, Generic[T]):
    """The completion of a prompt, which is a text, or the answer to a dialog, which is a message."""

    generation: T
    tokens: NotRequired[list[str]]
    """Present, like ``logprobs``, if log-probabilities were asked for."""
    logprobs: NotRequired[list[float]]


class Llama:
    """A model and its tokenizer, for up to ``max_batch_size`` sequences of up to ``max_seq_len`` tokens at once.

    Sequence i of a call is sampled with ``seed + i``, whatever else is in the batch. Not thread-safe. Raises UserError
    if model and tokenizer do not belong together, or if the model does not support the sizes.
    """

    def __init__(self, model: TransformerLM, tokenizer: LlamaTokenizer, max_seq_len: int, max_batch_size: int) -> None:
        check_vocabulary(model, tokenizer.n_words)
        context_length = model.config.context_length
        if not 1 <= max_seq_len <= context_length:
            raise UserError(f"max_seq_len is {max_seq_len}; this model takes 1 to {context_length} tokens.")
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
        """Load a checkpoint of Meta, Hugging Face or this project, and a tokenizer as :meth:`LlamaTokenizer.load` does.

        ``dtype`` defaults to that of the embedding. Raises UserError if a file is missing, damaged or unknown.
        """
        tokenizer = LlamaTokenizer.load(Path(tokenizer_path))
        model = load_any_model(Path(ckpt_dir), device, max_seq_len, dtype)
        shrink_vocabulary(model, tokenizer.n_words)
        return cls(prepare_for_inference(model, dtype), tokenizer, max_seq_len, max_batch_size)

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
        """Return the new ids for each prompt, up to the first EOS token, which is excluded.

        At most ``max_gen_len`` ids, and as many as fit into ``max_seq_len``. ``echo`` puts the prompt's ids in front.
        The second list holds the log-probabilities of the returned ids under the model, in nats; 0.0 for the first id
        of a prompt. Raises UserError for too many prompts, and for a prompt that is empty, longer than ``max_seq_len``
        or has ids outside the vocabulary.
        """
        self._check_batch_size(prompt_tokens)
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        generations = [
            self._create_generation(f"Prompt {index}", prompt, max_gen_len, sampling, seed + index, logprobs, echo)
            for index, prompt in enumerate(prompt_tokens)
        ]
        generate(self.model, generations)
        ids = [[*generation.prompt, *generation.ids] if echo else generation.ids for generation in generations]
        if not logprobs:
            return ids, None
        if not echo:
            return ids, [generation.logprobs for generation in generations]
        return ids, [[0.0, *generation.prompt_logprobs, *generation.logprobs] for generation in generations]

    def text_completion(
        self,
        prompts: Sequence[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        seed: int = 0,
    ) -> list[Prediction[str]]:
        """Complete texts as :meth:`generate` does. Special tokens in them are plain text."""
        prompt_tokens = [self.tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
        all_ids, all_logprobs = self.generate(prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo, seed)
        return [
            self._predict(self.tokenizer.decode(ids), ids, all_logprobs[index] if all_logprobs else None)
            for index, ids in enumerate(all_ids)
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
    ) -> list[Prediction[Message]]:
        """Return the assistant's next message in each dialog.

        ``default_system`` is the system message of dialogs without one. A dialog with a tag of the chat format in a
        message is answered with ``TAGS_ANSWER``, without tokens. Raises UserError as :meth:`generate` and
        :func:`encode_llama_dialog` do.
        """
        self._check_batch_size(dialogs)
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        generations: dict[int, Generation] = {}
        for index, dialog in enumerate(dialogs):
            name = f"Dialog {index}"
            if (prompt := encode_llama_dialog(self.tokenizer, dialog, default_system, name)) is not None:
                generation = self._create_generation(name, prompt, max_gen_len, sampling, seed + index, logprobs)
                generations[index] = generation
        generate(self.model, list(generations.values()))
        answers: list[Prediction[Message]] = []
        for index in range(len(dialogs)):
            ids = generations[index].ids if index in generations else []
            scores = generations[index].logprobs if index in generations else []
            content = self.tokenizer.decode(ids) if index in generations else TAGS_ANSWER
            answer = Message(role="assistant", content=content)
            answers.append(self._predict(answer, ids, scores if logprobs else None))
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
        """Yield the answer of :meth:`chat_completion` to one dialog in pieces of whole characters."""
        prompt = encode_llama_dialog(self.tokenizer, dialog, default_system)
        if prompt is None:
            return iter([TAGS_ANSWER])
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        generation = self._create_generation("The dialog", prompt, max_gen_len, sampling, seed)
        return filter(None, self.tokenizer.decode_stream(stream(self.model, generation)))

    def _predict(self, generation: T, ids: Sequence[int], logprobs: list[float] | None) -> Prediction[T]:
        """Return a prediction, with the texts of ``ids`` if they have ``logprobs``."""
        if logprobs is None:
            return {"generation": generation}
        texts = [self.tokenizer.decode([token_id]) for token_id in ids]
        return {"generation": generation, "tokens": texts, "logprobs": logprobs}

    def _check_batch_size(self, batch: Sequence[object]) -> None:
        if len(batch) > self.max_batch_size:
            raise UserError(
                f"{len(batch)} are more than max_batch_size {self.max_batch_size}; give fewer at a time, or build with "
                "a larger one."
            )

    def _create_generation(
        self,
        name: str,
        prompt: Sequence[int],
        max_gen_len: int | None,
        sampling: SampleConfig,
        seed: int,
        logprobs: bool = False,
        echo: bool = False,
    ) -> Generation:
        room = self.max_seq_len - len(prompt)
        if room < 0:
            raise UserError(
                f"{name} has {len(prompt)} tokens, more than max_seq_len {self.max_seq_len}; shorten it, or build with "
                "a larger one."
            )
        if max_gen_len is not None and max_gen_len < 0:
            raise UserError(f"max_gen_len is {max_gen_len}; it must be at least 0.")
        return Generation(
            prompt,
            room if max_gen_len is None else min(room, max_gen_len),
            sampling,
            frozenset([self.tokenizer.eos_id]),
            seed,
            wants_logprobs=logprobs,
            wants_prompt_logprobs=logprobs and echo,
        )
