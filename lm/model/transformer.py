"""Llama-style decoder-only Transformer: RMSNorm, rotary positions, SwiGLU, pre-norm, no biases. ModelConfig selects
variants.

Sources: CS336 assignment 1 (sections 3 and 7.3); Touvron et al. 2023 (Llama 2); Gemma Team 2024 (logit soft-cap); Zhang
et al. 2019 (zero-initialized residual branches).
Shapes in comments: B batch, T sequence, D d_model, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.types import Device
from torch.utils.checkpoint import checkpoint

from lm.common.errors import UserError
from lm.model.attention import AttentionFunction, MultiHeadSelfAttention
from lm.model.config import ModelConfig
from lm.model.feed_forward import FeedForward, SwiGLU
from lm.model.linear import Embedding, Linear, truncated_normal_
from lm.model.moe import MoE, Routing
from lm.model.moe_config import MoEConfig
from lm.model.norm import RMSNorm
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.cross_entropy import linear_cross_entropy
from lm.model.ops.matmul import linear
from lm.model.roles import Role
from lm.model.rope import RotaryEmbedding
from lm.model.scalar_head import ScalarHead

HeadFunction = Callable[[Tensor, Tensor], Tensor]  # hidden states (..., D), weight (V, D) → logits (..., V)
# Hidden states (N, D), weight (V, D), targets (N,), soft-cap → mean cross-entropy
LossFunction = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward network or a mixture of experts, each added to the residual stream.

    A sublayer ``f`` is ``x + f(ln(x))`` with ``norm_placement`` ``pre``, ``ln(x + f(x))`` with ``post`` and
    ``x + f(x)`` with ``none``.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        rope: RotaryEmbedding | None = None,
        norm_eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_placement: Literal["pre", "post", "none"] = "pre",
        feed_forward: Literal["swiglu", "silu", "relu2"] = "swiglu",
        moe: MoEConfig | None = None,
    ) -> None:
        super().__init__()
        self.is_post_norm = norm_placement == "post"
        self.ln1, self.ln2 = (
            nn.Identity() if norm_placement == "none" else RMSNorm(d_model, norm_eps, device, dtype) for _ in range(2)
        )
        self.attn = MultiHeadSelfAttention(
            d_model,
            num_heads,
            rope,
            device,
            dtype,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            norm_eps=norm_eps,
        )
        self.ffn: nn.Module
        if moe is not None:
            self.ffn = MoE(moe, d_model, d_ff, feed_forward, device, dtype)
        elif feed_forward == "swiglu":
            self.ffn = SwiGLU(d_model, d_ff, device, dtype)
        else:
            self.ffn = FeedForward(d_model, d_ff, feed_forward, device, dtype)

    def forward(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        attention_function: AttentionFunction = causal_attention,
        returns_routing: bool = False,
        padding: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """(B, T, D) → (B, T, D); with ``returns_routing``, for a mixture of experts, also its :class:`Routing`.

        ``padding`` (B, T) bool: tokens that it leaves out.
        """
        normed = x if self.is_post_norm else self.ln1(x)
        x = x + self.attn(normed, token_positions, attention_function)
        if self.is_post_norm:
            x = self.ln1(x)
        routing: Routing | None = None
        out = x if self.is_post_norm else self.ln2(x)
        if returns_routing:
            out, routing = self.ffn(out, returns_routing=True, padding=padding)
        else:
            out = self.ffn(out)
        x = self.ln2(x + out) if self.is_post_norm else x + out
        return x if routing is None else (x, routing)


class HeadCall(nn.Module):
    """Calls a function that uses the weight of a sibling module.

    It has no parameters. As a module it has hooks, so that :class:`lm.distributed.FSDP` can gather the weight.
    """

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.weights_of = (owner,)

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        """Return ``function()``."""
        return function()


class TransformerLM(nn.Module):
    """Map token ids to next-token logits.

    Set ``activation_checkpointing`` to True to save memory in training: blocks then store no activations, and the
    backward pass runs each block again, for about a third more work. Set ``scalar_head`` to make a reward model, or a
    policy with a value head, of it. Set ``attention_function`` to compute causal attention in another form of
    :mod:`lm.model.ops.attention_form`. Set ``head_function`` and ``loss_function`` to compute logits and loss from a
    head whose weight is divided among ranks. Set ``routings`` to an empty list to balance a mixture of experts: each
    forward pass with gradients then adds the :class:`lm.model.moe.Routing` of each such block, in order, without the
    tokens where ``padding`` (B, T) bool is true.
    """

    def __init__(self, config: ModelConfig, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set; set it to the size of the tokenizer.")
        self.config = config
        self.activation_checkpointing = False
        self.attention_function: AttentionFunction = causal_attention
        self.head_function: HeadFunction = linear
        self.loss_function: LossFunction = linear_cross_entropy
        self.routings: list[Routing] | None = None
        self.padding: Tensor | None = None
        self.rope = (
            RotaryEmbedding(config.rope_theta, config.head_width, config.context_length, device, config.rope_scaling)
            if config.position_encoding == "rope"
            else None
        )
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, device, dtype)
        self.layers = nn.ModuleList(
            TransformerBlock(
                config.d_model,
                config.num_heads,
                config.d_ff,
                self.rope,
                config.norm_eps,
                device,
                dtype,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                qk_norm=config.qk_norm,
                qkv_bias=config.qkv_bias,
                norm_placement=config.norm_placement,
                feed_forward=config.feed_forward,
                moe=config.moe if config.is_moe_layer(layer) else None,
            )
            for layer in range(config.num_layers)
        )
        has_final_norm = config.norm_placement == "pre"  # a post-norm block ends with a norm already
        self.ln_final = RMSNorm(config.d_model, config.norm_eps, device, dtype) if has_final_norm else nn.Identity()
        if config.tied_embeddings:
            truncated_normal_(self.token_embeddings.weight, config.d_model**-0.5)  # gives logits of order 1
        self.lm_head = (
            None if config.tied_embeddings else Linear(config.d_model, config.vocab_size, device, dtype, role="head")
        )
        self._head_call = HeadCall("token_embeddings" if self.lm_head is None else "lm_head")
        self.scalar_head: ScalarHead | None = None
        if config.zero_init_residual:
            for name, weight in self.layers.named_parameters():
                if name.endswith((".output_proj.weight", ".w2.weight", ".experts.w2")):
                    nn.init.zeros_(weight)

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
        """Run all blocks: token ids (B, T) → hidden states (B, T, d_model), the input of the head.

        ``token_positions`` (T,) or (B, T) are 0 … T-1 by default. ``attention_functions``, one per layer, replace the
        causal attention: generation uses its KV cache, and rows of several examples keep them apart. Raises UserError
        if the sequence is longer than the context.
        """
        if token_ids.shape[-1] > self.config.context_length:
            raise UserError(
                f"A sequence of {token_ids.shape[-1]} tokens does not fit the model's context of "
                f"{self.config.context_length}."
            )
        return self.run_layers(self.token_embeddings(token_ids), token_positions, attention_functions)

    def run_layers(
        self,
        x: Tensor,
        token_positions: Tensor | None = None,
        attention_functions: Sequence[AttentionFunction] | None = None,
    ) -> Tensor:
        """Run the blocks and the final norm on embeddings (B, T, D): :meth:`hidden_states` after the look-up."""
        attention_functions = attention_functions or [self.attention_function] * len(self.layers)
        has_grad = torch.is_grad_enabled()
        for layer, attention in zip(self.layers, attention_functions, strict=True):
            is_recorded = self.routings is not None and has_grad and isinstance(layer.ffn, MoE)
            if self.activation_checkpointing and has_grad:
                out = checkpoint(layer, x, token_positions, attention, is_recorded, self.padding, use_reentrant=False)
            else:
                out = layer(x, token_positions, attention, is_recorded, self.padding)
            if self.routings is not None and is_recorded:
                x, routing = out
                self.routings.append(routing)
            else:
                x = out
        return self.ln_final(x)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Apply the head to the output of :meth:`hidden_states`: (..., D) → (..., V)."""
        if self.lm_head is None:
            logits: Tensor = self._head_call(lambda: self.head_function(hidden_states, self.head_weight))
        else:
            logits = self.lm_head(hidden_states)
        return self.cap_logits(logits)

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Apply the soft-cap to the products of hidden states with the head."""
        cap = self.config.logit_softcap
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
        inputs, cap = hidden_states.flatten(0, -2), self.config.logit_softcap
        loss: Tensor = self._head_call(lambda: self.loss_function(inputs, self.head_weight, targets.flatten(), cap))
        return loss
