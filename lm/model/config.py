"""Configuration of the model. This module does not import torch, so that the command line starts fast."""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lm.common.config import Config, bounded_field
from lm.common.errors import UserError

# Newer than the first outputs, which have keys without them. The value is the default. A field of a section comes after
# the section.
_NEWER_FIELDS: dict[str, Any] = {
    "head_dim": None,
    "moe": None,
    "qkv_bias": False,
    "rope_scaling": None,
    "rope_scaling.beta_fast": 32.0,
    "rope_scaling.beta_slow": 1.0,
    "rope_scaling.attention_factor": None,
    "rope_scaling.divisors": (),
    "rotary_fraction": 1.0,
    "global_interval": None,
    "global_rope": True,
    "multipliers": None,
    "qk_norm_per_head": True,
    "moe.shared_gate": False,
    "sliding_window": None,
    "local_rope_theta": None,
    "attention_softcap": 0.0,
    "zero_centered_norm": False,
    "value_residual": False,
}


@dataclass(frozen=True)
class MoEConfig(Config, section="model.moe"):
    """A mixture of experts in place of the feed-forward network. The ways to balance the load may be combined.

    Sources: Shazeer et al. 2017; Fedus et al. 2021 (Switch); Dai et al. 2024 (DeepSeekMoE: fine-grained and shared
    experts); DeepSeek-AI 2024 (DeepSeek-V3: sigmoid affinities, balance by a bias).
    """

    num_experts: int = bounded_field(8, ge=2, le=4096)
    """Routed experts in each block, each a feed-forward network of its own."""
    top_k: int = bounded_field(2, ge=1)
    """Experts that compute each token. At most num_experts."""
    d_expert: int | None = bounded_field(None, ge=1)
    """Inner width of an expert. Default: d_ff / (top_k + num_shared_experts), so that a token costs the FLOPs of the
    dense network."""
    num_shared_experts: int = bounded_field(0, ge=0, le=4096)
    """Experts that compute every token beside the routed ones."""
    shared_gate: bool = False
    """Multiply the output of the shared experts by a learned gate for each token, a sigmoid, as Qwen2-MoE does."""
    affinity: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert for a token, from the router's logits. The scores of the chosen experts are their gates."""
    normalized_gates: bool = True
    """Divide the gates of a token by their sum."""
    aux_loss_weight: float = bounded_field(0.01, ge=0, lt=math.inf)
    """Weight of the auxiliary loss of Switch, which balances the load of the experts. 0 turns it off."""
    z_loss_weight: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Weight of the mean squared log-sum-exp of the router's logits (Zoph et al. 2022). Keeps the logits small."""
    bias_update_rate: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Loss-free balance: after each step, a bias that only decides which experts are chosen rises by this much for
    experts below the mean load, and falls for those above. 0.001 is usual in long trainings, 0.003 in short ones, with
    aux_loss_weight 0. 0: no bias."""
    capacity_factor: float | None = bounded_field(None, gt=0, lt=math.inf)
    """In pretraining, an expert takes at most this multiple of its fair share of a micro-batch of a process, the first
    tokens first; the others skip it. Default: no choice is dropped."""
    num_dense_layers: int = bounded_field(0, ge=0)
    """First blocks that keep the dense network of width d_ff. Less than num_layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_experts:
            raise UserError(f"model.moe.top_k {self.top_k} must be at most num_experts {self.num_experts}.")
        if self.shared_gate and not self.num_shared_experts:
            raise UserError("model.moe.shared_gate is a gate of shared experts; set num_shared_experts to at least 1.")
        if self.top_k == 1 and self.normalized_gates:
            raise UserError(
                "model.moe.top_k is 1, and a single gate divided by itself is always 1: the router would not learn. "
                "Set normalized_gates to false."
            )

    def expert_width(self, d_ff: int) -> int:
        """Return ``d_expert`` with its default filled in."""
        return self.d_expert or d_ff // (self.top_k + self.num_shared_experts)


