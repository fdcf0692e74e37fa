# SPDX-License-Identifier: Apache-2.0
"""Memory: special cases of the literature, properties of all layouts, and what PyTorch really keeps."""

import random
from dataclasses import replace

import pytest
import torch

from lightning_3d.estimator import STATE_BYTES, Layout, MemoryModel, Workload
from lightning_3d.estimator.activations import dense_activations, kept_per_token, microbatches_in_flight
from lightning_3d.estimator.memory import CATEGORIES
from lightning_3d.estimator.states import rank_parameters, stage_blocks, zero_bytes
from lightning_3d.models import known_models, load_shape, shape_from_config
from lightning_3d.models.parameters import total_parameters
from lightning_3d.schedules import build_schedule, peak_in_flight_of_rank
from lightning_3d.shape import ModelShape

GPT3 = load_shape("gpt3-175b")
LLAMA = load_shape("llama-3-8b")
MIXTRAL = load_shape("mixtral-8x7b")
WORK = Workload(seq_len=2048, global_batch=512)


@pytest.mark.parametrize("group", [1, 8, 64])
def test_states_are_those_of_the_zero_paper(group):
    zero = STATE_BYTES["zero"]
    assert zero.total == 16
    expected = [16, 4 + 12 / group, 2 + 14 / group, 16 / group]
    assert [zero_bytes(zero, stage, group) for stage in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_estimate_has_the_zero_bytes_of_its_parameters(stage):
    work = replace(WORK, states=STATE_BYTES["zero"])
    layout = Layout(dp_shard=64, zero_stage=stage)
    estimate = MemoryModel(LLAMA, work).peak(layout)
    assert estimate.static_bytes == pytest.approx(
        zero_bytes(work.states, stage, 64) * total_parameters(LLAMA)
    )


def test_megatron_states():
    assert STATE_BYTES["megatron-bf16"].total == 18
    assert zero_bytes(STATE_BYTES["megatron-bf16"], 1, 8) == 6 + 12 / 8
    assert zero_bytes(STATE_BYTES["megatron-fp16"], 1, 8) == 4 + 16 / 8
    assert zero_bytes(STATE_BYTES["fp32"], 1, 8) == 8 + 8 / 8


@pytest.mark.parametrize(
    ("layout", "per_sbh"),
    [
        (Layout(), 34 + 5 * 96 * 2048 / 12288),
        (Layout(tp=8, sequence_parallel=False), 10 + 24 / 8 + 5 * 96 * 2048 / 12288 / 8),
        (Layout(tp=8), (34 + 5 * 96 * 2048 / 12288) / 8),
        (Layout(tp=8, recompute="attention"), 34 / 8),
        (Layout(tp=8, recompute="full"), 2 / 8),
    ],
)
def test_activations_are_those_of_korthikanti(layout, per_sbh):
    """Table 2 of arXiv:2205.05198, in units of s b h bytes a block."""
    block = dense_activations(GPT3, replace(WORK, attention="unfused", dropout=True))
    assert kept_per_token(block, layout) / GPT3.hidden_size == pytest.approx(per_sbh)


def test_parameters_of_all_ranks_add_up():
    """Over pipeline, tensor and expert ranks: all split parameters once, replicated ones tp times."""
    for shape in (LLAMA, MIXTRAL):
        layout = Layout(pp=4, tp=1, ep=1)
        stages = stage_blocks(shape, 4)
        count = sum(
            rank_parameters(shape, layout, blocks, first=index == 0, last=index == 3).total
            for index, blocks in enumerate(stages)
        )
        assert count == pytest.approx(total_parameters(shape))


def test_in_flight_microbatches_follow_the_schedule():
    """First stage of 1F1B holds min(p, m), last one 1; GPipe all; interleaving adds chunks."""
    for m in (2, 4, 16):
        assert microbatches_in_flight("1f1b", 4, 0, 1, m) == min(4, m)
        assert microbatches_in_flight("1f1b", 4, 3, 1, m) == 1
        assert microbatches_in_flight("gpipe", 4, 0, 1, m) == m
    assert microbatches_in_flight("interleaved", 4, 0, 2, 16) > microbatches_in_flight("1f1b", 4, 0, 1, 16)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_in_flight_microbatches_are_those_of_the_schedule_table(name, chunks):
    table = build_schedule(name, num_ranks=4, num_microbatches=8, virtual_stages=chunks)
    for rank in range(4):
        peak = peak_in_flight_of_rank(table, rank) / chunks
        assert microbatches_in_flight(name, 4, rank, chunks, 8) == pytest.approx(peak, abs=1 / chunks)


def test_pipeline_changes_the_activations_of_the_stages():
    model = MemoryModel(LLAMA, WORK)
    stages = model.stages(Layout(pp=4))
    per_block = [stage.activations for stage in stages]
    assert per_block[0] == pytest.approx(4 * per_block[3])
    assert model.stages(Layout(pp=4, schedule="gpipe"))[0].activations == pytest.approx(512 * per_block[3])


def random_layouts(count, seed=0):
    choose = random.Random(seed)
    for _ in range(count):
        yield Layout(
            pp=choose.choice([1, 2, 4, 8]),
            dp_replicate=choose.choice([1, 2]),
            dp_shard=choose.choice([1, 2, 8]),
            cp=choose.choice([1, 2]),
            tp=choose.choice([1, 2, 4]),
            zero_stage=choose.choice([0, 1, 2, 3]),
            microbatch_size=choose.choice([1, 2]),
            schedule=choose.choice(["1f1b", "gpipe"]),
            sequence_parallel=choose.choice([True, False]),
            recompute=choose.choice(["none", "attention", "selective", "full"]),
            offload=choose.choice(["none", "optimizer", "parameters"]),
            reshard_after_forward=choose.choice([True, False]),
        )


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2", "gemma-2-9b"])
def test_no_category_is_negative(name):
    model = MemoryModel(load_shape(name), WORK)
    for layout in random_layouts(200):
        for stage in model.stages(layout):
            assert all(getattr(stage, category) >= 0 for category in (*CATEGORIES, "host")), layout


@pytest.mark.parametrize("change", ["dp_shard", "tp", "cp", "recompute", "zero_stage", "microbatch_size"])
def test_memory_falls_with_sharding_and_recomputation(change):
    model = MemoryModel(LLAMA, WORK)
    for layout in random_layouts(200):
        smaller = {
            "dp_shard": replace(layout, dp_shard=2 * layout.dp_shard, zero_stage=max(1, layout.zero_stage)),
            "tp": replace(layout, tp=2 * layout.tp),
            "cp": replace(layout, cp=2 * layout.cp),
            "recompute": replace(layout, recompute="full"),
            "zero_stage": replace(layout, zero_stage=min(3, layout.zero_stage + 1)),
            "microbatch_size": replace(layout, microbatch_size=1),
        }[change]
        before, after = model.stage(layout, 0), model.stage(smaller, 0)
        if change in ("recompute", "microbatch_size"):
            assert after.activations <= before.activations * (1 + 1e-9) * layout.microbatch_size, layout
        elif change in ("tp", "cp"):
            assert after.activations <= before.activations * (1 + 1e-9), (layout, smaller)
            assert after.static_bytes <= before.static_bytes * (1 + 1e-9), (layout, smaller)
        else:
            assert after.static_bytes <= before.static_bytes * (1 + 1e-9), (layout, smaller)


def test_whole_gradients_pile_up_under_a_pipeline():
    """FSDP under a pipeline reduces once: 4 bytes a parameter of the stage, whatever the shard group."""
    model = MemoryModel(LLAMA, WORK)
    layouts = [Layout(pp=2, dp_shard=shard, reshard_after_forward=False) for shard in (8, 64)]
    few, many = (model.peak(layout).gathered for layout in layouts)
    assert few == pytest.approx(many)
    assert few > 5 * total_parameters(LLAMA) / 2


def test_recompute_orders_the_estimate():
    """Recomputation is never ignored: none > attention or selective > full, on every kind of mesh."""
    model = MemoryModel(LLAMA, replace(WORK, attention="unfused"))
    for base in (Layout(dp_shard=2), Layout(tp=2), Layout(pp=2), Layout(cp=2)):
        kinds = ("none", "attention", "selective", "full")
        kept = [model.peak(replace(base, recompute=kind)).activations for kind in kinds]
        assert kept == sorted(kept, reverse=True)
        assert kept[-1] < 0.1 * kept[0]


def test_offload_moves_bytes_to_the_host():
    model = MemoryModel(LLAMA, WORK)
    plain, optimizer, parameters = (
        model.peak(Layout(dp_shard=8, offload=kind)) for kind in ("none", "optimizer", "parameters")
    )
    assert optimizer.optimizer == 0
    assert optimizer.host == plain.optimizer
    assert parameters.static_bytes == 0
    assert parameters.host == pytest.approx(plain.static_bytes)


def kept_by_torch(module, ids):
    """Bytes of the storages that autograd keeps of one forward, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(input_ids=ids, labels=ids, use_cache=False)
    return sum(kept.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("matmul", ["bf16", "fp32"])
def test_activations_are_what_torch_keeps(recompute, matmul):
    """Difference of a model with four blocks and one with two: what a block keeps of a token, to 1 %."""
    transformers = pytest.importorskip("transformers")
    batch, length = 2, 128
    ids = torch.randint(0, 64, (batch, length))
    kept = {}
    for num_layers in (2, 4):
        config = transformers.LlamaConfig(
            hidden_size=128, num_attention_heads=8, num_key_value_heads=4, intermediate_size=512, vocab_size=64,
            num_hidden_layers=num_layers, attn_implementation="sdpa",
        )  # fmt: skip
        module = transformers.LlamaForCausalLM(config).train()
        module = module.bfloat16() if matmul == "bf16" else module
        if recompute == "full":
            module.gradient_checkpointing_enable({"use_reentrant": False})
        kept[num_layers] = kept_by_torch(module, ids)
    measured = (kept[4] - kept[2]) / 2 / (batch * length)
    block = dense_activations(
        shape_from_config(config), Workload(seq_len=length, global_batch=batch, fused=False, matmul=matmul)
    )
    assert kept_per_token(block, Layout(recompute=recompute)) == pytest.approx(measured, rel=0.01)


def test_windows_and_dense_blocks_are_placed():
    for name in known_models():
        shape = load_shape(name)
        stages = stage_blocks(shape, 3)
        assert sum(stage.total for stage in stages) == shape.num_layers
        assert sum(stage.moe for stage in stages) == shape.num_moe_layers


def test_a_model_without_vocabulary_or_attention():
    shape = ModelShape(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=0,
        num_key_value_heads=0,
        intermediate_size=64,
        vocab_size=0,
    )
    assert MemoryModel(shape, WORK).peak(Layout(pp=2)).allocated_bytes > 0
