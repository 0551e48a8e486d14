"""The interface of Meta's Llama 2 code (``llama/generation.py``): completion of texts and of chats.

Source: Touvron et al. 2023 (Llama 2) and Meta's code for it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import torch

from lm.checkpoint.external import load_any_model
from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.inference.completion import check_vocabulary
from lm.inference.config import SampleConfig
from lm.inference.engine import Generation, generate, stream
from lm.inference.llama_chat import encode_llama_dialog
from lm.inference.llama_tokenizer import LlamaTokenizer
from lm.inference.packed import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.model.vocabulary import shrink_vocabulary

TAGS_ANSWER = "Error: special tags are not allowed in messages."


class _TokenDetails(TypedDict, total=False):
    """Present if log-probabilities were asked for."""

    tokens: list[str]
    logprobs: list[float]


class CompletionPrediction(_TokenDetails):
    """The completion of a prompt."""

    generation: str


class ChatPrediction(_TokenDetails):
    """The answer to a dialog."""

    generation: Message


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
        """Return the new ids for each prompt, up to the first end token, which is excluded.

        At most ``max_gen_len`` ids, and as many as fit into ``max_seq_len``. ``echo`` puts the prompt's ids in front.
        The second list holds the log-probabilities of the returned ids under the model, in nats; 0.0 for the first id
        of a prompt. Raises UserError for too many prompts, and for a prompt that is empty, longer than ``max_seq_len``
        or has ids outside the vocabulary.
        """
        self._check_batch_size(prompt_tokens)
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        runs = [
            self._create_generation(f"Prompt {index}", prompt, max_gen_len, sampling, logprobs, seed + index, echo)
            for index, prompt in enumerate(prompt_tokens)
        ]
        generate(self.model, runs)
        ids = [[*run.prompt, *run.ids] if echo else run.ids for run in runs]
        if not logprobs:
            return ids, None
        return ids, [[0.0, *run.prompt_logprobs, *run.logprobs] if echo else run.logprobs for run in runs]

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
        """Complete texts as :meth:`generate` does. Special tokens in them are plain text."""
        prompt_tokens = [self.tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
        all_ids, all_logprobs = self.generate(prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo, seed)
        if all_logprobs is None:
            return [{"generation": self.tokenizer.decode(ids)} for ids in all_ids]
        return [
            {"generation": self.tokenizer.decode(ids), "tokens": self._decode_each(ids), "logprobs": scores}
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
        """Return the assistant's next message in each dialog.

        ``default_system`` is the system message of dialogs without one. A dialog with a tag of the chat format in a
        message is answered with ``TAGS_ANSWER``, without tokens. Raises UserError as :meth:`generate` and
        :func:`lm.inference.llama_chat.encode_llama_dialog` do.
        """
        self._check_batch_size(dialogs)
        sampling = SampleConfig(temperature=temperature, top_p=top_p)
        answers: list[ChatPrediction] = []
        runs: dict[int, Generation] = {}
        for index, dialog in enumerate(dialogs):
            name = f"Dialog {index}"
            prompt = encode_llama_dialog(self.tokenizer, dialog, default_system, name)
            if prompt is not None:
                runs[index] = self._create_generation(name, prompt, max_gen_len, sampling, logprobs, seed + index)
            answers.append({"generation": {"role": "assistant", "content": TAGS_ANSWER}})
            if logprobs:
                answers[index] |= {"tokens": [], "logprobs": []}
        generate(self.model, list(runs.values()))
        for index, run in runs.items():
            answers[index]["generation"]["content"] = self.tokenizer.decode(run.ids)
            if logprobs:
                answers[index] |= {"tokens": self._decode_each(run.ids), "logprobs": run.logprobs}
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
        generation = self._create_generation("The dialog", prompt, max_gen_len, sampling, False, seed)
        return filter(None, self.tokenizer.decode_stream(stream(self.model, generation)))

    def _decode_each(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token_id]) for token_id in ids]

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
        logprobs: bool,
        seed: int,
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
        max_new_tokens = room if max_gen_len is None else min(room, max_gen_len)
        stop_ids = frozenset([self.tokenizer.eos_id])
        generation = Generation(prompt, max_new_tokens, sampling, stop_ids, seed)
        generation.wants_logprobs, generation.wants_prompt_logprobs = logprobs, logprobs and echo
        return generation