@dataclass(frozen=True)
class RopeScaling(Config, section="model.rope_scaling"):
    """Slower rotary frequencies, for a context longer than that of the first training.

    Sources: Chen et al. 2023 (linear: position interpolation); Meta's Llama 3.1 (llama3); Peng et al. 2023 (YaRN); Ding
    et al. 2024 (LongRoPE).
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"] = "llama3"
    """linear: divide all frequencies by factor. llama3 and yarn: divide low ones, keep high ones, and blend those
    between, by their turns (llama3) or their index (yarn). longrope: divide each by a number of its own. yarn and
    longrope also multiply the rotated queries and keys by attention_factor."""
    factor: float = bounded_field(8.0, ge=1, lt=math.inf)
    """How much longer the context became."""
    low_freq_factor: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Of llama3: a frequency with fewer turns than this in original_context_length is divided by factor."""
    high_freq_factor: float = bounded_field(4.0, gt=0, lt=math.inf)
    """Of llama3: a frequency with more turns than this in original_context_length is kept. Above low_freq_factor."""
    original_context_length: int = bounded_field(8192, ge=1)
    """Of llama3 and yarn: context length of the first training, in tokens."""
    beta_fast: float = bounded_field(32.0, gt=0, lt=math.inf)
    """Of yarn: a frequency with more turns than this in original_context_length is kept. Above beta_slow."""
    beta_slow: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Of yarn: a frequency with fewer turns than this in original_context_length is divided by factor."""
    attention_factor: float | None = bounded_field(None, gt=0, lt=math.inf)
    """Of yarn and longrope: factor of the rotated queries and keys. Default: of yarn 0.1 · ln(factor) + 1, of longrope
    1."""
    divisors: list[float] = field(default_factory=list)
    """Of longrope: the number by which each frequency is divided, the highest frequency first; one for each rotated
    pair of a head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divisors", tuple(self.divisors))  # hashable, as the config of a model must be
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, high) <= getattr(self, low):
                raise UserError(
                    f"model.rope_scaling.{high} {getattr(self, high)} must be above {low} {getattr(self, low)}."
                )
        if any(not 0 < divisor < math.inf for divisor in self.divisors):
            raise UserError("model.rope_scaling.divisors must be numbers above 0.")
        if bool(self.divisors) != (self.kind == "longrope"):
            raise UserError("model.rope_scaling.divisors are for the kind longrope, which needs them.")


