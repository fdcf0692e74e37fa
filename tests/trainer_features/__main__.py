# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios and prints what differs: `python -m tests.trainer_features [-l LAYOUT] [-s SCENARIO] [--write]`.

On a busy machine one layout at a time, with `--cells FILE` to keep what was found, and `--write` with the last.
"""

import argparse
import json
import time
from pathlib import Path

import tests.conftest  # noqa: F401  (one thread, before anything is imported)
from tests.trainer_features.matrix import LAYOUTS, alone, cell, together
from tests.trainer_features.scenarios import SCENARIOS
from tests.trainer_features.table import PATH, as_markdown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-l", "--layout", action="append", choices=LAYOUTS)
    parser.add_argument("-s", "--scenario", action="append", choices=SCENARIOS)
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--cells", type=Path, help="JSON to add what is found to")
    options = parser.parse_args()
    chosen = {name: SCENARIOS[name] for name in options.scenario or SCENARIOS}
    expected = alone(chosen)
    cells = json.loads(options.cells.read_text()) if options.cells and options.cells.exists() else {}
    for layout in options.layout or LAYOUTS:
        start = time.monotonic()
        by_rank = together(chosen, LAYOUTS[layout], timeout_s=400)
        cells[layout] = cells.get(layout, {}) | {
            name: {
                key: cell(key, value, [found[name] for found in by_rank])
                for key, value in expected[name].items()
            }
            for name in chosen
        }
        print(f"{layout}: {time.monotonic() - start:.0f} s")
        for name in chosen:
            for feature, text in cells[layout][name].items():
                if text != "yes":
                    print(f"  {name}: {feature}: {text[:600]}", flush=True)
        if options.cells:
            options.cells.write_text(json.dumps(cells))
    if options.write:
        PATH.write_text(as_markdown({layout: cells[layout] for layout in LAYOUTS}))


if __name__ == "__main__":
    main()
