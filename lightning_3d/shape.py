# SPDX-License-Identifier: Apache-2.0
"""The dimensions of a model, as data: what plans, estimates and checks need to know of it."""

from dataclasses import dataclass

from lightning_3d.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Dimensions of the mixture-of-experts layers of a model."""

    num_experts: int
    """Routed experts of a layer, E."""
    experts_per_token: int
    """Experts that each token visits, K."""
    intermediate_size: int
    """Width of one routed expert."""
    shared_intermediate_size: int = 0
    """Width of the expert that every token visits; 0 if there is none. Several are added up."""
    num_dense_layers: int = 0
    """Blocks that keep a dense feed-forward layer (DeepSeek's first ones, or those between MoE blocks)."""
    router_bias: bool = False
    """Whether the router adds a bias to each expert's logit, as a parameter."""
    expert_bias: bool = False
    """Whether the experts' matrices have biases (gpt-oss)."""
    shared_gate: bool = False
    """Whether the shared expert's output is scaled by a learned gate of `hidden_size` weights (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"experts_per_token={self.experts_per_token} must be from 1 to num_experts={self.num_experts}."
                " Correct the model's config."
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionShape:
    """Dimensions of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    kv_lora_rank: int
    """Width of the latent vector that keys and values are made of; what the cache holds of a token."""
    qk_nope_head_dim: int
    """Part of a query/key head without rotary positions."""
    qk_rope_head_dim: int
    """Part of a query/key head with rotary positions; its key part is shared by all heads."""
    v_head_dim: int
    """Width of a value head."""
    q_lora_rank: int = 0
    """Width of the latent vector of the queries; 0 if they are projected at once."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a decoder or encoder made of equal blocks.

    Raises:
        ModelError: a dimension is negative, or heads do not divide.
    """

    num_layers: int
    """Blocks: the length of the model's longest `ModuleList`."""
    hidden_size: int
    """Width D of the hidden state."""
    num_attention_heads: int
    """Query heads of a block; 0 in a model without attention."""
    num_key_value_heads: int
    """Key/value heads of a block; equal to `num_attention_heads` without grouped-query attention."""
    intermediate_size: int
    """Width of the feed-forward layer (of the dense blocks, if there are experts)."""
    vocab_size: int
    """Rows of the embedding."""
    tied_embeddings: bool = False
    """Whether the head shares the embedding's weight."""
    head_dim: int = 0
    """Width of one head; 0 stands for `hidden_size / num_attention_heads`."""
    max_seq_len: int | None = None
    """Longest sequence that the model was made for, if it has such a limit."""
    gated_mlp: bool = True
    """Whether the feed-forward has three matrices (SwiGLU, GeGLU) or two (GELU, ReLU)."""
    rms_norm: bool = True
    """RMSNorm (a weight) or LayerNorm (a weight and a bias)."""
    norms_per_layer: int = 2
    """Norms over the hidden state in a block: 2 as a rule, 4 in Gemma 2, 1 in parallel blocks."""
    qk_norm_size: int = 0
    """Weights of the norms over queries and keys of a block, both counted (Qwen3: `2 * head_dim`)."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases (Qwen2, GPT)."""
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the dense feed-forward layers have biases."""
    attention_sinks: bool = False
    """Whether each query head has a learned sink logit (gpt-oss)."""
    learned_positions: int = 0
    """Rows of a learned position table; 0 with rotary or ALiBi positions."""
    embedding_norm: bool = False
    """Whether a norm follows the embedding (BLOOM)."""
    sliding_window: int = 0
    """Tokens that a block with windowed attention sees back; 0 without windows."""
    num_sliding_layers: int = 0
    """Blocks with windowed attention."""
    num_mtp_layers: int = 0
    """Blocks that predict further tokens, trained beside the others (DeepSeek-V3)."""
    experts: ExpertShape | None = None
    """Mixture of experts, if there is one."""
    latent_attention: LatentAttentionShape | None = None
    """Multi-head latent attention, if there is one."""
    block_parameters: int = 0
    """Parameters of one block, if they were counted on a real module; 0 derives them from the dimensions."""
    other_parameters: int = 0
    """Parameters outside blocks, embeddings and head (a vision tower, an adapter)."""
    name: str = ""
    """What people call the model."""

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"):
            if getattr(self, field) < 0:
                raise ModelError(
                    f"{field}={getattr(self, field)} is negative. Correct the model's dimensions."
                )
        if self.head_dim == 0 and self.num_attention_heads:
            if self.hidden_size % self.num_attention_heads:
                raise ModelError(
                    f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}."
                    " Give head_dim."
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def query_width(self) -> int:
        """Columns of the query projection: heads x head width."""
        if self.latent_attention is not None:
            head = self.latent_attention.qk_nope_head_dim + self.latent_attention.qk_rope_head_dim
            return self.num_attention_heads * head
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Columns of the keys that the attention kernel reads."""
        if self.latent_attention is not None:
            return self.query_width
        return self.num_key_value_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Columns of the values that the attention kernel reads."""
        if self.latent_attention is not None:
            return self.num_attention_heads * self.latent_attention.v_head_dim
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_output_width(self) -> int:
        """Rows of the attention's output projection."""
        if self.latent_attention is not None:
            return self.num_attention_heads * self.latent_attention.v_head_dim
        return self.num_attention_heads * self.head_dim

    @property
    def num_moe_layers(self) -> int:
        """Blocks whose feed-forward is a mixture of experts."""
        return self.num_layers - self.experts.num_dense_layers if self.experts is not None else 0
