# SPDX-License-Identifier: Apache-2.0
"""What to do when a run does not fit: levers in the field's order, each with what it saves and costs for this run."""

from lightning_3d.advisor.advise import Advice, Advised, advise
from lightning_3d.advisor.run import Failure, RunFacts, uses_autocast

__all__ = ["Advice", "Advised", "Failure", "RunFacts", "advise", "uses_autocast"]
