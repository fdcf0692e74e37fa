# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's compiled operators: Adam on the host, and state on a disk. `-m deepspeed_ops` runs these alone."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_3d.zero import operators
from tests.engine.runs import TP2, lm, strategy_of
from tests.zero.runs import BATCHES, Scheduled, difference, largest_error, on_ranks, train, zero

pytestmark = [pytest.mark.deepspeed_ops, pytest.mark.timeout(1500)]

TOLERANCE = 1e-4
BUILD_S = 1200  # of what is not cached
WIDE = {"dim": 128, "hidden_dim": 512, "n_layers": 3}
"""More than a megabyte of masters a rank: less than that DeepSpeed leaves in memory."""


def module():
    return lm("adamw", Scheduled, **WIDE)


def small():
    return lm("adamw", Scheduled)


@pytest.fixture
def disk(tmp_path):
    """A folder with direct I/O; the tests of a machine without one say so."""
    for folder in (Path(os.environ.get("NVME_PATH", tmp_path)), tmp_path, Path.home(), Path("/var/tmp")):
        if folder.is_dir() and operators.direct_io(folder):
            return folder
    pytest.skip("no file system here opens files with O_DIRECT; NVME_PATH may name one")
    return None


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3}, {"stage": 1}])
def test_deepspeeds_adam_takes_torchs_steps(options):
    """With the learning rates that the scheduler sets on torch's."""
    reference = train("auto", module=small)

    def body():
        return train(zero(**options, offload_optimizer="cpu", cpu_adam="deepspeed"), devices=2, module=small)

    for record in on_ranks(2, body, timeout_s=BUILD_S):
        assert record.rates == reference.rates
        assert difference(record.losses, reference.losses) < TOLERANCE


def test_deepspeeds_adam_resumes_as_torchs(tmp_path):
    reference = train("auto", module=small, batches=BATCHES[:6])

    def first():
        strategy = zero(stage=2, cpu_adam="deepspeed")
        return train(strategy, devices=2, module=small, max_steps=2, save=tmp_path / "a.ckpt")

    def second():
        paths = {"resume": tmp_path / "a.ckpt", "save": tmp_path / "b.ckpt"}
        return train(strategy_of(TP2), devices=2, module=small, max_steps=4, **paths)

    def third():
        strategy = zero(stage=3, offload_optimizer="cpu", cpu_adam="deepspeed")
        return train(strategy, devices=2, module=small, max_steps=6, resume=tmp_path / "b.ckpt")

    legs = [on_ranks(2, body, timeout_s=BUILD_S)[0] for body in (first, second, third)]
    assert difference([loss for leg in legs for loss in leg.losses], reference.losses) < TOLERANCE
    assert largest_error(legs[2].parameters, reference.parameters) < TOLERANCE


def test_optimizer_on_a_disk_equals_one_process(disk, tmp_path):
    """Twenty steps; then the state that is on the disk resumes under tensor parallelism and comes back."""
    before = set(disk.iterdir())
    reference = train("auto", module=module)
    options = {"stage": 3, "offload_optimizer": "nvme", "nvme_path": disk}

    def body():
        strategy = zero(**options)
        record = train(strategy, devices=2, module=module)
        num_files = len(list(Path(str(strategy._folder)).rglob("*.swp")))
        dist.barrier()
        if dist.get_rank() == 0:
            strategy._remove_folder()  # as at the end of a process; a rank here ends by os._exit
        return record, num_files

    for record, num_files in on_ranks(2, body, timeout_s=BUILD_S):
        assert len(record.losses) == 20
        assert num_files >= 3, "nothing was swapped"
        assert difference(record.losses, reference.losses) < TOLERANCE
    assert set(disk.iterdir()) <= before, "a run leaves nothing on the disk"

    def leg(number, strategy):
        paths = {
            "resume": tmp_path / f"{number - 1}.ckpt" if number else None,
            "save": tmp_path / f"{number}.ckpt",
        }
        return train(strategy, devices=2, module=module, max_steps=2 * number + 2, **paths)

    makes = [lambda: zero(**options), lambda: strategy_of(TP2), lambda: zero(**options)]
    losses = []
    for number, make in enumerate(makes):
        losses += on_ranks(2, lambda: leg(number, make()), timeout_s=BUILD_S)[0].losses  # noqa: B023
    assert difference(losses, reference.losses[:6]) < TOLERANCE


def test_parameters_on_a_disk_are_close_in_bf16(disk):
    reference = train("auto", module=module, batches=BATCHES[:6])
    options = {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": disk}

    def body():
        return train(zero(**options), devices=2, module=module, batches=BATCHES[:6], precision="bf16-mixed")

    for record in on_ranks(2, body, timeout_s=BUILD_S):
        scale = max(abs(loss) for loss in reference.losses)
        assert difference(record.losses, reference.losses) < 0.05 * scale


def test_operators_are_cached():
    """Building again is loading: DeepSpeed's cache is in use."""
    import time

    assert operators.cpu_adam_builds() is None
    start = time.process_time()
    assert operators.cpu_adam_builds() is None
    assert time.process_time() - start < 5
    assert any(operators.extension_folder("cpu_adam").glob("*.so"))
