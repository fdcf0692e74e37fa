# SPDX-License-Identifier: Apache-2.0
"""What a user asks of ZeRO, checked, and as the configuration that DeepSpeed reads."""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_3d.errors import PlanError

Device = Literal["none", "cpu", "nvme"]
DEVICES = ("none", "cpu", "nvme")
STAGES = (1, 2, 3)

MAX_BUCKET_ELEMENTS = 200_000_000

_FROM_ELSEWHERE = {
    "optimizer": "Return it from configure_optimizers().",
    "scheduler": "Return it from configure_optimizers().",
    "amp": "Use Trainer(precision=...).",
    "tensor_parallel": 'Use strategy="3d" with tp=...',
    "pipeline": 'Use strategy="3d" with pp=...',
    "elasticity": "Use the Trainer's devices and num_nodes.",
}
"""Sections of a DeepSpeed configuration that something else decides here, and what does."""

_UNKNOWN_PARTITIONS = ("zenflow", "mics_shard_size", "zero_hpz_partition_size", "zero_quantized_weights")
"""Keys of `zero_optimization` with another partition of the state than the one that checkpoints are made of."""

_HALF = {"16": "fp16", "bf16": "bf16"}
"""Precision of the Trainer, without its mode, to DeepSpeed's section."""


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """A ZeRO stage and where its state lives."""

    stage: int = 2
    """1 partitions optimizer state, 2 gradients too, 3 parameters too."""
    offload_optimizer: Device = "cpu"
    """Where optimizer state and its step live."""
    offload_params: Device = "none"
    """Where parameters that are not in use live; stage 3."""
    nvme_path: str | None = None
    """A folder on a local disk, for what is on `nvme`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further DeepSpeed configuration; goes before our defaults."""

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise PlanError(
                f"stage={self.stage!r}: ZeRO has the stages 1, 2 and 3. Use strategy='ddp' for none of them."
            )
        for name in ("offload_optimizer", "offload_params"):
            if getattr(self, name) not in DEVICES:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} is no place for it. Use 'none', 'cpu' or 'nvme'."
                )
        if self.stage < 3 and self.offload_params != "none":
            raise PlanError(
                f"offload_params={self.offload_params!r} needs stage=3: stage {self.stage} keeps parameters whole."
                " Use stage=3, or offload_params='none'."
            )
        if self.stage < 3 and self.offload_optimizer == "nvme":
            raise PlanError(
                f"offload_optimizer='nvme' needs stage=3: DeepSpeed ignores it in stage {self.stage}. Use stage=3, or"
                " offload_optimizer='cpu'."
            )
        if self.uses_nvme and self.nvme_path is None:
            raise PlanError("Offload to 'nvme' needs nvme_path, a folder on a local disk.")
        _check_config(self.config)

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is kept on a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_params)

    def check_precision(self, precision: str) -> None:
        """Refuses what DeepSpeed ignores, or does otherwise, in a precision of the Trainer.

        Raises:
            PlanError: the precision does not go with the options.
        """
        if self.offload_params == "nvme" and not precision.startswith("bf16"):
            raise PlanError(
                f"offload_params='nvme' with precision={precision!r}: DeepSpeed keeps parameters on disk in bf16 only."
                " Use precision='bf16-mixed', or offload_params='cpu'."
            )
        wanted = _half_of(precision)
        for section in _HALF.values():
            given = self.config.get(section, {}).get("enabled")
            if given not in (None, "auto", section == wanted):
                raise PlanError(
                    f"The DeepSpeed config has {section}.enabled={given} and the Trainer precision={precision!r}."
                    " Leave it to Trainer(precision=...)."
                )

    def for_evaluation(self) -> "ZeroOptions":
        """The same without what needs an optimizer; parameters stay in memory."""
        params: Device = "cpu" if self.offload_params == "nvme" else self.offload_params
        return ZeroOptions(
            stage=self.stage, offload_optimizer="none", offload_params=params, config=self.config
        )

    def deepspeed_config(
        self,
        *,
        precision: str,
        accumulated: int,
        clip_norm: float | None,
        num_elements: int,
        largest_elements: int,
    ) -> dict[str, Any]:
        """The configuration of a run, which goes to DeepSpeed as it is.

        Args:
            precision: of the Trainer.
            accumulated: batches of an optimizer step.
            clip_norm: of the Trainer; None leaves it to the config, and without one nothing is clipped.
            num_elements: parameters of the model.
            largest_elements: of its largest parameter.

        Raises:
            PlanError: the Trainer and the given config disagree.
        """
        config = deepcopy(dict(self.config))
        zero = {**self._zero_defaults(num_elements, largest_elements), **config.get("zero_optimization", {})}
        zero["stage"] = self.stage
        config["zero_optimization"] = zero
        config["gradient_accumulation_steps"] = _agreed(
            config, "gradient_accumulation_steps", accumulated, "accumulate_grad_batches"
        )
        given_clip = config.get("gradient_clipping", "auto")
        # DeepSpeed clips at 1.0 where nothing is said.
        config["gradient_clipping"] = (
            _agreed(config, "gradient_clipping", clip_norm, "gradient_clip_val")
            if clip_norm is not None
            else (0.0 if given_clip == "auto" else given_clip)
        )
        # Only DeepSpeed's own counters of samples read these; what was given is compared with the loader's.
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            config.pop(name, None)
        config["train_micro_batch_size_per_gpu"] = 1
        half = _half_of(precision)
        if half is not None:
            config[half] = {**config.get(half, {}), "enabled": True}
        config.setdefault("zero_allow_untested_optimizer", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        config.setdefault("steps_per_print", 10**9)
        return config

    def check_batch_size(self, per_rank: int | None, accumulated: int, num_ranks: int) -> None:
        """Compares batch sizes in the config, which decide nothing here, with those of a run.

        Args:
            per_rank: the loader's; None where it has none.
            accumulated: batches of an optimizer step.
            num_ranks: that read different batches.

        Raises:
            PlanError: they differ.
        """
        if per_rank is None:
            return
        whole = per_rank * accumulated * num_ranks
        for name, value in (("train_micro_batch_size_per_gpu", per_rank), ("train_batch_size", whole)):
            given = self.config.get(name, "auto")
            if given not in ("auto", value):
                raise PlanError(
                    f"The DeepSpeed config has {name}={given}, but the loader's batches of {per_rank}, {accumulated} of"
                    f" them a step on {num_ranks} ranks, make {value}. Leave it to the loader."
                )

    def _zero_defaults(self, num_elements: int, largest_elements: int) -> dict[str, Any]:
        bucket = max(2, min(MAX_BUCKET_ELEMENTS, num_elements + num_elements % 2))
        zero: dict[str, Any] = {
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        }
        if self.offload_optimizer != "none":
            zero["offload_optimizer"] = {
                "device": self.offload_optimizer,
                **self._on_disk("offload_optimizer"),
            }
        if self.offload_params != "none":
            zero["offload_param"] = {"device": self.offload_params, **self._on_disk("offload_params")}
        if self.offload_params == "nvme":
            # Without these nothing leaves the memory, or a prefetch waits for buffers that are all taken.
            zero["offload_param"] |= {"max_in_cpu": 0, "buffer_size": max(largest_elements, 1)}
            zero["stage3_prefetch_bucket_size"] = 0
        return zero

    def _on_disk(self, name: str) -> dict[str, Any]:
        return {"nvme_path": self.nvme_path} if getattr(self, name) == "nvme" else {}


def read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """A DeepSpeed configuration from a dict or a JSON file.

    Raises:
        PlanError: the file is not there, or no JSON object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"config={str(path)!r} does not read as a DeepSpeed config ({error})."
            " Give a dict, or the path of a JSON file."
        ) from None
    if not isinstance(content, dict):
        raise PlanError(
            f"config={str(path)!r} holds a {type(content).__name__}, not a JSON object."
            " Give the sections of DeepSpeed's configuration."
        )
    return content


def resolve_options(
    defaults: Mapping[str, Any], given: Mapping[str, Any], config: Mapping[str, Any]
) -> ZeroOptions:
    """Puts arguments and configuration together; an argument that is None is taken from the config, or the defaults.

    Args:
        defaults: of the strategy, by field of `ZeroOptions`.
        given: the user's arguments.
        config: the user's DeepSpeed configuration.

    Raises:
        PlanError: an argument and the config disagree, or the options cannot be.
    """
    zero = config.get("zero_optimization", {})
    optimizer, params = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    configured = {
        "stage": zero.get("stage"),
        "offload_optimizer": optimizer.get("device"),
        "offload_params": params.get("device"),
        "nvme_path": optimizer.get("nvme_path") or params.get("nvme_path"),
    }
    chosen: dict[str, Any] = {}
    for name, there in configured.items():
        wanted = _plain(given.get(name))
        if None not in (wanted, there) and wanted != there:
            raise PlanError(
                f"{name}={wanted!r}, but the DeepSpeed config says {there!r}. Say it in one place."
            )
        chosen[name] = next((each for each in (wanted, there) if each is not None), defaults.get(name))
    return ZeroOptions(**chosen, config=config)


def _plain(value: Any) -> Any:
    """An argument in the form that options have it: a path as text, a switch as a place."""
    if isinstance(value, bool):
        return "cpu" if value else "none"
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_config(config: Mapping[str, Any]) -> None:
    for section, remedy in _FROM_ELSEWHERE.items():
        if config.get(section):
            raise PlanError(f"The DeepSpeed config has the section {section!r}. {remedy}")
    zero = config.get("zero_optimization", {})
    for key in _UNKNOWN_PARTITIONS:
        if zero.get(key) not in (None, False, 0, 1, -1):
            raise PlanError(
                f"zero_optimization.{key}={zero[key]!r} partitions state in a way that checkpoints here do not know."
                " Leave it out."
            )
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        raise PlanError(
            "zero_optimization.offload_optimizer.super_offload is not supported here. Leave it out."
        )


def _half_of(precision: str) -> str | None:
    return _HALF.get(precision.partition("-")[0])


def _agreed(config: Mapping[str, Any], key: str, value: Any, trainer_name: str) -> Any:
    given = config.get(key, "auto")
    if given not in ("auto", value):
        raise PlanError(
            f"The DeepSpeed config has {key}={given} and the Trainer {trainer_name}={value}. Leave it to the Trainer."
        )
    return value
