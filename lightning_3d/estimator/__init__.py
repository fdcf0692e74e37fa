# SPDX-License-Identifier: Apache-2.0
"""What a layout costs: memory of each rank, bytes on each link, seconds of a step. Nothing here imports torch.

```python
from lightning_3d.estimator import Layout, MemoryModel, StepTimeModel, Workload
from lightning_3d.hardware import load_cluster
from lightning_3d.models import load_shape

shape, cluster = load_shape("llama-3-8b"), load_cluster("8xH100")
workload = Workload(seq_len=8192, global_batch=128)
layout = Layout(dp_shard=8, recompute="selective")
MemoryModel(shape, workload).peak(layout).device_bytes
StepTimeModel(shape, workload, cluster).estimate(layout).tokens_per_s_per_gpu
```
"""

from lightning_3d.estimator.layout import STATE_BYTES, Layout, StateBytes, Workload, layout_of_plan
from lightning_3d.estimator.memory import MemoryEstimate, MemoryModel
from lightning_3d.estimator.step_time import StepTimeEstimate, StepTimeModel

__all__ = [
    "STATE_BYTES",
    "Layout",
    "MemoryEstimate",
    "MemoryModel",
    "StateBytes",
    "StepTimeEstimate",
    "StepTimeModel",
    "Workload",
    "layout_of_plan",
]
