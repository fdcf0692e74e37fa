# SPDX-License-Identifier: Apache-2.0
"""The constants of the time model: few, each with a physical meaning.

Those marked "calibrated" were fitted by `python -m lightning_3d.estimator.validate.fit` on the calibration half of the
published runs, inside bounds that keep them physical, and rounded where the loss is flat. The form of the model was
chosen with all of those runs in view: their other half tests the constants, and only unseen tables test both.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Achieved over ideal rates, and fixed costs."""

    matmul: float = 0.90
    """Achieved over best measured matrix product, for large products in a running model (calibrated)."""
    matmul_fp8: float = 1.0
    """The same for 8-bit and 4-bit products, with their scaling and casts (calibrated)."""
    flash_attention: float = 0.43
    """Flash attention over the best matrix product on GPUs before Hopper (calibrated; FlashAttention-2 prints 0.5 to
    0.7 of an A100's peak)."""
    flash_attention_hopper: float = 0.32
    """The same from Hopper on, whose asynchronous units few kernels feed (calibrated; FlashAttention-3,
    arXiv:2407.08608, measures 0.35 for version 2 and 0.75 for its own)."""
    elementwise_passes: float = 2.6
    """How often a forward reads or writes each kept activation: norms, residuals, biases (calibrated)."""
    score_passes: float = 4.0
    """The same for scores of unfused attention: product, mask and softmax, dropout, product (calibrated)."""
    eager_passes: float = 3.8
    """The same without fused kernels: plain PyTorch, no compile (calibrated)."""
    memory: float = 0.85
    """Achieved over nominal bandwidth of device memory for long streams."""
    launch_floor_s: float = 1.1e-3
    """Least time of a dense block's forward, when the host cannot launch kernels faster; twice that in the backward
    (calibrated: small models on one node, vTrain)."""
    moe_launch_floor_s: float = 1.8e-3
    """The same for a block of experts, with its routing, sorting and synchronisation (calibrated)."""
    grouped_matmul: float = 0.57
    """Rate of the experts' grouped products over that of one large product: many small ones in a launch, ragged rows,
    the busiest rank (calibrated; Liger-Kernel measures 413 TFLOP/s forward and backward on an H100 for the experts of
    Qwen3-30B-A3B, 0.58 of a large product, in linkedin/Liger-Kernel#1294)."""
    expert_overlap: float = 0.3
    """Share of a block's compute under which the experts' exchanges of another microbatch hide, where the software
    overlaps them: they take multiprocessors from the products and wait for the router (calibrated; 0.2 to 0.5 fit
    alike)."""
    collective_latency_s: float = 50e-6
    """Start of a collective in an island: fits of measured tables give 31 us (8 H100) to 76 us (8 A100)
    (calibrated)."""
    many_cards: float = 0.8
    """Share of the network cards' joint rate that a collective over several of them reaches (calibrated; tensor
    parallelism over two nodes alone, in Nanotron's and vTrain's rows, would say 0.67)."""
    ring_step_latency_s: float = 10e-6
    """Further latency for each rank of a ring that crosses nodes: gathers and scatters take n - 1 steps
    (calibrated)."""
    data_overlap: float = 0.86
    """Share of a pass's compute under which gathers and reductions of data parallelism hide (calibrated;
    0.8 to 1.0 is usual)."""
    pipeline_exposed: float = 0.05
    """Share of pipeline transfers that computing does not hide (calibrated)."""
    context_overlap: float = 0.9
    """Share of attention's time under which the ring of keys and values hides."""
    optimizer_bytes: float = 30
    """Bytes that Adam moves for each parameter it updates: p, m, v, g read, p, m, v written, a 16-bit copy written."""
    straggler_per_doubling: float = 0.001
    """Slowdown for each doubling of nodes: jitter of the slowest rank (calibrated)."""
    step_overhead_s: float = 0.02
    """Data loading, logging and the optimizer's launches of one step."""


DEFAULT_EFFICIENCY = Efficiency()
