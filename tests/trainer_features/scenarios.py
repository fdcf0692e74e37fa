# SPDX-License-Identifier: Apache-2.0
"""All scenarios, in the order of the table."""

from tests.trainer_features import data_scenarios as data
from tests.trainer_features import logging_scenarios as logs
from tests.trainer_features import loop_scenarios as loops
from tests.trainer_features import optimizer_scenarios as optimizers
from tests.trainer_features.matrix import Scenario

SCENARIOS: dict[str, Scenario] = {
    "logging": logs.logging,
    "progress bars": logs.progress_bars,
    "monitors": logs.monitors,
    "reading": data.reading,
    "workers": data.workers,
    "predicting": data.predicting,
    "several loaders": data.several,
    "uneven": data.uneven,
    "limits": loops.limits,
    "overfit": loops.overfit,
    "max_time": loops.max_time,
    "stages": loops.stages,
    "hooks": loops.hooks,
    "watching": loops.watching,
    "data module": loops.data_module,
    "schedulers": optimizers.schedulers,
    "frozen": optimizers.frozen,
    "thawing": optimizers.thawing,
    "clipping": optimizers.clipping,
    "averages": optimizers.averages,
    "manual": optimizers.manual,
    "finder": optimizers.finder,
}
