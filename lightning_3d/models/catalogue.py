# SPDX-License-Identifier: Apache-2.0
"""Models by name: their dimensions ship as data, so that planning works without a network."""

import json
import re
from pathlib import Path
from typing import Any

from lightning_3d.errors import ModelError
from lightning_3d.models.config import shape_from_config
from lightning_3d.shape import ModelShape

_FOLDER = Path(__file__).parent / "known"
_SAME_DIMENSIONS = re.compile(r"^meta-|-(instruct|chat|base|hf|it|pt|bf16|fp8|v0\.\d|\d{4})(?=-|$)")
"""Parts of a hub name that do not change a model's dimensions."""


def known_models() -> list[str]:
    """Names of the models whose dimensions ship with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_shape(source: str | Path) -> ModelShape:
    """The shape of a model given by a known name, a hub name, or a `config.json` (or the folder that holds it).

    Raises:
        ModelError: the name is unknown and no such file exists, or the file is not a model config.

    >>> load_shape("meta-llama/Llama-3.1-405B").num_layers
    126
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return shape_from_config(_read(path), name=path.stem if path.stem != "config" else path.parent.name)
    stem = _stem(str(source))
    known = _FOLDER / f"{stem}.json"
    if not known.is_file():
        known = _by_hub_name(str(source)) or known
    if not known.is_file():
        near = [name for name in known_models() if name.split("-")[0] == stem.split("-")[0]]
        raise ModelError(
            f"model {str(source)!r} is neither a file nor a known name."
            f" Give a config.json, or one of: {', '.join(near or known_models())}."
        )
    return shape_from_config(_read(known), name=known.stem)


def _stem(name: str) -> str:
    stem = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    previous = None
    while stem != previous:
        previous, stem = stem, _SAME_DIMENSIONS.sub("", stem)
    return stem


def _by_hub_name(name: str) -> Path | None:
    """The known model whose hub name matches, looked up only if the file name does not."""
    for path in _FOLDER.glob("*.json"):
        hub = _read(path).get("_hub", "")
        if hub and _stem(hub) == _stem(name):
            return path
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}). Give the model's config.json.") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds a {type(content).__name__}, not a config. Give the model's config.json."
        )
    return content