@dataclass(frozen=True)
class Multipliers(Config, section="model.multipliers"):
    """Constant factors of a model's parts, as Granite and Gemma have them. With all at their defaults: a Llama.

    Source: Yang et al. 2022 (maximal update parametrization).
    """

    embedding: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Factor of the embeddings."""
    attention: float | None = bounded_field(None, gt=0, lt=math.inf)
    """Factor of the products of queries and keys. Default: 1 / sqrt(head width)."""
    residual: float = bounded_field(1.0, gt=0, lt=math.inf)
    """Factor of the sum that each sublayer adds to the residual stream."""
    logits_divisor: float = bounded_field(1.0, gt=0, lt=math.inf)
    """The logits are divided by this."""


@dataclass(frozen=True)
class ModelConfig(Config, section="model"):
    """Architecture of the Transformer. The defaults are the TinyStories model of CS336 assignment 1."""

    vocab_size: int | None = bounded_field(None, ge=1)
    """Number of token ids: rows of the embedding and of the head. Default: the size of the tokenizer."""
    context_length: int = bounded_field(256, ge=1, le=1 << 24)
    """Maximum sequence length, in tokens."""
    d_model: int = bounded_field(512, ge=2)
    """Width of the residual stream. Must be a multiple of num_heads unless head_dim is set."""
    num_layers: int = bounded_field(4, ge=1)
    """Number of Transformer blocks."""
    num_heads: int = bounded_field(16, ge=1)
    """Query heads in each block."""
    num_kv_heads: int | None = bounded_field(None, ge=1)
    """Key and value heads in each block. Must divide num_heads; fewer heads need less KV cache. Default: num_heads."""
    head_dim: int | None = bounded_field(None, ge=2)
    """Width of a head; with rope it must be even. Default: d_model / num_heads."""
    d_ff: int = bounded_field(1344, ge=1)
    """Inner width of the feed-forward network. Usually 8/3 · d_model for swiglu; multiples of 64 run fastest."""
    feed_forward: Literal["swiglu", "geglu", "silu", "relu2"] = "swiglu"
    """swiglu and geglu (GELU in its tanh form, as Gemma has it) have three matrices. silu and relu2 (squared ReLU) have
    two, usually with d_ff = 4 · d_model. Experts cannot be geglu."""
    norm_placement: Literal["pre", "post", "none", "output", "sandwich"] = "pre"
    """pre: RMSNorm before each sublayer and before the head. post: after each residual addition. none: no norms.
    output: of what a sublayer adds, as in OLMo 2, and before the head. sandwich: pre and output, as in Gemma 2."""
    qk_norm: bool = False
    """Apply RMSNorm to the queries and keys of each head. Keeps attention scores from growing during training."""
    qkv_bias: bool = False
    """Add a learned bias to queries, keys and values, as Qwen2 does. It starts at zero."""
    position_encoding: Literal["rope", "none"] = "rope"
    """rope: rotary position embeddings. none: only the causal mask tells the model the order of tokens."""
    rope_theta: float = bounded_field(10000.0, gt=0, lt=math.inf)
    """Base of the rotary frequencies. Longer contexts need a larger base."""
    norm_eps: float = bounded_field(1e-5, ge=0, lt=math.inf)
    """RMSNorm adds this to the mean square, so that a zero vector does not divide by zero."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the head too. It is then initialized with a smaller standard deviation."""
    zero_init_residual: bool = False
    """Initialize the last matrix of each sublayer to zero, so that every block starts as the identity."""
    logit_softcap: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Limit logits to ± this value: ``cap · tanh(logits / cap)``. 0 turns the limit off."""
    moe: MoEConfig | None = None
    """Mixture of experts in place of the feed-forward network. Default: every block is dense."""
    rope_scaling: RopeScaling | None = None
    """Slower rotary frequencies for a longer context, as in Llama 3.1. Off by default."""
    rotary_fraction: float = bounded_field(1.0, gt=0, le=1)
    """Part of the width of a head that is rotated: its first dimensions. The others have no positions."""
    global_interval: int | None = bounded_field(None, ge=2)
    """Every block whose number is a multiple of this is global, the others are local. Default: all are the same. What
    differs: sliding_window, local_rope_theta, global_rope."""
    global_rope: bool = True
    """false: global blocks have no rotary positions, as in SmolLM3 (Yang et al. 2025: RNoPE)."""
    sliding_window: int | None = bounded_field(None, ge=1)
    """Number of tokens that a token of a local block attends to, itself included; without global_interval, of each
    block. Default: all tokens before it. Source: Beltagy et al. 2020."""
    local_rope_theta: float | None = bounded_field(None, gt=0, lt=math.inf)
    """Base of the rotary frequencies of local blocks, which rope_scaling then leaves as they are. Default: local blocks
    have the frequencies of the others."""
    qk_norm_per_head: bool = True
    """false: qk_norm normalizes the queries of all heads together, and the keys, as OLMo 2 does."""
    zero_centered_norm: bool = False
    """Each RMSNorm multiplies by 1 + weight, and weights start at 0, as in Gemma."""
    attention_softcap: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Limit attention scores to ± this value, as logit_softcap limits logits. 0 turns the limit off. Slower: no fused
    attention has it."""
    multipliers: Multipliers | None = None
    """Constant factors of the model's parts, as in Granite. Default: none."""
    value_residual: bool = False
    """Use, in each block but the first, a learned sum of its own values and those of the first block in attention."""

    def __post_init__(self) -> None:
        if isinstance(self.moe, dict):  # from JSON, e.g. of a checkpoint
            object.__setattr__(self, "moe", MoEConfig(**self.moe))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        if isinstance(self.multipliers, dict):
            object.__setattr__(self, "multipliers", Multipliers(**self.multipliers))
        super().__post_init__()
        is_rotary = self.position_encoding == "rope"
        if self.rope_scaling and not is_rotary:
            raise UserError(
                "model.rope_scaling scales rotary positions; leave it out with model.position_encoding none."
            )
        kind = "an even whole number, because rope rotates pairs" if is_rotary else "a whole number"
        if self.head_dim and is_rotary and self.head_dim % 2:
            raise UserError(f"The head width, model.head_dim {self.head_dim}, must be {kind}.")
        if not self.head_dim and self.d_model % ((2 if is_rotary else 1) * self.num_heads):
            raise UserError(
                f"The head width, model.d_model {self.d_model} / model.num_heads {self.num_heads}, must be {kind}."
            )
        self._check_rotary(is_rotary)
        if self.num_heads % self.kv_heads:
            raise UserError(f"model.num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}.")
        if self.moe and self.moe.num_dense_layers >= self.num_layers:
            raise UserError(
                f"model.moe.num_dense_layers {self.moe.num_dense_layers} must be below model.num_layers "
                f"{self.num_layers}; leave out model.moe for a dense model."
            )
        if self.moe and self.feed_forward == "geglu":
            raise UserError(
                "model.feed_forward geglu is not supported in experts; choose swiglu, or leave out model.moe."
            )
        if not (self.qk_norm or self.qk_norm_per_head):
            raise UserError("model.qk_norm_per_head false is a form of model.qk_norm, which is off; set it to true.")
        if self.moe and not self.moe.expert_width(self.d_ff):
            raise UserError(f"model.d_ff {self.d_ff} is too small to divide among experts; set model.moe.d_expert.")

    def _check_rotary(self, is_rotary: bool) -> None:
        """Raise UserError for options of rotary positions that do not fit together."""
        others = {"rotary_fraction": 1, "global_rope": True, "local_rope_theta": None}
        for name in [name for name, default in others.items() if not is_rotary and getattr(self, name) != default]:
            raise UserError(f"model.{name} is about rotary positions; leave it out with model.position_encoding none.")
        if is_rotary and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise UserError(
                f"model.rotary_fraction {self.rotary_fraction} of the head width {self.resolved_head_dim} are "
                f"{self.rotary_dim} dimensions; they must be an even number of at least 2, because rope rotates pairs."
            )
        if self.rope_scaling and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise UserError(f"model.rope_theta {self.rope_theta} must be above 1 for model.rope_scaling.kind yarn.")
        if self.rope_scaling and self.rope_scaling.divisors and len(self.rope_scaling.divisors) != self.rotary_dim // 2:
            raise UserError(
                f"model.rope_scaling.divisors has {len(self.rope_scaling.divisors)} numbers; a head has "
                f"{self.rotary_dim // 2} rotated pairs, and each needs one."
            )
        if self.global_interval and self.global_interval > self.num_layers:
            raise UserError(
                f"model.global_interval {self.global_interval} must be at most model.num_layers {self.num_layers}."
            )
        if (self.local_rope_theta or not self.global_rope) and not self.global_interval:
            name = "local_rope_theta" if self.local_rope_theta else "global_rope"
            raise UserError(f"model.{name} needs model.global_interval, which says which blocks are global.")
        if self.global_interval and self.global_rope and not (self.local_rope_theta or self.sliding_window):
            raise UserError(
                "model.global_interval makes no difference alone; set model.sliding_window, local_rope_theta or "
                "global_rope too, or leave it out."
            )

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the output of a stage. A field that is newer than the first outputs is left out at its
        default, so that their keys stay."""
        identity = asdict(self)
        for name, default in _NEWER_FIELDS.items():
            section, _, field_name = name.rpartition(".")
            owner = identity.get(section) if section else identity
            if owner and owner[field_name] == default:
                del owner[field_name]
        return identity

    def unusual_options(self, known: Collection[str]) -> list[str]:
        """Return the names of the options outside ``known`` that differ from their defaults.

        The defaults describe a Llama. Code that supports ``known`` options alone so refuses those that are added later.
        """
        defaults = type(self)()
        names = [option.name for option in fields(self) if option.name not in known]
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]

    def is_global_layer(self, layer: int) -> bool:
        """Return whether the block of index ``layer`` is global."""
        return self.global_interval is not None and (layer + 1) % self.global_interval == 0

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token of the block of index ``layer`` attends to; None if it attends to all."""
        is_limited = self.sliding_window is not None and self.sliding_window < self.context_length
        return self.sliding_window if is_limited and not self.is_global_layer(layer) else None

    def has_rope(self, layer: int) -> bool:
        """Return whether the block of index ``layer`` has rotary positions."""
        return self.position_encoding == "rope" and (self.global_rope or not self.is_global_layer(layer))

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether the block of index ``layer`` has a mixture of experts."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    @property
    def feed_forward_matrices(self) -> int:
        """Number of matrices of a feed-forward network: swiglu and geglu have a gate."""
        return 3 if self.feed_forward in ("swiglu", "geglu") else 2

    @property
    def resolved_head_dim(self) -> int:
        """``head_dim`` with its default filled in."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return int(self.resolved_head_dim * self.rotary_fraction)

    @property
    def factors(self) -> Multipliers:
        """``multipliers`` with their defaults filled in."""
        return self.multipliers or Multipliers()

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: ``num_kv_heads`` with its default filled in."""
        return self.num_kv_heads or self.num_heads


@dataclass(frozen=True)
class AdapterConfig(Config, section="adapter"):
    """A low-rank adapter (LoRA): the model's own weights stay as they are, and two small matrices beside each linear
    layer are trained. Needs no gradients and no optimizer state of the model itself.

    Source: Hu et al. 2021.
    """

    rank: int = bounded_field(0, ge=0, le=1 << 16)
    """Inner width of the two matrices; 8 to 64 are usual. 0 turns adapters off: all weights are trained."""
    alpha: float = bounded_field(32.0, gt=0, lt=math.inf)
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = bounded_field(0.0, ge=0, lt=1)
    """Probability with which an input of an adapter is set to 0, in pretraining, sft and reward_model. Other methods
    compare probabilities, and train without."""
    targets: list[str] = field(default_factory=list)
    """Names of the linear layers with an adapter: q_proj, k_proj, v_proj and output_proj of attention, w1, w2 and w3 of
    the feed-forward network. Default: all of them. Routed experts have none."""
    dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Type of the model's own weights in training. bfloat16 needs half the memory. nf4 (QLoRA) stores linear layers in
    4 bits, and all else in float32. The adapter is float32."""

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained."""
        return self.rank > 0
