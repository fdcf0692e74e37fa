# SPDX-License-Identifier: Apache-2.0
"""Step time: conventions of FLOPs, bubbles, links, traffic and calibration."""

import json
from dataclasses import replace

import pytest

from lightning_3d.errors import PlanError
from lightning_3d.estimator import Layout, StepTimeModel, Workload
from lightning_3d.estimator.calibration import calibrate, calibrate_from_file
from lightning_3d.estimator.collectives import Network
from lightning_3d.estimator.efficiency import DEFAULT_EFFICIENCY
from lightning_3d.estimator.flops import model_flops_per_token
from lightning_3d.estimator.rank_traffic import rank_traffic
from lightning_3d.estimator.step_time import bubble_fraction
from lightning_3d.hardware import load_cluster
from lightning_3d.models import load_shape
from lightning_3d.schedules import build_schedule, simulate

LLAMA = load_shape("llama-3-8b")
WORK = Workload(seq_len=8192, global_batch=128)


@pytest.mark.parametrize(
    ("name", "seq_len", "gigaflops"),
    [("llama-3-8b", 8192, 51.47), ("llama-3-70b", 8192, 449.2), ("llama-3.1-405b", 8192, 2524.2)],
)
def test_model_flops_are_megatrons(name, seq_len, gigaflops):
    assert model_flops_per_token(load_shape(name), seq_len) / 1e9 == pytest.approx(gigaflops, rel=1e-3)


def test_model_flops_without_the_causal_half():
    assert model_flops_per_token(LLAMA, 8192, causal=False) / 1e9 == pytest.approx(57.92, rel=1e-3)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_bubbles_are_those_of_the_simulated_table(name, chunks):
    table = build_schedule(name, num_ranks=4, num_microbatches=8, virtual_stages=chunks)
    assert bubble_fraction(name, 4, chunks, 8) == pytest.approx(simulate(table).bubble_fraction, abs=0.01)


def test_step_is_the_sum_of_its_parts_and_mfu_is_sane():
    estimate = StepTimeModel(LLAMA, WORK, load_cluster("8xH100")).estimate(
        Layout(dp_shard=8, microbatch_size=2)
    )
    parts = estimate.to_dict()
    assert sum(value for key, value in parts.items() if key.endswith("_s") and key not in ("step_s",)) == (
        pytest.approx(estimate.step_s)
    )
    assert 0.3 < estimate.mfu < 0.6


def test_recomputation_costs_a_third_of_the_matrix_products():
    model = StepTimeModel(LLAMA, WORK, load_cluster("8xH100"))
    none, full = (model.estimate(Layout(dp_shard=8, recompute=kind)) for kind in ("none", "full"))
    assert full.step_s / none.step_s == pytest.approx(1.3, abs=0.06)


def test_tensor_parallelism_across_nodes_is_slow():
    model = StepTimeModel(LLAMA, WORK, load_cluster("2x8xH100"))
    inside, across = model.estimate(Layout(dp_shard=2, tp=8)), model.estimate(Layout(tp=16))
    assert across.tensor_s > 2 * inside.tensor_s
    assert across.step_s > 1.8 * inside.step_s


def test_a_group_is_bound_by_its_slowest_link():
    network = Network(load_cluster("4x8xH100"), DEFAULT_EFFICIENCY)
    inside, few, many = network.group(8, 1), network.group(4, 8), network.group(32, 1)
    assert not inside.crosses
    assert few.crosses
    assert few.bytes_per_s < many.bytes_per_s < inside.bytes_per_s
    nvl72 = Network(load_cluster("NVL72"), DEFAULT_EFFICIENCY)
    assert not nvl72.group(64, 1).crosses


def test_exchanges_of_experts_hide_under_interleaved_microbatches_alone():
    shape, cluster = load_shape("qwen3-235b-a22b"), load_cluster("32x8xH100@200")
    work = Workload(seq_len=4096, global_batch=2048)
    overlapping = replace(work, expert_overlap=True)
    layout = Layout(pp=8, dp_shard=32, ep=32)
    interleaved = replace(layout, schedule="interleaved", virtual_stages=4)

    def seconds(workload: Workload, layout: Layout) -> dict[str, float]:
        return StepTimeModel(shape, workload, cluster).estimate(layout).to_dict()

    assert seconds(overlapping, layout) == seconds(work, layout)
    exposed, hidden = seconds(work, interleaved), seconds(overlapping, interleaved)
    difference = exposed["expert_s"] - hidden["expert_s"]
    under_blocks = DEFAULT_EFFICIENCY.expert_overlap * exposed["compute_s"]  # and under the head: the 5 %
    assert difference == pytest.approx(under_blocks, rel=0.05)
    assert hidden["compute_s"] == exposed["compute_s"]


def test_grouped_products_of_experts_are_slower_than_one_product_of_their_size():
    shape, cluster = load_shape("gpt-oss-120b"), load_cluster("8x8xH100")
    work = Workload(seq_len=4096, global_batch=512)
    layout = Layout(dp_shard=64, ep=64, microbatch_size=4)
    equal = replace(DEFAULT_EFFICIENCY, grouped_matmul=1.0)
    grouped, single = (
        StepTimeModel(shape, work, cluster, efficiency).estimate(layout).compute_s
        for efficiency in (DEFAULT_EFFICIENCY, equal)
    )
    assert 1.0 < grouped / single < 1 / DEFAULT_EFFICIENCY.grouped_matmul


def test_traffic_of_the_zero_stages():
    """Volumes of the ZeRO paper, section 7: 2 P for stages 1 and 2, 3 P for stage 3, without reshard 2 P."""
    work = replace(WORK, global_batch=8)
    moved = {}
    for stage, reshard in ((1, True), (3, True), (3, False)):
        layout = Layout(dp_shard=8, zero_stage=stage, reshard_after_forward=reshard)
        moved[stage, reshard] = rank_traffic(LLAMA, work, layout, 0)["dp_shard"]
    gathered = (
        2 * (8.03e9 - 2 * 128256 * 4096) * 7 / 8
    )  # embedding and head are not freed before the backward
    assert moved[3, True] - moved[3, False] == pytest.approx(gathered, rel=1e-3)
    assert moved[1, True] == pytest.approx(moved[3, False])


def test_traffic_is_zero_on_axes_of_one():
    sent = rank_traffic(LLAMA, WORK, Layout(), 0)
    assert not any(sent.values())


def test_calibration_makes_the_estimate_equal_to_the_measurement(tmp_path):
    cluster, layout = load_cluster("8xH100"), Layout(dp_shard=8)
    scaled = calibrate(LLAMA, cluster, WORK, layout, step_s=20.0)
    assert StepTimeModel(LLAMA, WORK, scaled).estimate(layout).step_s == pytest.approx(20.0)
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"seq_len": 8192, "global_batch": 128, "layout": {"dp_shard": 8}, "step_s": 20.0})
    )
    assert calibrate_from_file(LLAMA, cluster, path) == scaled
    path.write_text("{}")
    with pytest.raises(PlanError, match="does not read"):
        calibrate_from_file(LLAMA, cluster, path)
    with pytest.raises(PlanError, match="not a measurement"):
        calibrate(LLAMA, cluster, WORK, layout, step_s=-1.0)
