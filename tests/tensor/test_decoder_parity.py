# SPDX-License-Identifier: Apache-2.0
"""The decoder under TP and SP equals one process: loss, every gradient, the parameters after three steps."""

import pytest

from tests.harness import run_ranks
from tests.models import decoder, tokens
from tests.tensor.parity import compare, train, train_parallel

PLAIN: dict[str, object] = {}
LAYOUTS = [(2, False), (2, True), (4, True), (4, False)]


def model_for(changes, optimizer):
    """In float64 for AdamW, whose first steps follow the sign of a gradient, however small."""
    model = decoder(**changes)
    return model.double() if optimizer == "adamw" else model


def parity(changes, tp_size, *, world=None, length=16, vocab=64, tolerance=1e-5, **options):
    batch = tokens(length=length, vocab=vocab)
    optimizer = options.get("optimizer", "sgd")
    reference = train(model_for(changes, optimizer), batch, optimizer=optimizer)

    def body():
        compare(
            train_parallel(model_for(changes, optimizer), batch, tp_size, **options), reference, tolerance
        )

    run_ranks(world or tp_size, body)


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_decoder(tp_size, sequence_parallel, optimizer):
    parity(PLAIN, tp_size, sequence_parallel=sequence_parallel, optimizer=optimizer)


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS[:3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_tied(tp_size, sequence_parallel, optimizer):
    parity({"tied": True, "n_layers": 2}, tp_size, sequence_parallel=sequence_parallel, optimizer=optimizer)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{"n_layers": 2}, {"n_layers": 2, "tied": True, "bias": True, "qk_norm": True}],
    ids=["plain", "tied"],
)
def test_with_fsdp(changes, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel, "optimizer": "adamw"}
    parity(changes, 2, world=4, fsdp=True, **options)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_that_tp_does_not_divide(tp_size, tied):
    parity({"vocab_size": 61, "tied": tied, "n_layers": 2}, tp_size, vocab=61, sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_ranks(kv_heads, sequence_parallel):
    tp_size = 2 * kv_heads
    changes = {"n_kv_heads": kv_heads, "n_layers": 2, "bias": True, "qk_norm": True}
    parity(changes, tp_size, sequence_parallel=sequence_parallel, optimizer="adamw")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_of_heads_and_biases(sequence_parallel):
    changes = {"bias": True, "qk_norm": True, "n_layers": 2}
    parity(changes, 2, sequence_parallel=sequence_parallel, optimizer="adamw")


@pytest.mark.parametrize(("length", "tp_size"), [(15, 2), (13, 4), (1, 2), (5, 4)])
def test_sequence_that_tp_does_not_divide(length, tp_size):
    changes = {"bias": True, "n_layers": 2}
    parity(changes, tp_size, length=length, sequence_parallel=True, optimizer="adamw")
