# SPDX-License-Identifier: Apache-2.0
"""Blocks compiled after tensor parallelism give the same training, in one graph for each block."""

import pytest
import torch

from tests.harness import run_ranks
from tests.models import decoder, tokens
from tests.tensor.parity import compare, parallelize, train


@pytest.mark.slow
def test_compiled_blocks():
    batch, changes = tokens(), {"n_layers": 2, "bias": True, "qk_norm": True}
    reference = train(decoder(**changes), batch)

    def body():
        model = decoder(**changes)
        styles = {"*.q_norm": "replicate"}  # its gradient is seen to be partial, in compiled code too
        tp, _ = parallelize(model, 2, sequence_parallel=False, styles=styles)
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        compare(train(model, batch, tp=tp), reference)
        assert "layers.1.attention.q_norm.weight" in tp.partial_parameters

    torch._dynamo.reset()
    run_ranks(2, body, timeout_s=120)
