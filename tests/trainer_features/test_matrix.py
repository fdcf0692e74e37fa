# SPDX-License-Identifier: Apache-2.0
"""Every Trainer feature in every layout gives what one process gives, or is refused in one line before training."""

import pytest

from tests.engine.runs import world_of
from tests.trainer_features.matrix import LAYOUTS, results
from tests.trainer_features.scenarios import SCENARIOS

REFUSED = {"manual": {"tp2", "pp2", "pp2 dp2", "pp2 dp2 tp2"}}
"""Scenarios that layouts refuse."""
MANY_RANKS = [
    pytest.param(name, marks=[pytest.mark.long] if world_of(layout) > 2 else [])
    for name, layout in LAYOUTS.items()
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("layout", MANY_RANKS)
def test_same_as_one_process(layout, scenario):
    cells = results(layout)[scenario]
    if layout in REFUSED.get(scenario, ()):
        wrong = {feature: text for feature, text in cells.items() if not text.startswith("refused: ")}
    else:
        wrong = {feature: text for feature, text in cells.items() if text != "yes"}
    assert not wrong, "\n".join(f"{feature}: {text}" for feature, text in wrong.items())
