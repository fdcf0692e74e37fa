# SPDX-License-Identifier: Apache-2.0
"""Time that one block, and the head, compute for a microbatch on one rank.

A matrix product of M x K by K x N takes its operations at the achievable rate plus its bytes at the memory's: the
additive roofline, of which the familiar losses of thin products `M/(M + c)`, `N/(N + c)` follow with
c = rate / bandwidth, about 130 on an A100 and 240 on an H100. Norms, residuals and activations take bytes only.
"""

from dataclasses import dataclass

from lightning_3d.estimator.activations import (
    BYTE,
    HALF,
    BlockActivations,
    dense_activations,
    moe_activations,
)
from lightning_3d.estimator.efficiency import Efficiency
from lightning_3d.estimator.flops import MULTIPLY_ADD, attended_tokens
from lightning_3d.estimator.layout import FP8_MATMULS, Layout, Workload
from lightning_3d.hardware import Gpu
from lightning_3d.models.parameters import mlp_matrices
from lightning_3d.shape import ModelShape

FP4_OVER_FP8 = {"GB200": 2.0, "B200": 2.0, "GB300": 3.0, "B300": 3.0}
"""Dense 4-bit over 8-bit rate (NVIDIA Blackwell and Blackwell Ultra datasheets)."""
HOPPER_MEMORY_BYTES_PER_S = 1.9e12
"""Server GPUs with 8-bit units have at least this bandwidth; Ada's do not, and compute attention like Ampere."""
CAST_BYTES = 4
"""Bytes that casting a product's input from 16 to 8 bits moves: read 2, write 1 by rows and 1 by columns."""
BACKWARD = 2
"""Matrix products of a backward over those of its forward."""
FLASH_BACKWARD = 2.5
"""Flash attention recomputes the scores: five products against two (Dao 2023, arXiv:2307.08691)."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one block for one microbatch, without communication."""

    forward: float
    backward: float
    recomputed: float
    """Part of the forward that runs again before the backward."""
    attention: float
    """Part of `forward` that is the attention itself, under which the ring of context parallelism hides."""
    slack: float
    """Part of `forward` and `backward` in which the device waits for the host's launches: collectives fit in it."""

    @property
    def total(self) -> float:
        """Forward, backward and recomputation."""
        return self.forward + self.backward + self.recomputed


