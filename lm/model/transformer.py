"""Llama-style decoder-only Transformer: RMSNorm, rotary positions, SwiGLU, pre-norm, no biases. ModelConfig selects
variants.

Sources: CS336 assignment 1 (sections 3 and 7.3); Touvron et al. 2023 (Llama 2); Gemma Team 2024 (logit soft-cap); Zhang
et al. 2019 (zero-initialized residual branches).
Shapes: B batch, T tokens, D d_model, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from lm.common.errors import UserError
from lm.model.attention import AttentionFunction, MultiHeadSelfAttention
from lm.model.config import ModelConfig
from lm.model.feed_forward import make_feed_forward
from lm.model.initialization import truncated_normal_
from lm.model.linear import Embedding, Head, Role, ScalarHead, TiedEmbedding
from lm.model.moe import MoE
from lm.model.norm import make_norm
from lm.model.ops.causal_attention import causal_attention
from lm.model.rope import RotaryEmbedding


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network or a mixture of experts, each added to the residual stream.

    A sublayer ``f`` is ``x + f(ln(x))`` with ``norm_placement`` ``pre``, ``ln(x + f(x))`` with ``post``, ``x + f(x)``
    with ``none``, ``x + ln(f(x))`` with ``output`` and ``x + ln_out(f(ln(x)))`` with ``sandwich``. ``layer`` is the
    index of the block: the first ones of a mixture of experts are dense, and some have a sliding window.
    """

    def __init__(
        self,
        config: ModelConfig,
        rope: RotaryEmbedding | None = None,
        layer: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm_placement, self.multiplier = config.norm_placement, config.factors.residual
        self.ln1, self.ln2 = (
            nn.Identity() if config.norm_placement == "none" else make_norm(config, device, dtype) for _ in range(2)
        )
        if config.norm_placement == "sandwich":
            self.ln1_out, self.ln2_out = (make_norm(config, device, dtype) for _ in range(2))
        self.attn = MultiHeadSelfAttention(config, rope, device, dtype, config.window(layer), is_first=layer == 0)
        self.ffn: nn.Module = (
            MoE(config, device, dtype)
            if config.is_moe_layer(layer)
            else make_feed_forward(config, config.d_ff, device, dtype)
        )

    def forward(
        self,
        x_BTD: Tensor,
        token_positions: Tensor | None = None,
        attention_function: AttentionFunction = causal_attention,
        first_values: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, T, D) → (B, T, D). With value residuals the first block also returns its values, the ``first_values`` of
        the others."""
        inputs_BTD = x_BTD if self.norm_placement in ("post", "output") else self.ln1(x_BTD)
        attended = self.attn(inputs_BTD, token_positions, attention_function, first_values)
        if not self.attn.gives_values:
            return self._add_sublayers(x_BTD, attended)
        change_BTD, values = attended
        return self._add_sublayers(x_BTD, change_BTD), values

    def _add_sublayers(self, x_BTD: Tensor, change_BTD: Tensor) -> Tensor:
        """Add the change of the attention, then that of the feed-forward network."""
        if self.norm_placement == "post":
            x_BTD = self.ln1(x_BTD + self._scale(change_BTD))
            return self.ln2(x_BTD + self._scale(self.ffn(x_BTD)))
        if self.norm_placement == "output":
            x_BTD = x_BTD + self._scale(self.ln1(change_BTD))
            return x_BTD + self._scale(self.ln2(self.ffn(x_BTD)))
        if self.norm_placement == "sandwich":
            x_BTD = x_BTD + self._scale(self.ln1_out(change_BTD))
            return x_BTD + self._scale(self.ln2_out(self.ffn(self.ln2(x_BTD))))
        x_BTD = x_BTD + self._scale(change_BTD)
        return x_BTD + self._scale(self.ffn(self.ln2(x_BTD)))

    def _scale(self, change_BTD: Tensor) -> Tensor:
        """Return what a sublayer adds, times the residual multiplier."""
        return change_BTD if self.multiplier == 1 else change_BTD * self.multiplier


class TransformerLM(nn.Module):
    """Map token ids to next-token logits.

    :meth:`add_scalar_head` makes a reward model, or a policy with a value head, of it.
    """

    def __init__(self, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set; set it to the size of the tokenizer.")
        self.config = config
        self.rope = (
            RotaryEmbedding(
                config.rope_theta,
                config.resolved_head_dim,
                config.context_length,
                device,
                config.rope_scaling,
                config.rotary_dim,
            )
            if config.position_encoding == "rope"
            else None
        )
        self.local_rope = self.rope
        if config.local_rope_theta:
            self.local_rope = RotaryEmbedding(
                config.local_rope_theta,
                config.resolved_head_dim,
                config.context_length,
                device,
                rotary_dim=config.rotary_dim,
            )
        embedding_cls = TiedEmbedding if config.tied_embeddings else Embedding
        self.token_embeddings: Embedding = embedding_cls(config.vocab_size, config.d_model, device, dtype)
        self.layers = nn.ModuleList(
            TransformerBlock(config, self._rope_of(layer), layer, device, dtype) for layer in range(config.num_layers)
        )
        # A post-norm block ends with a norm already.
        has_final_norm = config.norm_placement not in ("post", "none")
        self.ln_final = make_norm(config, device, dtype) if has_final_norm else nn.Identity()
        self.lm_head: Head | None = None
        if config.tied_embeddings:
            truncated_normal_(self.token_embeddings.weight, config.d_model**-0.5)  # gives logits of order 1
        else:
            self.lm_head = Head(config.d_model, config.vocab_size, device, dtype, role="head")
        self.scalar_head: ScalarHead | None = None
        if config.zero_init_residual:
            for name, weight in self.layers.named_parameters():
                if name.endswith((".output_proj.weight", ".w2.weight", ".experts.w2")):
                    truncated_normal_(weight, 0.0)

    def add_scalar_head(self, std: float = 0.0) -> None:
        """Add a head that reads a number from each hidden state, on the model's device; see :class:`ScalarHead`."""
        self.scalar_head = ScalarHead(self.config.d_model, std, self.token_embeddings.weight.device)

    def _rope_of(self, layer: int) -> RotaryEmbedding | None:
        """Return the rotary positions of the block of index ``layer``, None if it has none."""
        if not self.config.has_rope(layer):
            return None
        return self.rope if self.config.is_global_layer(layer) else self.local_rope

    @property
    def head(self) -> nn.Module:
        """The module of the head: ``lm_head``, or with tied embeddings the embedding."""
        return self.token_embeddings if self.lm_head is None else self.lm_head

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head (V, D). With tied embeddings it is the embedding's weight."""
        return self.token_embeddings.weight if self.lm_head is None else self.lm_head.weight

    def parameter_roles(self) -> dict[str, Role]:
        """Return the role of each parameter by its name. A tied matrix has the role ``embedding``.

        Raises TypeError for a parameter whose module has no role.
        """
        roles: dict[str, Role] = {}
        for prefix, module in self.named_modules():
            for name, _ in module.named_parameters(prefix, recurse=False):
                role: Role | None = getattr(module, "bias_role" if name.endswith(".bias") else "role", None)
                if role is None:
                    raise TypeError(f"{name} has no role; set the attribute role of {type(module).__name__}.")
                roles[name] = role
        return roles

    def forward(self, token_ids: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """Integer ids (B, T) → logits (B, T, V).

        Raises UserError if the sequence is longer than the context.
        """
        return self.logits(self.hidden_states(token_ids, token_positions))

    def hidden_states(
        self,
        token_ids: Tensor,
        token_positions: Tensor | None = None,
        attention_functions: Sequence[AttentionFunction] | None = None,
    ) -> Tensor:
        """Run all blocks: token ids (B, T) → hidden states (B, T, D), the input of the head.

        ``token_positions`` (T,) or (B, T) are 0 … T-1 by default. ``attention_functions``, one per layer, replace the
        causal attention: generation uses its KV cache, and rows of several examples keep them apart. Raises UserError
        if the sequence is longer than the context.
        """
        if token_ids.shape[-1] > self.config.context_length:
            raise UserError(
                f"A sequence of {token_ids.shape[-1]} tokens does not fit the model's context of "
                f"{self.config.context_length}."
            )
        return self.run_layers(self.embed(token_ids), token_positions, attention_functions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first block: integer ids (...) → (..., D)."""
        x: Tensor = self.token_embeddings(token_ids)
        multiplier = self.config.factors.embedding
        return x if multiplier == 1 else x * multiplier

    def run_layers(
        self,
        x_BTD: Tensor,
        token_positions: Tensor | None = None,
        attention_functions: Sequence[AttentionFunction] | None = None,
    ) -> Tensor:
        """Run the blocks and the final norm on embeddings (B, T, D): :meth:`hidden_states` after the look-up."""
        options: dict[str, Any] = {}
        for layer, function in zip(self.layers, attention_functions or repeat(None, len(self.layers)), strict=True):
            if function is not None:
                options["attention_function"] = function
            x_BTD = layer(x_BTD, token_positions, **options)
            if isinstance(x_BTD, tuple):
                x_BTD, options["first_values"] = x_BTD
        return self.ln_final(x_BTD)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Apply the head to the output of :meth:`hidden_states`: (..., D) → (..., V)."""
        return self.cap_logits(self.head(hidden_states))

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Make logits of the products of hidden states with the head: divide, then apply the soft-cap."""
        cap, divisor = self.config.logit_softcap, self.config.factors.logits_divisor
        logits = logits if divisor == 1 else logits / divisor
        return cap * torch.tanh(logits / cap) if cap else logits

    def scalars(self, hidden_states: Tensor) -> Tensor:
        """Apply the scalar head to the output of :meth:`hidden_states`: (..., D) → (...), float32.

        Raises UserError if the model has no scalar head.
        """
        if self.scalar_head is None:
            raise UserError("The model has no scalar head: it is neither a reward model nor a policy with values.")
        numbers: Tensor = self.scalar_head(hidden_states)
        return numbers

    def loss(
        self,
        token_ids: Tensor,
        targets: Tensor,
        token_positions: Tensor | None = None,
        attention_functions: Sequence[AttentionFunction] | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy for ``targets`` (B, T), in nats; a float32 scalar.

        Memory holds one chunk of the logits at a time. Targets equal to ``IGNORE_INDEX`` do not count; if none counts,
        loss and gradients are 0. To average micro-batches, weight each loss by its number of counted targets.
        See :meth:`hidden_states` for the last two arguments.
        """
        return self.head_loss(self.hidden_states(token_ids, token_positions, attention_functions), targets)

    def head_loss(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        """Return :meth:`loss` from the output of :meth:`hidden_states` (B, T, D)."""
        if (divisor := self.config.factors.logits_divisor) != 1:
            hidden_states = hidden_states / divisor
        loss: Tensor = self.head(hidden_states.flatten(0, -2), targets.flatten(), self.config.logit_softcap)
        return loss


@torch.no_grad()
def grow_vocabulary(model: TransformerLM, vocab_size: int, seed: int) -> None:
    """Add rows to the embedding and the head of ``model``, in place, up to ``vocab_size`` token ids.

    A new row is the mean of the old ones (Hewitt 2021: the new tokens then take little probability) plus small noise,
    which depends on ``seed``. The parameters are new objects, so make optimizers afterwards. Raises UserError if the
    vocabulary is larger already.
    """
    old_size = model.config.vocab_size or 0
    if vocab_size < old_size:
        raise UserError(f"The model has {old_size:,} token ids and cannot shrink to {vocab_size:,}.")
    generator = torch.Generator().manual_seed(seed)
    for layer in (model.token_embeddings, model.lm_head):
        if layer is not None:
            weight = layer.weight
            rows = weight.float()
            noise = torch.randn(vocab_size - old_size, weight.shape[1], generator=generator).to(weight.device)
            new_rows = rows.mean(0) + 0.01 * rows.std(0, correction=0) * noise
            weight_with_rows = torch.cat((weight, new_rows.to(weight.dtype)))
            layer.weight = nn.Parameter(weight_with_rows, requires_grad=weight.requires_grad)
    model.config = replace(model.config, vocab_size=vocab_size)


@torch.no_grad()
def shrink_vocabulary(model: TransformerLM, vocab_size: int) -> None:
    """Remove the rows of the embedding and the head of ``model`` from ``vocab_size`` on, in place.

    For vocabularies that are padded to a round number: the removed ids have no token. The parameters are new objects.
    Raises UserError if the model has fewer rows.
    """
    old_size = model.config.vocab_size or 0
    if vocab_size > old_size:
        raise UserError(
            f"The model has {old_size:,} token ids, its tokenizer {vocab_size:,}; they do not belong together."
        )
    if vocab_size < old_size:
        for layer in (model.token_embeddings, model.lm_head):
            if layer is not None:
                layer.weight = nn.Parameter(layer.weight[:vocab_size].clone(), requires_grad=layer.weight.requires_grad)
        model.config = replace(model.config, vocab_size=vocab_size)
