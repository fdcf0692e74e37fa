# SPDX-License-Identifier: Apache-2.0
"""Dropout: the same masks on all tp ranks for replicated activations, different ones for sharded activations."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import run_ranks
from tests.models import decoder, tokens
from tests.tensor.parity import blocks_of, parallelize, token_loss


class Recorder(nn.Module):
    """Dropout of ones in the shape of its input; it remembers the mask and passes its input on."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.masks = []

    def forward(self, x):
        self.masks.append(self.drop(torch.ones(64)) != 0)
        return x


def recorded_decoder():
    """Records masks (a) on the residual stream, (b) between head-sharded layers, (c) outside the blocks."""
    model = decoder(n_layers=2, dropout=0.1)
    for block in model.layers:
        block.dropout = Recorder()
        block.attention.q_norm = Recorder()
    model.norm = nn.Sequential(model.norm, Recorder())
    return model


def masks_of(model):
    return {
        name: torch.stack(module.masks)
        for name, module in model.named_modules()
        if isinstance(module, Recorder)
    }


def gathered(mask):
    """The masks of all ranks [world, ...]."""
    found = [torch.empty_like(mask) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mask)
    return torch.stack(found)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_of_ranks(sequence_parallel):
    def body():
        model = recorded_decoder()
        _, mesh = parallelize(model, 2, sequence_parallel=sequence_parallel)
        torch.manual_seed(100 + mesh["dp"].get_local_rank())
        ids, labels = tokens()
        for _ in range(2):
            token_loss(model, ids, labels).backward()
        for name, mask in masks_of(model).items():
            everyone = gathered(mask)  # ranks: (dp, tp)
            sharded = "q_norm" in name or (sequence_parallel and name.startswith("layers"))
            assert torch.equal(everyone[0], everyone[1]) != sharded, name
            assert torch.equal(everyone[2], everyone[3]) != sharded, name
            assert not torch.equal(everyone[0], everyone[2]), name
            assert not torch.equal(mask[0], mask[-1]), name
        after = gathered(torch.rand(4))
        assert torch.equal(after[0], after[1])
        assert not torch.equal(after[0], after[2])

    run_ranks(4, body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_draws_the_same_masks(sequence_parallel):
    def grads(model, ids, labels, recompute):
        torch.manual_seed(5)
        for block in model.layers if recompute else ():
            forward = type(block).forward
            block.__class__ = type("Recomputed", (type(block),), {"forward": recomputed(forward)})
        token_loss(model, ids, labels).backward()
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        model.zero_grad()
        return found, torch.rand(1)

    def recomputed(forward):
        return lambda self, *args: checkpoint(forward, self, *args, use_reentrant=False)

    def body():
        model = decoder(n_layers=2, dropout=0.3, attention_dropout=0.3)
        parallelize(model, 2, sequence_parallel=sequence_parallel)
        want, random_after = grads(model, *tokens(), recompute=False)
        got, random_then = grads(model, *tokens(), recompute=True)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(random_then, random_after)

    run_ranks(2, body)


def test_no_draw_without_dropout_and_none_in_evaluation():
    def body():
        for rate, training in ((0.0, True), (0.5, False)):
            model = decoder(n_layers=2, dropout=rate).train(training)
            parallelize(model, 2, sequence_parallel=True)
            before = torch.get_rng_state()
            token_loss(model, *tokens())
            assert torch.equal(before, torch.get_rng_state())

    run_ranks(2, body)


def test_blocks_leave_the_random_state_after_an_error():
    def body():
        model = decoder(n_layers=2, dropout=0.5)
        parallelize(model, 2, sequence_parallel=False)
        block = next(iter(blocks_of(model).values()))
        block.ffn_norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            token_loss(model, *tokens())
        state = gathered(torch.rand(4))
        assert torch.equal(state[0], state[1])

    run_ranks(2, body)


def test_layers_directly_in_a_block_enter_the_region_once():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_heads, self.dropout = 4, 0.5
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            q, k, v = (
                w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
            )
            masks.append(torch.rand(4))
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
            return x + self.wo(y.transpose(1, 2).flatten(2))

    masks = []

    def body():
        model = nn.Module()
        model.layers = nn.ModuleList(Flat() for _ in range(2))
        parallelize(model, 2, sequence_parallel=False)
        x = torch.randn(2, 8, 32)
        for layer in model.layers:
            x = layer(x)
        inside, outside = gathered(torch.stack(masks)), gathered(torch.rand(4))
        assert not torch.equal(inside[0], inside[1])
        assert torch.equal(outside[0], outside[1])

    run_ranks(2, body)