class ComputeModel:
    """Times blocks of one model and workload on one GPU, for any layout."""

    def __init__(self, shape: ModelShape, workload: Workload, gpu: Gpu, efficiency: Efficiency) -> None:
        self.shape, self.workload, self.gpu, self._efficiency = shape, workload, gpu, efficiency
        self._memory_rate = gpu.memory_bytes_per_s * efficiency.memory
        self._rate = self._matmul_rate(workload.matmul)
        self._rate_16 = self._matmul_rate("bf16")
        hopper = gpu.peak_flops_fp8 > gpu.peak_flops and gpu.memory_bytes_per_s > HOPPER_MEMORY_BYTES_PER_S
        self._flash = efficiency.flash_attention_hopper if hopper else efficiency.flash_attention
        self._dense = dense_activations(shape, workload)
        self._moe: dict[int, BlockActivations] = {}

    def _matmul_rate(self, matmul: str) -> float:
        gpu, efficiency = self.gpu, self._efficiency
        if matmul == "fp32":
            return gpu.achievable_flops * efficiency.matmul / 2
        if matmul not in FP8_MATMULS or gpu.peak_flops_fp8 <= gpu.peak_flops:
            return gpu.achievable_flops * efficiency.matmul
        rate = gpu.achievable_flops_fp8 * efficiency.matmul_fp8
        return rate * FP4_OVER_FP8.get(gpu.name, 1.0) if matmul == "nvfp4" else rate

    def product_s(self, rows: float, inner: float, columns: float, rate: float) -> float:
        """Seconds of one matrix product; below 16 bits, its inputs are cast first."""
        num_bytes = HALF * (rows * inner + inner * columns + rows * columns)
        if rate > self._rate_16:
            num_bytes = (CAST_BYTES + BYTE) * rows * inner + BYTE * inner * columns + HALF * rows * columns
        return MULTIPLY_ADD * rows * inner * columns / rate + num_bytes / self._memory_rate

    def dense_block(self, layout: Layout) -> BlockTime:
        """A block with a dense feed-forward."""
        mlp = self._mlp_s(layout, self.shape.intermediate_size)
        return self._block(layout, self._dense, mlp, self._efficiency.launch_floor_s)

    def moe_block(self, layout: Layout) -> BlockTime:
        """A block with experts: the shared one, the routed ones, and what routing costs."""
        experts = self.shape.experts
        if experts is None:
            return self.dense_block(layout)
        if layout.expert_tp not in self._moe:
            self._moe[layout.expert_tp] = moe_activations(self.shape, self.workload, layout.expert_tp)
        shared = self._mlp_s(layout, experts.shared_intermediate_size)
        return self._block(
            layout,
            self._moe[layout.expert_tp],
            shared + self._experts_s(layout),
            self._efficiency.moe_launch_floor_s,
        )

    def head_s(self, layout: Layout) -> tuple[float, float]:
        """Forward and backward of the head and the loss."""
        if not self.shape.vocab_size:
            return 0.0, 0.0
        tokens, columns = self._tokens(layout), self.shape.vocab_size / layout.tp
        forward = self.product_s(tokens, self.shape.hidden_size, columns, self._rate_16)
        loss = 2 * self.workload.logits_bytes * tokens * columns / self._memory_rate
        return forward + loss, BACKWARD * forward + loss

    def _tokens(self, layout: Layout) -> float:
        return layout.microbatch_size * self.workload.seq_len / layout.cp

    def _mlp_s(self, layout: Layout, width: float) -> float:
        if not width:
            return 0.0
        tokens, hidden, split = self._tokens(layout), self.shape.hidden_size, width / layout.tp
        into = (mlp_matrices(self.shape) - 1) * split
        return self.product_s(tokens, hidden, into, self._rate) + self.product_s(
            tokens, split, hidden, self._rate
        )

    def _experts_s(self, layout: Layout) -> float:
        """Grouped products: the rank's experts, each with its share of the tokens of its group."""
        experts = self.shape.experts
        if experts is None:
            return 0.0
        tokens = self._tokens(layout) / layout.tp * layout.expert_tp
        local = experts.num_experts / layout.ep
        per_expert = tokens * experts.experts_per_token / local
        width = experts.intermediate_size / layout.expert_tp
        into = (mlp_matrices(self.shape) - 1) * width
        hidden = self.shape.hidden_size
        one = self.product_s(per_expert, hidden, into, self._rate) + self.product_s(
            per_expert, width, hidden, self._rate
        )
        return local * one / self._efficiency.grouped_matmul

    def _attention_s(self, layout: Layout) -> tuple[float, float]:
        """Forward and backward of scores and their sum over values, without projections."""
        shape, workload = self.shape, self.workload
        tokens = self._tokens(layout)
        causal = workload.causal and workload.attention == "flash"
        keys = attended_tokens(shape, workload.seq_len, causal=causal)
        widths = (shape.query_width + shape.attention_output_width) / layout.tp
        flops = MULTIPLY_ADD * tokens * keys * widths
        if workload.attention == "flash":
            forward = flops / (self._rate_16 * self._flash)
            return forward, FLASH_BACKWARD * forward
        scores = self._dense.scores / layout.tp * tokens
        traffic = self._efficiency.score_passes * scores / self._memory_rate
        forward = flops / self._rate_16 + traffic
        return forward, BACKWARD * forward

    def _block(self, layout: Layout, kept: BlockActivations, mlp: float, floor: float) -> BlockTime:
        shape, tokens, efficiency = self.shape, self._tokens(layout), self._efficiency
        tp = layout.tp
        inputs = (shape.query_width + shape.key_width + shape.value_width) / tp
        products = self._projections_s(layout, inputs, tokens) + mlp
        replicated_by = tp if layout.sequence_parallel else 1
        streams = (kept.replicated + kept.gathered) / replicated_by + (kept.split + kept.experts) / tp
        passes = efficiency.elementwise_passes if self.workload.fused else efficiency.eager_passes
        elementwise = passes * tokens * streams / self._memory_rate
        attention, attention_backward = self._attention_s(layout)
        forward = products + elementwise + attention
        backward = BACKWARD * (products + elementwise) + attention_backward
        slack = max(0.0, floor - forward) + max(0.0, BACKWARD * floor - backward)
        forward, backward = max(forward, floor), max(backward, BACKWARD * floor)
        recomputed = {"none": 0.0, "attention": attention, "selective": products / 2 + elementwise}
        again = recomputed.get(layout.recompute, forward * layout.recompute_fraction)
        return BlockTime(forward, backward, again, attention, slack)

    def _projections_s(self, layout: Layout, inputs: float, tokens: float) -> float:
        shape, hidden = self.shape, self.shape.hidden_size
        output = self.product_s(tokens, shape.attention_output_width / layout.tp, hidden, self._rate)
        latent = shape.latent_attention
        if latent is None:
            return self.product_s(tokens, hidden, inputs, self._rate) + output
        heads = shape.num_attention_heads / layout.tp
        down = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
        up = self.product_s(
            tokens, latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim), self._rate
        )
        query_rows = latent.q_lora_rank or hidden
        query = self.product_s(tokens, query_rows, shape.query_width / layout.tp, self._rate)
        return self.product_s(tokens, hidden, down, self._rate) + up + query + output
