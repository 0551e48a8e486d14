"""Cache of attention keys and values, so that each token is computed once, also a prefix that several prompts share.

The entries of a token lie at its position in the row of its sequence. Entries after a sequence's last token are never
read, so prompts of different lengths need no padding on the left. Source: Kwon et al. 2023 (vLLM: automatic prefix
caching).
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.model.config import ModelConfig

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
Tokens = tuple[int, ...]
_BlockKey = tuple[int, Tokens]  # serial number of the block before it (0: none), and its tokens


class KVCache:
    """Keys and values (layers, rows, kv heads, length, head_dim) of ``rows`` sequences of up to ``length`` tokens."""

    def __init__(
        self, config: ModelConfig, rows: int, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (config.num_layers, rows, config.kv_heads, length, config.resolved_head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copy the rows ``sources`` over the rows ``targets``."""
        for tensor in (self.keys, self.values):
            tensor[:, targets] = tensor[:, sources]


@dataclass
class Block:
    """A stored block: the keys and values of 16 tokens after all the tokens before them."""

    slot: int
    serial: int
    """Unique. So a key (serial of the block before, 16 tokens) stands for the whole prefix."""
    has_hidden: bool = False
    """Whether the final hidden states are stored too. Generated tokens have none."""


class PrefixCache:
    """Keys and values of recent sequences. A prompt that begins like one of them is computed from where they differ.

    Blocks of keys, values (layers, kv heads, 16, head_dim) and hidden states (16, d_model) take at most ``max_bytes``
    bytes. Each is stored once, whatever sequences share it; the least recently used blocks make room for new ones. The
    hidden states give the log-probabilities of a prompt's tokens. Raises UserError if not even one block fits.
    """

    def __init__(self, config: ModelConfig, max_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
        kv_shape = (config.num_layers, config.kv_heads, BLOCK_TOKENS, config.resolved_head_dim)
        numbers = 2 * config.num_layers * config.kv_heads * config.resolved_head_dim + config.d_model
        block_bytes = BLOCK_TOKENS * numbers * dtype.itemsize
        self.max_blocks = max_bytes // block_bytes
        if not self.max_blocks:
            raise UserError(
                f"A prefix cache of {max_bytes:,} bytes is too small: {BLOCK_TOKENS} tokens of this model take "
                f"{block_bytes:,}. Give it more, or 0 to turn it off."
            )
        # Written now, so that the memory is taken at the start and not bit by bit.
        self._kv = torch.empty(2, self.max_blocks, *kv_shape, device=device, dtype=dtype).zero_()
        self._hidden = torch.empty(self.max_blocks, BLOCK_TOKENS, config.d_model, device=device, dtype=dtype).zero_()
        self._blocks: OrderedDict[_BlockKey, Block] = OrderedDict()  # the least recently used first
        self._last_serial = 0

    def __len__(self) -> int:
        """Return the number of stored blocks."""
        return len(self._blocks)

    def match(self, tokens: Sequence[int], needs_hidden: bool = False) -> list[Block]:
        """Return the blocks of the longest stored prefix of ``tokens``, never all of them.

        With ``needs_hidden``, only blocks that have hidden states.
        """
        keys: list[_BlockKey] = []
        blocks: list[Block] = []
        for start in range(0, (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            key = (blocks[-1].serial if blocks else 0, tuple(tokens[start : start + BLOCK_TOKENS]))
            block = self._blocks.get(key)
            if block is None or (needs_hidden and not block.has_hidden):
                break
            keys.append(key)
            blocks.append(block)
        self._touch(keys)
        return blocks

    def load(self, blocks: Sequence[Block], cache: KVCache, row: int) -> Tensor:
        """Copy blocks to the start of a row of ``cache``, and return their hidden states (T, D)."""
        slots = [block.slot for block in blocks]
        length = len(blocks) * BLOCK_TOKENS
        for target, source in zip((cache.keys, cache.values), self._kv, strict=True):
            target[:, row, :, :length] = source[slots].permute(1, 2, 0, 3, 4).flatten(2, 3)
        return self._hidden[slots].flatten(0, 1)

    def store(
        self, tokens: Sequence[int], cache: KVCache, row: int, hidden: Tensor | None = None, hidden_start: int = 0
    ) -> None:
        """Store the whole blocks of ``tokens``, which are in a row of ``cache``, as far as they are not stored yet.

        If that fails, the cache is empty: generations go on without it. ``hidden`` (T, D) are the hidden states of the
        tokens from ``hidden_start`` on.
        """
        keys: list[_BlockKey] = []
        new: list[tuple[int, int]] = []  # index in the row and slot
        without_hidden: list[tuple[int, int]] = []  # index in ``hidden`` and slot
        serial = 0
        for index in range(min(len(tokens) // BLOCK_TOKENS, self.max_blocks)):
            start = index * BLOCK_TOKENS
            key = (serial, tuple(tokens[start : start + BLOCK_TOKENS]))
            block = self._blocks.get(key)
            if block is None:
                block = self._add(key)
                new.append((index, block.slot))
            self._blocks.move_to_end(key)
            if hidden is not None and start >= hidden_start and not block.has_hidden:
                without_hidden.append((index - hidden_start // BLOCK_TOKENS, block.slot))
                block.has_hidden = True
            keys.append(key)
            serial = block.serial
        self._touch(keys)
        try:
            if new:
                indices, slots = map(list, zip(*new, strict=True))
                for source, target in zip((cache.keys, cache.values), self._kv, strict=True):
                    blocks = source[:, row, :, : len(keys) * BLOCK_TOKENS].unflatten(2, (-1, BLOCK_TOKENS))
                    target[slots] = blocks[:, :, indices].permute(2, 0, 1, 3, 4)
            if hidden is not None and without_hidden:
                indices, slots = map(list, zip(*without_hidden, strict=True))
                whole = len(hidden) // BLOCK_TOKENS * BLOCK_TOKENS
                self._hidden[slots] = hidden[:whole].unflatten(0, (-1, BLOCK_TOKENS))[indices]
        except BaseException as error:  # e.g. out of memory: nothing may be served that was not copied
            self._blocks.clear()
            if not isinstance(error, Exception):
                raise
            log.warning("The prefix cache failed to store a sequence and is empty now.", exc_info=True)

    def _add(self, key: _BlockKey) -> Block:
        """Add a block, in the slot of the least recently used one if all slots are taken."""
        is_full = len(self._blocks) == self.max_blocks
        slot = self._blocks.popitem(last=False)[1].slot if is_full else len(self._blocks)
        self._last_serial += 1
        self._blocks[key] = Block(slot, self._last_serial)
        return self._blocks[key]

    def _touch(self, keys: Sequence[_BlockKey]) -> None:
        """Make blocks the most recently used. The last goes first: without its prefix a block is of no use."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
