# SPDX-License-Identifier: Apache-2.0
"""GPUs, nodes and the links between them, as data: from a name, a file, or the machine itself."""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_3d.errors import HardwareError
from lightning_3d.units import GIB

GIGA, TERA = 1e9, 1e12
USABLE_MEMORY = 0.99
"""Share of the printed memory that torch reports: an "80 GB" H100 has 79.1 to 79.6 GiB."""

_TABLE = Path(__file__).with_name("hardware.json")
_CLUSTER_NAME = re.compile(
    r"^(?:(?P<first>\d+)x)?(?:(?P<second>\d+)x)?(?P<name>[a-z][\w.-]*|\d{4})(?:@(?P<gbit>\d+))?$", re.I
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of accelerator."""

    name: str
    memory_bytes: float
    """Memory that a process may use."""
    peak_flops: float
    """Dense 16-bit operations a second, as on the datasheet."""
    achievable_flops: float
    """Dense 16-bit operations a second of the best measured matrix product."""
    peak_flops_fp8: float
    """Dense 8-bit operations a second; the 16-bit rate where there is no such unit."""
    achievable_flops_fp8: float
    memory_bytes_per_s: float
    """Bandwidth of the device memory."""
    link_bytes_per_s: float
    """One-way bandwidth of a GPU to its island (NVLink, xGMI); that of PCIe where there is no such link."""
    host_bytes_per_s: float
    """One-way bandwidth to the host's memory."""
    has_fast_link: bool
    """Whether the GPUs of an island have a link of their own beside PCIe."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    num_nodes: int
    gpus_per_node: int
    network_bytes_per_s: float
    """One-way bandwidth between nodes, for each GPU."""
    island: int = 0
    """GPUs that share one fast-link domain (72 in NVL72); 0 stands for `gpus_per_node`."""
    host_memory_bytes: float = 1024 * GIB
    """Memory of a node's host, for offload."""
    link_efficiency: float = 0.75
    """Achieved over nominal bandwidth in an island. 0.75: all-reduce of 8 A100 at 225 of 300 GB/s (measured table)."""
    network_efficiency: float = 0.8
    """Achieved over nominal bandwidth between nodes, large messages (0.9 of InfiniBand in Calculon's A100 system,
    less for congestion in large rings)."""
    time_scale: float = 1.0
    """Measured over estimated step time, if a run was measured (`--calibrate`)."""
    memory_scale: float = 1.0
    """Measured over estimated memory, if a run was measured."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 1:
            raise HardwareError(
                f"num_nodes={self.num_nodes} and gpus_per_node={self.gpus_per_node} must be at least 1."
                " Correct the cluster, e.g. 4x8xH100."
            )
        if self.island == 0:
            object.__setattr__(self, "island", self.gpus_per_node)

    @property
    def world_size(self) -> int:
        """GPUs of the cluster."""
        return self.num_nodes * self.gpus_per_node

    @property
    def link_bytes_per_s(self) -> float:
        """Achieved one-way bandwidth of a GPU inside its island."""
        return self.gpu.link_bytes_per_s * self.link_efficiency

    @property
    def cross_bytes_per_s(self) -> float:
        """Achieved one-way bandwidth of a GPU between nodes."""
        return self.network_bytes_per_s * self.network_efficiency

    def describe(self) -> str:
        """The cluster in a few words."""
        size = f"{self.gpus_per_node} x {self.gpu.name}"
        return f"{self.num_nodes} x {size}" if self.num_nodes > 1 else size


def load_cluster(source: str | Path) -> Cluster:
    """A cluster from a name (`8xH100`, `32x8xA100-80`, `NVL72`, `4x8xH100@200`), or from a JSON file.

    `NxMxGPU` are N nodes of M GPUs, `MxGPU` is one node (several, if M exceeds what a node of that GPU holds), and
    `@200` gives the network in Gbit/s for each GPU.

    Raises:
        HardwareError: an unknown GPU, or a name or file that does not read.
    """
    if str(source).endswith(".json") or Path(source).is_file():
        return _from_file(Path(source))
    match = _CLUSTER_NAME.match(str(source).strip())
    if match is None:
        raise HardwareError(
            f"cluster {str(source)!r} does not read. Write it like 8xH100, 4x8xA100-80 or NVL72."
        )
    first, second = (int(match[part]) if match[part] else None for part in ("first", "second"))
    name = match["name"]
    description = dict(_table()["nodes"].get(name.upper(), {"gpu": name}))
    if second is not None:
        description.update(num_nodes=first, gpus_per_node=second)
    elif "num_nodes" in description:
        description["num_nodes"] *= first or 1
    elif name.upper() in _table()["nodes"]:
        description["num_nodes"] = first or 1
    else:
        description.update(_as_nodes(name, first or 1))
    if match["gbit"]:
        description["network_gb_s"] = int(match["gbit"]) / 8
    return cluster_from_dict(description)


def cluster_from_dict(values: Mapping[str, Any]) -> Cluster:
    """A cluster from plain data.

    Keys: `gpu`, and any of `num_nodes`, `gpus_per_node`, `network_gb_s`, `link_gb_s`, `island`, `host_memory_gib`,
    `memory_gib`, `link_efficiency`, `network_efficiency`, `time_scale`, `memory_scale`.

    Raises:
        HardwareError: an unknown GPU or key.
    """
    allowed = {"gpu", "num_nodes", "gpus_per_node", "network_gb_s", "link_gb_s", "island", "host_memory_gib"}
    scales = {"memory_gib", "link_efficiency", "network_efficiency", "time_scale", "memory_scale"}
    unknown = set(values) - allowed - scales
    if unknown or "gpu" not in values:
        wrong = f"unknown keys {sorted(unknown)}" if unknown else "no key 'gpu'"
        raise HardwareError(f"the cluster has {wrong}. Use {', '.join(sorted(allowed | scales))}.")
    gpu, node = find_gpu(str(values["gpu"]))
    if "link_gb_s" in values:
        gpu = replace(gpu, link_bytes_per_s=float(values["link_gb_s"]) * GIGA, has_fast_link=True)
    if "memory_gib" in values:
        gpu = replace(gpu, memory_bytes=float(values["memory_gib"]) * GIB)
    per_node = int(values.get("gpus_per_node", node["gpus_per_node"]))
    num_nodes = int(values.get("num_nodes", 1))
    island = int(values.get("island", node.get("island", per_node)))
    return Cluster(
        gpu=gpu,
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        network_bytes_per_s=float(values.get("network_gb_s", node["network_gb_s"])) * GIGA,
        island=max(per_node, min(island, num_nodes * per_node)),
        host_memory_bytes=float(values.get("host_memory_gib", 1024)) * GIB,
        **{key: float(values[key]) for key in scales - {"memory_gib"} if key in values},
    )


def cluster_of_devices(
    name: str,
    memory_bytes: float,
    *,
    world_size: int,
    gpus_per_node: int,
    link_bytes_per_s: float | None = None,
    network_bytes_per_s: float | None = None,
) -> Cluster:
    """The cluster that a running job sees: the device's own name and memory, and how ranks lie on nodes.

    Args:
        name: device name as the driver prints it (`NVIDIA H100 80GB HBM3`), or `cpu`.
        memory_bytes: total memory of a device.
        world_size: number of ranks.
        gpus_per_node: ranks of a node.
        link_bytes_per_s: measured bandwidth of a rank in its node, if a link check ran.
        network_bytes_per_s: measured bandwidth of a rank between nodes, if a link check ran.

    Raises:
        HardwareError: no known GPU is in the name.
    """
    known = _match_device(name)
    cluster = cluster_from_dict(
        {"gpu": known, "num_nodes": max(1, world_size // gpus_per_node), "gpus_per_node": gpus_per_node}
    )
    gpu = replace(cluster.gpu, memory_bytes=memory_bytes)
    if link_bytes_per_s is not None:
        gpu = replace(gpu, link_bytes_per_s=link_bytes_per_s)
        cluster = replace(cluster, link_efficiency=1.0)
    if network_bytes_per_s is not None:
        cluster = replace(cluster, network_bytes_per_s=network_bytes_per_s, network_efficiency=1.0)
    return replace(cluster, gpu=gpu)


def cluster_of_machine(num_nodes: int = 1) -> Cluster:
    """The cluster made of `num_nodes` machines like this one, as `nvidia-smi` sees it.

    Raises:
        HardwareError: there is no NVIDIA driver, or it lists an unknown GPU.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise HardwareError(
            f"nvidia-smi does not answer ({error}). Name the cluster, e.g. 8xH100."
        ) from error
    rows = [line.rsplit(",", 1) for line in output.strip().splitlines()]
    name, mebibytes = rows[0][0].strip(), float(rows[0][1])
    return cluster_of_devices(
        name, mebibytes * 2**20 * USABLE_MEMORY, world_size=num_nodes * len(rows), gpus_per_node=len(rows)
    )


def known_gpus() -> list[str]:
    """Names of the GPUs that ship with the package."""
    return list(_table()["gpus"])


def find_gpu(name: str) -> tuple[Gpu, Mapping[str, Any]]:
    """A GPU by name or alias, and the node it usually comes in.

    Raises:
        HardwareError: the name is unknown.
    """
    table = _table()
    wanted = name.upper().replace("_", "-")
    wanted = {alias.upper(): real for alias, real in table["aliases"].items()}.get(wanted, wanted)
    for known, row in table["gpus"].items():
        if known.upper() == wanted.upper():
            return _gpu(known, row), row["node"]
    described = _described(name)
    if described is not None:
        return find_gpu(described)
    raise HardwareError(f"GPU {name!r} is unknown. Use one of {', '.join(table['gpus'])}, or a cluster file.")


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return content


ACHIEVABLE_SHARE = 0.8
"""Best measured matrix product over datasheet rate, for GPUs that nobody measured (H100 0.80, B200 0.78, A100 0.87)."""


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    peak = row["bf16_tflops"] * TERA
    peak_fp8 = row.get("fp8_tflops", row["bf16_tflops"]) * TERA
    achievable = row.get("achievable_bf16_tflops", row["bf16_tflops"] * ACHIEVABLE_SHARE) * TERA
    fallback_fp8 = peak_fp8 * achievable / peak
    pcie = row.get("pcie_gb_s", row.get("link_gb_s", 0)) * GIGA
    return Gpu(
        name=name,
        memory_bytes=row["memory_gib"] * GIB * USABLE_MEMORY,
        peak_flops=peak,
        achievable_flops=achievable,
        peak_flops_fp8=peak_fp8,
        achievable_flops_fp8=row.get("achievable_fp8_tflops", fallback_fp8 / TERA) * TERA,
        memory_bytes_per_s=row["hbm_tb_s"] * TERA,
        link_bytes_per_s=row["link_gb_s"] * GIGA if "link_gb_s" in row else pcie,
        host_bytes_per_s=pcie,
        has_fast_link="link_gb_s" in row,
    )


def _as_nodes(name: str, count: int) -> dict[str, int]:
    """`64xH100` are 8 nodes of 8: a count beyond one node is cut into full ones."""
    per_node = int(find_gpu(name)[1]["gpus_per_node"])
    if count > per_node and count % per_node == 0:
        return {"num_nodes": count // per_node, "gpus_per_node": per_node}
    return {"num_nodes": 1, "gpus_per_node": count}


def _match_device(name: str) -> str:
    """The known name of a device as its driver prints it."""
    found = _described(name)
    if found is None:
        raise HardwareError(
            f"device {name!r} is unknown. Give the cluster by name, e.g. 8xH100, or by a file."
        )
    return found


def _described(name: str) -> str | None:
    """The longest known name or alias all of whose parts are words (or their beginnings) of a description."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    names = [*_table()["aliases"], *_table()["gpus"]]
    found = [
        known
        for known in names
        if all(any(word.startswith(part) for word in words) for part in known.lower().split("-"))
    ]
    return max(found, key=len, default=None)


def _from_file(path: Path) -> Cluster:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"cluster file {path} does not read ({error}). Give JSON with a key 'gpu'."
        ) from error
    return cluster_from_dict(content)
