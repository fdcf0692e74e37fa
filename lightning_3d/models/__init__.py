# SPDX-License-Identifier: Apache-2.0
"""Where a `ModelShape` comes from: a known name, a Hugging Face config, or a module."""

from lightning_3d.models.catalogue import known_models, load_shape
from lightning_3d.models.config import shape_from_config
from lightning_3d.models.module import readable_shape, shape_of_module

__all__ = ["known_models", "load_shape", "readable_shape", "shape_from_config", "shape_of_module"]
