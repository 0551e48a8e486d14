"""Batched generation of token ids with a KV cache; each sequence has settings of its own.

Prompts are computed in chunks. Each decoding step adds a token to every sequence whose prompt is computed. Sequences
join and leave the batch between steps. Sources: CS336 assignment 1 (section 6); Touvron et al. 2023 (Llama 2); Yu et
al. 2022 (Orca: continuous batching).
"""

import logging
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.inference.cache_size import plan_cache
from lm.inference.generation_request import Generation
from lm.inference.kv_cache import PAGE_TOKENS
from lm.inference.prefill import Prefill, PrefillJob
from lm.inference.prefix_cache import PrefixCache
from lm.inference.runners.runner import make_runner
from lm.inference.sampler import LogitEditor, LogitEdits, Sampler, TokenScore, edit_logits, score_tokens
from lm.inference.served_adapters import check_adapter
from lm.inference.speculation import PromptLookup
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)


class Engine:
    """Runs up to ``max_batch_size`` generations at once with one model.

    Of a prompt longer than ``max_seq_len`` tokens, by default the model's context, the last ``max_seq_len`` are read. A
    sequence that outgrows them continues from their last half, which is computed again from position 0.

    Keys and values take at most ``kv_bytes``, by default what ``max_batch_size`` sequences of ``max_seq_len`` tokens
    and the prefix cache need. A generation is admitted if pages are free for all the tokens that it may have. So once
    admitted it never stops for another one, and its results do not depend on the others. (To admit it by its prompt
    alone would fill the memory better, but then a generation must give up its pages and be computed again, sooner or
    later, at the cost of all.) With ``prefix_cache_bytes``, a prompt that shares a prefix with a recent sequence
    computes only the rest, and shares its pages; see :class:`lm.inference.prefix_cache.PrefixCache`. Without it, layers
    with a sliding window keep only the keys and values of their windows; see :mod:`lm.inference.cache_size`.

    Raises UserError if not even 16 tokens fit into the memory of the keys and values, or of the prefix cache.
    """

    def __init__(
        self,
        model: TransformerLM,
        max_batch_size: int,
        max_seq_len: int | None = None,
        prefix_cache_bytes: int = 0,
        kv_bytes: int | None = None,
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.device = model, parameter.device
        self.max_batch_size, self._vocab_size = max_batch_size, model.config.vocab_size or 1
        self.max_seq_len = min(max_seq_len or model.config.context_length, model.config.context_length)
        self.active: list[Generation] = []  # the index here is the row of the cache; those with jobs come last
        self._jobs: dict[Generation, PrefillJob] = {}  # of the active generations that are being prefilled
        size = plan_cache(model.config, parameter.dtype, max_batch_size, self.max_seq_len, prefix_cache_bytes, kv_bytes)
        self.max_seq_len, self.kv_bytes, self.kv_tokens = size.length, size.num_bytes, size.num_pages * PAGE_TOKENS
        self._cache = size.make(self.device)
        self._prefix_cache = PrefixCache(self._cache, size.num_blocks) if size.num_blocks else None
        self._runner = make_runner(model, self._cache)
        self._prefill = Prefill(model, self._runner, self._cache, self._prefix_cache)
        self._sampler: Sampler | None = None  # of the decoding generations
        self._editors: dict[Generation, LogitEditor] = {}  # of the active generations that need one
        self._lookups: dict[Generation, PromptLookup] = {}  # of the active generations with speculative decoding

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of tokens of prompts that were computed so far."""
        return self._prefill.num_computed

    @property
    def prefilling(self) -> list[Generation]:
        """The active generations whose prompts are being computed."""
        return [*self._jobs]

    @property
    def decoding(self) -> list[Generation]:
        """The active generations that get a token in a decoding step: the first rows."""
        return self.active[: len(self.active) - len(self._jobs)]

    def check_prompt(self, generation: Generation) -> None:
        """Raise UserError for an unknown adapter, and if the prompt is empty or holds ids outside the vocabulary."""
        vocab_size = self._vocab_size
        check_adapter(self.model, generation.adapter)
        if not generation.prompt:
            raise UserError("The prompt is empty; give at least one token, such as the end-of-text token.")
        if bad := [token_id for token_id in generation.prompt if not 0 <= token_id < vocab_size]:
            raise UserError(f"The prompt holds token id {bad[0]}, outside the model's vocabulary of {vocab_size:,}.")

    @torch.inference_mode()
    def admit(self, generation: Generation) -> bool:
        """Give a generation a row and its pages; return False if there are too few. :meth:`prefill` computes it.

        The prompt must have passed :meth:`check_prompt`.
        """
        self._remove_finished()
        if (row := len(self.active)) == self.max_batch_size:
            return False
        prompt, max_length = generation.prompt, self.max_seq_len
        self._cache.adapters[row] = generation.adapter
        generation.window_start = max(0, len(prompt) + len(generation.ids) - max_length)
        tokens = (*prompt, *generation.ids)[generation.window_start :]
        num_tokens = len(prompt) + max(0, generation.max_new_tokens - 1)  # the last one is not computed
        job = PrefillJob(generation, row, tokens, owns_pages=num_tokens > max_length)
        try:
            if not self._prefill.reserve(job, min(num_tokens, max_length)):
                return False
            edits, penalty, constraint = generation.edits, generation.sampling.repetition_penalty, generation.constraint
            if penalty != 1 or edits != LogitEdits() or constraint:
                options = self._vocab_size, self.device, constraint, generation.stop_ids
                self._editors[generation] = LogitEditor(edits, penalty, prompt, *options)
            if generation.sampling.speculative_tokens:
                self._lookups[generation] = PromptLookup(prompt, generation.sampling.speculative_tokens)
        except BaseException:
            self._cache.clear(row)
            raise
        self.active.append(generation)
        self._jobs[generation] = job
        return True

    def add(self, generations: Sequence[Generation]) -> None:
        """Admit generations, prefill all their prompts, and sample the first token of each.

        Raises UserError for a bad prompt, before any is added, and ValueError if there are too few free rows or pages.
        After any error none is added.
        """
        for generation in generations:
            self.check_prompt(generation)
        self._remove_finished()
        if (count := len(self.active) + len(generations)) > self.max_batch_size:
            raise ValueError(f"{count} sequences are more than {self.max_batch_size}")
        try:
            if not all(map(self.admit, generations)):
                raise ValueError(f"{len(generations)} sequences need more pages than are free")
            while self._jobs:
                self.prefill()
        except Exception:
            for generation in set(generations) & set(self.active):
                self._remove(self.active.index(generation))
            raise
        self._remove_finished()

    @torch.inference_mode()
    def prefill(self, max_tokens: int | None = None, only: Collection[Generation] | None = None) -> None:
        """Compute the next chunk of prompts, and sample the first token of each prompt that is complete.

        ``only`` names the generations that may be computed; default: all. See :class:`lm.inference.prefill.Prefill` for
        ``max_tokens``. After an error, it can be repeated with the same result.
        """
        self._remove_finished()
        jobs = [job for generation, job in self._jobs.items() if only is None or generation in only]
        self._prefill(jobs, max_tokens)
        if not (finished := [job for job in jobs if job.last_hidden is not None]):
            return
        for job in finished:
            if job.is_prompt:
                job.generation.is_prefilled, job.generation.num_cached_tokens = True, job.num_reused
        if continued := [job for job in finished if job.generation.max_new_tokens]:
            hidden = torch.stack([job.last_hidden for job in continued if job.last_hidden is not None])
            self._sample(self.model.logits(hidden), [job.generation for job in continued])
        for job in finished:
            if job.generation.max_new_tokens == 0:
                job.generation.finish_reason = job.generation.finish_reason or "length"
            self._swap(job.row, len(self.active) - len(self._jobs))
            del self._jobs[job.generation]
        self._remove_finished()

    def step(self) -> None:
        """Sample the next token of every active generation, and more if draft tokens are accepted.

        Remove finished generations. After an error, the step can be repeated.
        """
        self.decode()
        while self._jobs:
            self.prefill()

    @torch.inference_mode()
    def decode(self) -> None:
        """Sample the next token of every generation whose prompt is computed, and more if draft tokens are accepted.

        A sequence that outgrows the context is given to :meth:`prefill` instead. Removes finished generations. After an
        error, it can be repeated with the same result.
        """
        self._remove_finished()
        for generation in self.decoding:
            if generation.window_length > self.max_seq_len:
                self._start_window(generation)
        if not (decoding := self.decoding):
            return
        lengths = [generation.window_length for generation in decoding]
        drafts = [self._draft(generation) for generation in decoding]
        if any(drafts):
            self._verify(drafts)
        else:
            inputs = [[generation.ids[-1] for generation in decoding], [length - 1 for length in lengths]]
            logits = self._runner.decode(torch.tensor(inputs, device=self.device), max(lengths) - 1)
            self._sample(logits, decoding)
        self._remove_finished()

    def _start_window(self, generation: Generation) -> None:
        """Let the last half of a full window be computed from position 0."""
        generation.window_start += generation.window_length - max(1, self.max_seq_len // 2)
        tokens = (*generation.prompt, *generation.ids)[generation.window_start :]
        row = len(self.active) - len(self._jobs) - 1  # the last one that decodes
        self._swap(self.active.index(generation), row)
        self._jobs[generation] = PrefillJob(generation, row, tokens, owns_pages=True, is_prompt=False)
        self._sampler = None

    def _swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        self._cache.swap_rows(row, other)  # first: if it fails, no row has the keys of another
        active = self.active
        active[row], active[other] = active[other], active[row]
        for moved in (row, other):
            if job := self._jobs.get(active[moved]):
                job.row = moved
        self._sampler = None

    def _draft(self, generation: Generation) -> list[int]:
        """Return draft tokens that leave room for one more token in the text and in the context."""
        if (lookup := self._lookups.get(generation)) is None:
            return []
        num_missing = generation.max_new_tokens - len(generation.ids)
        room = self.max_seq_len - generation.window_length, self._cache.max_chunk_tokens - 1
        return lookup.draft(generation.ids, min(num_missing - 1, *room))

    def _verify(self, drafts: list[list[int]]) -> None:
        """Sample the next token of every decoding generation, and one more after each draft token that was sampled.

        See :mod:`lm.inference.speculation`.
        """
        decoding = self.decoding
        starts = [generation.window_length - 1 for generation in decoding]
        suffixes = [(generation.ids[-1], *draft) for generation, draft in zip(decoding, drafts, strict=True)]
        hidden = self._runner.extend(range(len(starts)), suffixes, starts)
        logits = self.model.logits(torch.cat(hidden)).split([len(suffix) for suffix in suffixes])
        num_accepted = [0] * len(starts)
        rows, i = list(range(len(starts))), 0
        while rows:
            ids = self._sample(torch.stack([logits[row][i] for row in rows]), [decoding[row] for row in rows])
            accepted = [row for row, new_id in zip(rows, ids, strict=True) if drafts[row][i : i + 1] == [new_id]]
            for row in accepted:
                num_accepted[row] += 1
            rows, i = [row for row in accepted if not decoding[row].finish_reason], i + 1
        for generation, draft, count in zip(decoding, drafts, num_accepted, strict=True):
            if draft:
                generation.num_draft_tokens += len(draft)
                generation.num_accepted_tokens += count
                self._lookups[generation].record(len(draft), count)

    def _remove_finished(self) -> None:
        for row in reversed(range(len(self.active))):
            if self.active[row].finish_reason:
                self._store(row)
                self._remove(row)

    def _remove(self, row: int) -> None:
        """Remove a generation. The last row that decodes, and the last of all, move into the free places."""
        generation, num_decoding = self.active[row], len(self.active) - len(self._jobs)
        if row < num_decoding:
            self._swap(row, num_decoding - 1)
            row = num_decoding - 1
        self._swap(row, len(self.active) - 1)
        self._cache.clear(len(self.active) - 1)
        self.active.pop()
        for state in (self._jobs, self._editors, self._lookups):
            state.pop(generation, None)

    def _store(self, row: int) -> None:
        """Keep the sequence of a row in the prefix cache. The last id was not computed yet."""
        generation = self.active[row]
        is_complete = len(generation.prompt) + len(generation.ids) <= self.max_seq_len
        if self._prefix_cache is not None and generation.ids and is_complete:
            self._prefix_cache.store((*generation.prompt, *generation.ids[:-1]), row)

    def _sample(self, logits: Tensor, generations: Sequence[Generation]) -> list[int]:
        """Sample from ``logits`` (rows, V) for some of the active generations, in this order. Return the ids."""
        logits = logits.float()  # argmax and max are slow in bfloat16
        uniform = torch.tensor([generation.choose_uniform() for generation in generations], device=self.device)
        settings = [generation.sampling for generation in generations]
        if generations == self.decoding:  # kept until the batch changes
            sampler = self._sampler = self._sampler or Sampler(settings, self.device)
        else:
            sampler = Sampler(settings, self.device)
        with self._runner.sampling_context(len(logits)):
            ids = sampler.sample(edit_logits(logits, [*map(self._editors.get, generations)]), uniform)
            scores = self._score(logits, ids, generations)
        id_list: list[int] = ids.tolist()
        for row, (generation, token_id) in enumerate(zip(generations, id_list, strict=True)):
            if not generation.finish_reason:
                try:
                    if editor := self._editors.get(generation):
                        editor.record(token_id)
                    generation.append(token_id, scores.get(row))
                except Exception as error:
                    log.exception("A generation failed.")
                    generation.fail(error)
        return id_list

    def _score(self, logits: Tensor, ids: Tensor, generations: Sequence[Generation]) -> dict[int, TokenScore]:
        """Return the scores of ``ids`` (rows,) by the row, for the generations that want them."""
        rows = [row for row, generation in enumerate(generations) if generation.wants_logprobs]
        if not rows:
            return {}
        if len(rows) < len(generations):
            logits, ids = logits[rows], ids[rows]
        count = max(generations[row].num_alternatives for row in rows)
        scores = score_tokens(logits, ids, count)
        return {
            row: score._replace(alternatives=score.alternatives[: generations[row].num_alternatives])
            for row, score in zip(rows, scores, strict=True)
        }


def generate(model: TransformerLM, generations: Sequence[Generation], max_batch_size: int | None = None) -> None:
    """Run all ``generations`` to their end, ``max_batch_size`` at once (default: all).

    Raises UserError for a bad prompt, before anything is computed, and the error of a generation that fails.
    """
    for _ in generate_each(model, generations, max_batch_size):
        pass


def generate_each(
    model: TransformerLM, generations: Sequence[Generation], max_batch_size: int | None = None
) -> Iterator[Generation]:
    """Run all ``generations`` as :func:`generate` does, and yield each when it ends."""
    lengths = [len(generation.prompt) + generation.max_new_tokens for generation in generations]  # that the cache needs
    engine = Engine(model, min(max_batch_size or len(generations), len(generations)), max(lengths, default=1))
    for generation in generations:
        engine.check_prompt(generation)
    waiting = list(generations)
    running: list[Generation] = []
    while waiting or running:
        if free_rows := engine.max_batch_size - len(engine.active):
            engine.add(waiting[:free_rows])
            running += waiting[:free_rows]
            del waiting[:free_rows]
        engine.step()
        for generation in running:
            if generation.error:
                raise generation.error
        yield from (generation for generation in running if generation.finish_reason)
        running = [generation for generation in running if not generation.finish_reason]


def stream(model: TransformerLM, generation: Generation) -> Iterator[int]:
    """Yield the new ids of one generation as they are sampled."""
    engine = Engine(model, 1, len(generation.prompt) + generation.max_new_tokens)
    engine.add([generation])
    count = 0
    while True:
        yield from generation.ids[count:]
        count = len(generation.ids)
        if generation.error:
            raise generation.error
        if generation.finish_reason:
            return
        engine.step()
