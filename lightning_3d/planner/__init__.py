# SPDX-License-Identifier: Apache-2.0
"""Which layout, what it will cost, and why not another one. Nothing here imports torch.

```python
from lightning_3d.hardware import load_cluster
from lightning_3d.models import load_shape
from lightning_3d.planner import plan_for

report = plan_for(load_shape("llama-3-8b"), load_cluster("8xH100"), seq_len=8192, global_batch=128)
report.best.layout.describe()
```
"""

from lightning_3d.planner.auto import plan_for, resolve_auto
from lightning_3d.planner.rank import Planner, PlanReport, RankedPlan, Refusal
from lightning_3d.planner.search import SearchSpace

__all__ = ["PlanReport", "Planner", "RankedPlan", "Refusal", "SearchSpace", "plan_for", "resolve_auto"]
