# SPDX-License-Identifier: Apache-2.0
"""Faults that users of other tensor-parallel trainers reported, tried on this one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ModelError
from lightning_3d.parallel.tensor import apply_tp, resolve_tp
from tests.harness import run_ranks
from tests.models import MLP, decoder, frequencies, tokens
from tests.tensor.parity import (
    blocks_of,
    full,
    make_optimizer,
    parallelize,
    token_loss,
    train,
    train_parallel,
)


def same_on_all_ranks(value):
    value = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value.contiguous())
    return all(torch.equal(everyone[0], other) for other in everyone)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicated_parameters_are_equal_on_all_ranks_whatever_the_seed(sequence_parallel):
    """Ranks seeded differently start equal, have equal gradients and stay equal."""

    def body():
        model = decoder(seed=1 + dist.get_rank(), n_layers=2, bias=True, qk_norm=True)
        model.register_buffer("noise", torch.full((3,), float(dist.get_rank())))
        tp, _ = parallelize(model, 2, sequence_parallel=sequence_parallel)
        replicated = [p for p in model.parameters() if all(x.is_replicate() for x in p.placements)]
        assert len(replicated) >= 9
        optimizer = make_optimizer("adamw", model)
        assert all(map(same_on_all_ranks, [*replicated, model.noise]))
        for index in range(20):
            token_loss(model, *tokens(batch=1, seed=index)).backward()
            tp.sum_partial_gradients()
            assert all(same_on_all_ranks(p.grad) for p in replicated)
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(same_on_all_ranks, replicated))

    run_ranks(2, body)


def test_loss_curve_with_chunks_of_the_sequence():
    def chunked(model, ids, labels):
        logits = model(ids)
        total = logits.new_zeros(())
        for part, target in zip(logits.chunk(4, dim=1), labels.chunk(4, dim=1), strict=True):
            total = total + F.cross_entropy(
                part.reshape(-1, part.size(-1)), target.flatten(), reduction="sum"
            )
        return total / labels.numel()

    batch, options = tokens(batch=2), {"step": chunked, "num_steps": 30}
    want = train(decoder(n_layers=2), batch, **options).losses

    def body():
        got = train_parallel(decoder(n_layers=2), batch, 2, sequence_parallel=True, **options).losses
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-4)

    run_ranks(2, body)
    assert want[-1] < want[0] / 2


def test_degrees_give_the_same_losses():
    batch, options = tokens(batch=2), {"num_steps": 10}
    losses = [train(decoder(), batch, **options).losses]
    for size in (2, 4):
        losses += run_ranks(
            size, lambda n=size: train_parallel(decoder(), batch, n, sequence_parallel=True, **options).losses
        )
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(losses[:1]).expand(len(losses), -1), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (4, {"n_heads": 6, "n_kv_heads": 2, "dim": 48}),
        (2, {"hidden_dim": 5}),
        (2, {"n_heads": 3, "n_kv_heads": 1, "dim": 48}),
    ],
)
def test_refusals_reach_every_rank_before_any_collective(size, changes):
    def body():
        model = decoder(**changes)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        with pytest.raises(ModelError) as error:
            apply_tp(model, blocks_of(model), mesh, sequence_parallel=True)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        return str(error.value)

    messages = run_ranks(size, body)
    assert len(set(messages)) == 1
    assert f"tp={size}" in messages[0]


def test_mlp_of_odd_width_is_refused_and_even_width_works():
    styles = {"layers.0": "column", "layers.1": "row"}

    def body(width):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model, x = MLP(width), torch.randn(3, 4, width)
        want = model(x)
        apply_tp(model, {"layers": model.layers}, mesh, styles, sequence_parallel=False)
        torch.testing.assert_close(model(x), want)

    run_ranks(2, body, 8)
    with pytest.raises(Exception, match=r"layers\.0 has 5 output features, which tp=2 does not divide"):
        run_ranks(2, body, 5)


@pytest.mark.parametrize(("vocab", "tp_size", "tied"), [(61, 2, True), (61, 4, False)])
def test_odd_vocabulary_is_gathered_bit_equal(vocab, tp_size, tied):
    def body():
        model = decoder(vocab_size=vocab, tied=tied, n_layers=2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        parallelize(model, tp_size, sequence_parallel=True)
        after = {name: full(value) for name, value in model.state_dict().items()}
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        logits = model(tokens(vocab=vocab)[0])
        assert logits.shape[-1] == vocab
        assert int(logits.argmax(-1).max()) < vocab
        with pytest.raises(IndexError, match="61 rows"):
            model(torch.tensor([[vocab]]))

    run_ranks(tp_size, body)


@pytest.mark.parametrize("fsdp", [False, True])
def test_tied_weights_stay_one_parameter(fsdp):
    def body():
        model = decoder(tied=True, n_layers=2)
        tp, _ = parallelize(model, 2, sequence_parallel=True, fsdp=fsdp)
        optimizer = make_optimizer("adamw", model)
        for _ in range(3):
            logits = model(tokens()[0])
            assert logits.shape == (4, 16, 64)
            F.cross_entropy(logits.flatten(0, 1), tokens()[1].flatten()).backward()
            tp.sum_partial_gradients()
            optimizer.step()
        assert model.output.weight is model.tok_embeddings.weight
        assert sum(p is model.output.weight for p in model.parameters()) == 1

    run_ranks(4 if fsdp else 2, body)


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("flag", ["fused", "foreach"])
def test_fused_and_foreach_optimizers(flag, fsdp):
    batch = tokens()

    def steps(model, tp=None):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **{flag: True})
        token_loss(model, *batch).backward()
        if tp is not None:
            tp.sum_partial_gradients()
        optimizer.step()
        return {name: full(p) for name, p in model.named_parameters()}

    want = steps(decoder(n_layers=2).double())

    def body():
        model = decoder(n_layers=2).double()
        tp, _ = parallelize(model, 2, sequence_parallel=True, fsdp=fsdp)
        torch.testing.assert_close(steps(model, tp), want, rtol=1e-8, atol=1e-8)

    run_ranks(4 if fsdp else 2, body)


def test_learning_needs_no_copy_of_the_logits():
    """Nothing in a training step asks for the full logits."""

    def body():
        model = decoder(n_layers=2)
        parallelize(model, 2, sequence_parallel=True)
        sizes = []
        gather = dist.all_gather_into_tensor

        def spy(output, *args, **kwargs):
            sizes.append(output.numel())
            return gather(output, *args, **kwargs)

        dist.all_gather_into_tensor = spy
        token_loss(model, *tokens()).backward()
        assert max(sizes) == 4 * 16 * 32  # hidden states; logits would be 4 * 16 * 64

    run_ranks(2, body)


def test_a_stage_of_a_pipeline_takes_the_styles_of_the_whole_model():
    def body():
        model, ids = decoder(n_layers=2), tokens()[0]
        blocks = blocks_of(model)
        resolved = resolve_tp(
            model, blocks, 2, {"output": "replicate", "layers.1.feed_forward.*": "replicate"}
        )
        model.output, model.layers[1] = torch.nn.Identity(), torch.nn.Identity()
        hidden = model.layers[0](model.tok_embeddings(ids), frequencies(16, 8, ids.device))
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tp = apply_tp(model, blocks_of(model), mesh, resolved, sequence_parallel=True)
        inside = tp.enter_blocks(model.tok_embeddings(ids))
        assert inside.shape == tp.local_hidden_shape(hidden.shape) == (4, 8, 32)
        inside = model.layers[0](inside, frequencies(16, 8, ids.device))
        torch.testing.assert_close(tp.exit_blocks(inside), hidden)

    run_ranks(2, body)
