# SPDX-License-Identifier: Apache-2.0
"""Which stage gets what, and what a stage answers for modules that live elsewhere."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import ModelError, PlanError, StepError
from lightning_3d.parallel.blocks import find_blocks
from lightning_3d.parallel.gate import BlockGate, ProbeRun
from lightning_3d.pipeline.balance import balance_stages
from lightning_3d.pipeline.cut import apply_cut, plan_cut, survey
from tests.models import decoder


def module_of(model):
    root = nn.Module()
    root.model = model
    return root


@pytest.mark.parametrize(
    ("costs", "stages", "first", "last", "expected"),
    [
        ([1] * 8, 4, 0, 0, [2, 2, 2, 2]),
        ([1] * 5, 2, 0, 0, [2, 3]),
        ([1] * 8, 2, 0, 2, [5, 3]),
        ([1] * 8, 2, 2, 0, [3, 5]),
        ([4, 1, 1, 1, 1], 2, 0, 0, [1, 4]),
        ([1] * 12, 4, 0.5, 2, [3, 3, 4, 2]),
        ([1, 1], 2, 0, 0, [1, 1]),
    ],
)
def test_balance(costs, stages, first, last, expected):
    ranges = balance_stages(costs, stages, first_cost=first, last_cost=last)
    assert [index for r in ranges for index in r] == list(range(len(costs)))
    sizes = [len(r) for r in ranges]
    heaviest = max(_costs(ranges, costs, first, last))
    assert heaviest == pytest.approx(max(_costs(_as_ranges(expected), costs, first, last)))
    assert sizes == expected or heaviest == max(_costs(_as_ranges(expected), costs, first, last))


def _as_ranges(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(s, s + n) for s, n in zip(starts, sizes, strict=True)]


def _costs(ranges, costs, first, last):
    totals = [sum(costs[i] for i in r) for r in ranges]
    totals[0] += first
    totals[-1] += last
    return totals


def test_more_stages_than_blocks_is_refused():
    with pytest.raises(PlanError, match=r"4 pipeline stages .* has 2"):
        balance_stages([1, 1], 4)


def test_blocks_are_the_longest_list():
    root = module_of(decoder())
    root.other = nn.ModuleList([nn.Linear(2, 2)])
    assert find_blocks(root).name == "model.layers"
    assert find_blocks(root, "other").name == "other"
    with pytest.raises(ModelError, match=r"'model\.norm'.*model\.layers"):
        find_blocks(root, "model.norm")


def test_names_and_parameters_are_divided_without_loss():
    whole = dict(module_of(decoder()).named_parameters())
    found = {}
    for stage in range(2):
        root = module_of(decoder())
        blocks = find_blocks(root)
        cut = plan_cut(root, blocks, 2, survey(root, blocks))
        apply_cut(root, blocks, cut, [stage])
        held = dict(root.named_parameters())
        assert not found.keys() & held.keys()
        found |= held
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_tied_embedding_is_held_by_both_ends_under_one_name():
    for stage in range(3):
        root = module_of(decoder(tied=True))
        blocks = find_blocks(root)
        cut = plan_cut(root, blocks, 3, survey(root, blocks))
        assert cut.tied == ("model.tok_embeddings.weight",)
        apply_cut(root, blocks, cut, [stage])
        assert ("model.tok_embeddings.weight" in dict(root.named_parameters())) == (stage in (0, 2))
        if stage == 2:
            assert root.model.output.weight is root.model.tok_embeddings.weight


def test_stand_in_has_the_shape_and_no_memory():
    root = module_of(decoder())
    blocks = find_blocks(root)
    apply_cut(root, blocks, plan_cut(root, blocks, 2, survey(root, blocks)), [1])
    gate = BlockGate(blocks.modules)
    ids = torch.zeros(3, 5, dtype=torch.long)
    with pytest.raises(StepError, match="outside a step"):
        root.model.tok_embeddings(ids)
    with gate.running(ProbeRun(())):
        out = root.model.tok_embeddings(ids)
    assert out.shape == (3, 5, 32)
    assert out.untyped_storage().nbytes() == out.element_size()
    absent = root.model.tok_embeddings.weight
    assert (absent.shape, absent.dtype) == ((64, 32), torch.float32)
    with pytest.raises(StepError, match=r"first_stage_modules=\('model\.tok_embeddings',\)"):
        torch.nn.functional.linear(torch.zeros(1, 32), absent)


def test_module_of_the_last_stage_called_too_early_names_the_remedy():
    root = module_of(decoder())
    blocks = find_blocks(root)
    apply_cut(root, blocks, plan_cut(root, blocks, 2, survey(root, blocks)), [0])
    gate = BlockGate(blocks.modules)
    with (
        gate.running(ProbeRun(())),
        pytest.raises(ModelError, match=r"first_stage_modules=\('model.norm',\)"),
    ):
        root.model.norm(torch.zeros(1, 32))


def test_user_may_move_modules_between_ends():
    root = module_of(decoder())
    blocks = find_blocks(root)
    moved = survey(root, blocks, first=("model.norm",))
    assert moved.first == ("model.tok_embeddings", "model.norm")
    assert moved.last == ("model.output",)
    with pytest.raises(ModelError, match=r"'model\.nothing'.*model\.norm"):
        survey(root, blocks, last=("model.nothing",))


def test_parameters_beside_the_model_are_shared():
    root = module_of(decoder())
    root.scale = nn.Parameter(torch.ones(1))
    root.probe = nn.Linear(2, 2)
    assert set(survey(root, find_blocks(root)).shared) == {"scale", "probe.weight", "probe.bias"}


def test_shared_weights_are_in_one_order_on_every_rank():
    """Their gradients are summed as one flat tensor, and every process hashes names in its own way."""
    names = ("e", "a", "d", "b", "c")
    root = nn.Module()
    for name in names:
        root.add_module(name, nn.Linear(2, 2, bias=False))
    root.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    found = survey(root, find_blocks(root), first=names, last=tuple(reversed(names)))
    assert found.shared == tuple(f"{name}.weight" for name in names)
