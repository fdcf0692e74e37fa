# SPDX-License-Identifier: Apache-2.0
"""The table in the docs is that of the scenarios."""

import re

from tests.trainer_features.matrix import reference
from tests.trainer_features.table import PATH


def test_the_page_has_every_feature():
    """Each row of the table is a value of a scenario, and each value of a scenario is in the table."""
    rows = re.findall(r"^\| (.+?) \| (?:yes|refused)", PATH.read_text(), re.M)
    assert rows == [feature for features in reference().values() for feature in features]
    assert "expected" not in PATH.read_text()
