# SPDX-License-Identifier: Apache-2.0
"""Clusters from names, files and devices."""

import json

import pytest

from lightning_3d.errors import HardwareError
from lightning_3d.hardware import cluster_of_devices, known_gpus, load_cluster


@pytest.mark.parametrize(
    ("name", "gpu", "nodes", "per_node", "island"),
    [
        ("8xH100", "H100-SXM", 1, 8, 8),
        ("32x8xA100-80", "A100-SXM-80", 32, 8, 8),
        ("64xH100", "H100-SXM", 8, 8, 8),
        ("NVL72", "GB200", 18, 4, 72),
        ("2xNVL72", "GB200", 36, 4, 72),
        ("4x4xL40S", "L40S", 4, 4, 4),
        ("8xcpu", "CPU", 1, 8, 8),
        ("2xP4D", "A100-SXM-40", 2, 8, 8),
    ],
)
def test_names(name, gpu, nodes, per_node, island):
    cluster = load_cluster(name)
    assert (cluster.gpu.name, cluster.num_nodes, cluster.gpus_per_node) == (gpu, nodes, per_node)
    assert cluster.island == island
    assert cluster.world_size == nodes * per_node


def test_network_suffix_is_gbit_per_gpu():
    assert load_cluster("4x8xH100@200").network_bytes_per_s == 25e9


def test_file(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"gpu": "H200", "num_nodes": 2, "gpus_per_node": 4, "network_gb_s": 12.5}))
    cluster = load_cluster(path)
    assert cluster.world_size == 8
    assert cluster.network_bytes_per_s == 12.5e9
    path.write_text(json.dumps({"gpu": "H200", "nodes": 2}))
    with pytest.raises(HardwareError, match=r"unknown keys.*num_nodes"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L40S", "L40S"),
        ("cpu", "CPU"),
    ],
)
def test_device_names_of_the_driver(device, gpu):
    cluster = cluster_of_devices(device, 10e9, world_size=16, gpus_per_node=8)
    assert cluster.gpu.name == gpu
    assert cluster.gpu.memory_bytes == 10e9
    assert cluster.num_nodes == 2


def test_measured_links_replace_the_nominal_ones():
    cluster = cluster_of_devices(
        "NVIDIA H100 80GB HBM3",
        80e9,
        world_size=16,
        gpus_per_node=8,
        link_bytes_per_s=300e9,
        network_bytes_per_s=40e9,
    )
    assert cluster.link_bytes_per_s == 300e9
    assert cluster.cross_bytes_per_s == 40e9


def test_unknown_hardware_is_refused():
    for name in ("8xH999", "8x", "x8"):
        with pytest.raises(HardwareError):
            load_cluster(name)
    with pytest.raises(HardwareError, match="is unknown"):
        cluster_of_devices("Abacus", 1e9, world_size=1, gpus_per_node=1)


def test_every_gpu_has_sane_numbers():
    for name in known_gpus():
        gpu = load_cluster(f"1x1x{name}").gpu
        assert gpu.achievable_flops <= gpu.peak_flops
        assert gpu.peak_flops_fp8 >= gpu.peak_flops
        assert gpu.memory_bytes > 2**30
        assert gpu.link_bytes_per_s > 0
