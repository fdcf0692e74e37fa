# SPDX-License-Identifier: Apache-2.0
"""`VocabParallelLogits` behave as the full logits: values, gradients, and which operations keep the shard."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_3d.errors import StepError
from lightning_3d.parallel.tensor import VocabParallelLogits
from lightning_3d.parallel.tensor.vocab_shard import VocabShard
from tests.harness import RanksError, run_ranks

BATCH, LENGTH, VOCAB = 2, 6, 13


def values(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    full = (torch.randn(BATCH, LENGTH, VOCAB, generator=generator) * 3).to(dtype)
    target = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    target[0, 1] = target[1, 4] = -100
    return full, target


def shard_of(full):
    """A leaf with this rank's classes, and the logits made of it."""
    shard = VocabShard(dist.group.WORLD, full.shape[-1])
    start, stop = shard.bounds
    local = full[..., start:stop].clone().requires_grad_()
    return local, VocabParallelLogits.wrap(local, shard), slice(start, stop)


def agree(function, dtype=torch.float32, tolerance=1e-6):
    """A scalar function of (logits, target) has the same value and gradient on sharded as on full logits."""
    full, target = values(dtype)
    leaf = full.clone().requires_grad_()
    want = function(leaf, target)
    want.backward()
    local, logits, own = shard_of(full)
    got = function(logits, target)
    assert type(got) is torch.Tensor
    assert got.dtype == want.dtype
    got.backward()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(
        local.grad, leaf.grad[..., own], rtol=tolerance, atol=tolerance, equal_nan=True
    )


def ce(logits, target, **options):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)


WEIGHT = torch.linspace(0.5, 2, VOCAB)
LOSSES = {
    "mean": lambda x, y: ce(x, y),
    "sum": lambda x, y: ce(x, y, reduction="sum"),
    "none": lambda x, y: (ce(x, y, reduction="none") * torch.arange(12.0)).sum(),
    "old_arguments": lambda x, y: ce(x, y, size_average=False),
    "module": lambda x, y: torch.nn.CrossEntropyLoss()(x.view(-1, VOCAB), y.view(-1)),
    "keywords": lambda x, y: F.cross_entropy(input=x.reshape(-1, x.size(-1)), target=y.reshape(-1)),
    "ignore_index": lambda x, y: ce(x, y.clamp_min(0), ignore_index=3),
    "all_ignored": lambda x, y: ce(x, torch.full_like(y, -100)),
    "smoothing": lambda x, y: ce(x, y, label_smoothing=0.1),
    "smoothing_sum": lambda x, y: ce(x, y, label_smoothing=0.3, reduction="sum"),
    "weights": lambda x, y: ce(x, y, weight=WEIGHT, label_smoothing=0.1),
    "probabilities": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), torch.eye(VOCAB)[y.clamp_min(0).flatten()]
    ),
    "classes_second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "one_token": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "shifted": lambda x, y: ce(x[:, :-1].contiguous(), y[:, 1:]),
    "shifted_ellipsis": lambda x, y: ce(x[..., :-1, :].contiguous(), y[..., 1:]),
    "huggingface": lambda x, y: F.cross_entropy(
        x.float().view(-1, VOCAB), F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1)
    ),
    "masked": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "softcap": lambda x, y: ce(torch.tanh(x / 5.0) * 5.0, y),
    "softcap_method": lambda x, y: ce(7 * (x * (1 / 7)).tanh(), y),
    "constant_scale": lambda x, y: ce(x / torch.tensor(2.0), y),
    "chunks": lambda x, y: sum(
        ce(a, b, reduction="sum") for a, b in zip(x.chunk(3, 1), y.chunk(3, 1), strict=True)
    ),
    "split": lambda x, y: sum(
        ce(a, b, reduction="sum") for a, b in zip(x.split(2, dim=1), y.split(2, 1), strict=True)
    ),
    "samples": lambda x, y: sum(F.cross_entropy(x[i], y[i]) for i in range(BATCH)),
    "double": lambda x, y: ce(x.to(torch.float64), y),
    "to_other": lambda x, y: ce(x.double().to(x), y),
    "unsqueezed": lambda x, y: ce(x.unsqueeze(0)[0], y),
    "log_softmax": lambda x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
    "gathered_and_sharded": lambda x, y: ce(x, y) + 0.1 * x.logsumexp(-1).pow(2).mean(),
    "learned_scale": lambda x, y: ce(x * torch.ones((), requires_grad=True), y),
    "sum_of_logits": lambda x, y: (x * x.detach()).sum(),
    "entropy": lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "list_index": lambda x, y: ce(x[[1, 0]], y),
    "last_class": lambda x, y: x[..., -1].sum() + x[:, :, 2:5].pow(2).sum(),
    "new_last_dim": lambda x, y: x[..., None].mean() + x.unsqueeze(-1).sum(),
    "gather_method": lambda x, y: x.gather(-1, y.clamp_min(0).unsqueeze(-1)).sum(),
    "other_view": lambda x, y: x.view(-1).pow(2).sum() + x.flatten().sum() + x.reshape(BATCH, -1).sum(),
    "stacked": lambda x, y: torch.cat([x, x.detach()], 0).pow(2).sum(),
}


