# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused in one line, before anything starts; the config that DeepSpeed gets."""

import importlib.util
import json

import pytest

from lightning_3d.errors import PlanError, SupportError
from lightning_3d.strategies import ZeroInfinityStrategy, ZeroOffloadStrategy
from lightning_3d.zero import operators
from lightning_3d.zero.options import ZeroOptions, read_config, resolve_options

RUN = {
    "precision": "32-true",
    "accumulated": 1,
    "clip_norm": None,
    "num_elements": 1000,
    "largest_elements": 100,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage=4"),
        ({"stage": 0}, "stage=0"),
        (
            {"stage": 2, "offload_optimizer": "nvme", "nvme_path": "/tmp"},
            "needs stage=3: DeepSpeed ignores it",
        ),
        ({"stage": 2, "offload_params": "cpu"}, "offload_params='cpu' needs stage=3"),
        ({"stage": 3, "offload_optimizer": "nvme"}, "needs nvme_path"),
        ({"stage": 3, "offload_optimizer": "gpu"}, "Use 'none', 'cpu' or 'nvme'"),
        ({"config": {"optimizer": {"type": "Adam"}}}, "configure_optimizers"),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, "configure_optimizers"),
        ({"config": {"tensor_parallel": {"autotp_size": 2}}}, "tp="),
        ({"config": {"zero_optimization": {"zero_hpz_partition_size": 8}}}, "Leave it out"),
        (
            {"stage": 1, "config": {"zero_optimization": {"stage": 2}}},
            "stage=1, but the DeepSpeed config says 2",
        ),
        ({"config": "/nowhere.json"}, "does not read"),
        ({"pp": 2}, "pp=2"),
        ({"tp": 2}, "tp=2"),
    ],
)
def test_refused_when_made(options, message):
    pytest.importorskip("deepspeed")
    with pytest.raises(PlanError, match=message):
        ZeroOffloadStrategy(**options)


def test_unknown_options_are_no_options():
    with pytest.raises(TypeError, match="no option 'stagee'"):
        ZeroOffloadStrategy(stagee=2)


def test_parameters_on_a_disk_need_bf16():
    options = ZeroOptions(stage=3, offload_optimizer="cpu", offload_params="nvme", nvme_path="/tmp")
    options.check_precision("bf16-mixed")
    with pytest.raises(PlanError, match="in bf16 only"):
        options.check_precision("32-true")


def test_precision_is_the_trainers():
    options = ZeroOptions(config={"bf16": {"enabled": True}})
    options.check_precision("bf16-mixed")
    with pytest.raises(PlanError, match=r"bf16\.enabled=True .* precision='32-true'"):
        options.check_precision("32-true")


@pytest.mark.parametrize(
    ("key", "given", "trainer"),
    [("gradient_accumulation_steps", 2, {"accumulated": 4}), ("gradient_clipping", 1.0, {"clip_norm": 0.5})],
)
def test_what_the_trainer_says_may_be_repeated(key, given, trainer):
    (value,) = trainer.values()
    with pytest.raises(PlanError, match=f"{key}={given} and the Trainer .*={value}"):
        ZeroOptions(config={key: given}).deepspeed_config(**{**RUN, **trainer})
    for same in (value, "auto"):
        assert ZeroOptions(config={key: same}).deepspeed_config(**{**RUN, **trainer})[key] == value


def test_nothing_is_clipped_unless_asked():
    """DeepSpeed's own default clips at 1.0."""
    assert ZeroOptions().deepspeed_config(**RUN)["gradient_clipping"] == 0.0
    given = ZeroOptions(config={"gradient_clipping": 0.3})
    assert given.deepspeed_config(**RUN)["gradient_clipping"] == 0.3


def test_further_config_goes_before_our_defaults(tmp_path):
    path = tmp_path / "zero.json"
    content = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "wall_clock_breakdown": False}
    path.write_text(json.dumps(content))
    options = resolve_options(ZeroOffloadStrategy.default_options, {}, read_config(path))
    assert (options.stage, options.offload_optimizer) == (3, "cpu")
    config = options.deepspeed_config(**{**RUN, "precision": "bf16-mixed"})
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["wall_clock_breakdown"] is False
    assert config["bf16"] == {"enabled": True}


def test_batch_sizes_of_the_config_are_those_of_the_run():
    options = ZeroOptions(config={"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2})
    options.check_batch_size(2, 4, 2)
    options.check_batch_size(None, 1, 1)
    with pytest.raises(PlanError, match=r"train_batch_size=16, but .* make 32"):
        options.check_batch_size(2, 8, 2)
    with pytest.raises(PlanError, match=r"train_micro_batch_size_per_gpu=2, but .* make 4"):
        options.check_batch_size(4, 2, 2)


def test_infinity_is_stage_3_on_a_disk(tmp_path):
    pytest.importorskip("deepspeed")
    options = ZeroInfinityStrategy(nvme_path=tmp_path).options
    assert (options.stage, options.offload_optimizer, options.offload_params) == (3, "nvme", "cpu")
    evaluation = options.for_evaluation()
    assert (evaluation.stage, evaluation.offload_optimizer) == (3, "none")


def test_without_deepspeed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(SupportError, match=r"pip install 'lightning-3d\[deepspeed\]'"):
        ZeroOffloadStrategy()


def test_locks_that_nobody_holds_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in operators.OPERATORS:
        (tmp_path / name).mkdir()
    stale, held = tmp_path / "cpu_adam" / "lock", tmp_path / "async_io" / "lock"
    stale.touch()
    with held.open("w"):
        assert operators.remove_stale_locks() == ["cpu_adam"]
        assert held.exists()
        assert not stale.exists()


def test_a_disk_needs_direct_io(tmp_path):
    with pytest.raises(SupportError, match="is no folder"):
        operators.check_nvme(str(tmp_path / "missing"))
