# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as plain tables: builders, checks, a simulator and drawings. Nothing here imports torch.

```python
from lightning_3d.schedules import build_schedule, simulate

schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=8)
simulate(schedule).bubble_fraction  # 3 / 11
```
"""

from lightning_3d.schedules.builders import gpipe, interleaved, looped_bfs, one_f_one_b
from lightning_3d.schedules.catalog import (
    SCHEDULE_NAMES,
    build_schedule,
    check_microbatches,
    is_legal,
    schedule_for_batch,
    stage_placement,
    stages_per_rank,
)
from lightning_3d.schedules.draw import draw_png, draw_text
from lightning_3d.schedules.simulate import (
    Durations,
    Span,
    Timeline,
    bubble_fraction,
    ideal_bubble_fraction,
    peak_in_flight,
    peak_in_flight_of_rank,
    simulate,
)
from lightning_3d.schedules.table import Action, ActionKind, Schedule
from lightning_3d.schedules.validate import in_flight_bound, validate
from lightning_3d.schedules.zero_bubble import zbv, zero_bubble

__all__ = [
    "SCHEDULE_NAMES",
    "Action",
    "ActionKind",
    "Durations",
    "Schedule",
    "Span",
    "Timeline",
    "bubble_fraction",
    "build_schedule",
    "check_microbatches",
    "draw_png",
    "draw_text",
    "gpipe",
    "ideal_bubble_fraction",
    "in_flight_bound",
    "interleaved",
    "is_legal",
    "looped_bfs",
    "one_f_one_b",
    "peak_in_flight",
    "peak_in_flight_of_rank",
    "schedule_for_batch",
    "simulate",
    "stage_placement",
    "stages_per_rank",
    "validate",
    "zbv",
    "zero_bubble",
]