@pytest.mark.parametrize("world", [2, 3])
def test_losses_and_gradients_equal_those_of_full_logits(world):
    def body():
        for name, function in LOSSES.items():
            try:
                agree(function)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error

    run_ranks(world, body)


def test_half_precision_and_autocast():
    def autocast(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ce(x, y)

    def body():
        agree(LOSSES["mean"], torch.bfloat16, tolerance=2e-2)
        agree(LOSSES["huggingface"], torch.bfloat16, tolerance=2e-2)
        agree(autocast, torch.bfloat16, tolerance=2e-2)
        agree(LOSSES["mean"], torch.float64, tolerance=1e-12)

    run_ranks(2, body)


def test_large_logits_do_not_overflow():
    def body():
        agree(lambda x, y: ce(x * 1e4, y), tolerance=1e-5)

    run_ranks(2, body)


def test_looks_like_the_full_tensor():
    def body():
        full, _ = values()
        _, logits, _ = shard_of(full)
        assert isinstance(logits, torch.Tensor)
        assert logits.shape == full.shape
        assert logits.size(-1) == VOCAB
        assert (logits.dim(), logits.numel(), len(logits), logits.dtype) == (
            3,
            full.numel(),
            BATCH,
            full.dtype,
        )
        assert logits.requires_grad
        assert not logits.detach().requires_grad
        assert "on this rank" in f"{logits}" + repr(logits)
        with torch.no_grad():
            assert not (logits * 2).requires_grad
            torch.testing.assert_close(logits.argmax(-1), full.argmax(-1))
            torch.testing.assert_close(logits.topk(3).values, full.topk(3).values)
            torch.testing.assert_close(logits.softmax(-1), full.softmax(-1))
            assert float(logits.max()) == float(full.max())
            torch.testing.assert_close(torch.tensor(logits.tolist()), full)
            torch.testing.assert_close(torch.from_numpy(logits.cpu().numpy()), full)
            torch.testing.assert_close(copy.deepcopy(logits), full)
            assert bool((logits == full).all())
            assert torch.equal(2.0 - logits, 2.0 - full)

    run_ranks(2, body)


def test_shapes_and_scales_keep_the_shard():
    def body():
        full, _ = values()
        _, logits, _ = shard_of(full)
        kept = [
            logits.float(), logits.view(-1, VOCAB), logits.view(-1, logits.size(-1)), logits.reshape((-1, VOCAB)),
            logits.flatten(0, 1), logits[:, :-1], logits[..., :-1, :], logits[0], logits[None], logits[:, 1:, :],
            logits / 2, 2 * logits, torch.tanh(logits), logits.unsqueeze(1), logits.to(torch.float64), logits.detach(),
            logits.contiguous(), logits.chunk(2, 1)[0], logits.view(BATCH, LENGTH, -1), logits.bfloat16(),
        ]  # fmt: skip
        assert all(isinstance(item, VocabParallelLogits) for item in kept)
        gathered = [
            logits[..., :5],
            logits.transpose(1, 2),
            logits[..., 0],
            logits.softmax(-1),
            logits + full,
        ]
        assert all(type(item) is torch.Tensor for item in gathered)

    run_ranks(2, body)


def test_writing_in_place():
    def body():
        full, target = values()
        local, logits, own = shard_of(full)
        leaf = full.clone().requires_grad_()
        want = leaf * 1.0
        want[..., 3] = -1e4
        want /= 2
        logits[..., 3] = -1e4
        logits /= 2
        ce(want, target.masked_fill(target == 3, 0)).backward()
        ce(logits, target.masked_fill(target == 3, 0)).backward()
        torch.testing.assert_close(local.grad, leaf.grad[..., own])
        with pytest.raises(StepError, match="slice or view"):
            shard_of(full)[1][:, 0].mul_(2)

    run_ranks(2, body)


def test_custom_functions_get_full_logits_and_give_full_gradients():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x * x).sum()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    def body():
        agree(lambda x, y: Square.apply(x))

    run_ranks(2, body)


def test_wrong_target_raises_as_in_torch():
    def body():
        full, target = values()
        ce(shard_of(full)[1], target.masked_fill(target == -100, VOCAB))

    with pytest.raises(RanksError, match=r"IndexError.*out of bounds for 13 classes"):
        run_ranks(2, body)


def test_metrics():
    torchmetrics = pytest.importorskip("torchmetrics")

    def body():
        full, target = values()
        _, logits, _ = shard_of(full)
        for metric in (
            torchmetrics.classification.MulticlassAccuracy(VOCAB, ignore_index=-100),
            torchmetrics.text.Perplexity(ignore_index=-100),
        ):
            preds, sharded = full, logits.detach()
            if "Accuracy" in type(metric).__name__:
                preds, sharded = preds.flatten(0, 1), sharded.flatten(0, 1)
            metric.sync_on_compute = False
            labels = target.flatten() if preds.dim() == 2 else target
            want = metric(preds, labels)
            metric.reset()
            torch.testing.assert_close(metric(sharded, labels), want)

    run_ranks(2, body)
