# SPDX-License-Identifier: Apache-2.0
"""The real S3 client against a server of its protocol; runs where s3fs and moto are installed."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.checkpoint import (
    AsyncCheckpointer,
    is_checkpoint,
    link_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    read_metadata,
    remove_checkpoint,
    save_checkpoint,
)
from lightning_3d.checkpoint.places import place_of
from lightning_3d.errors import CheckpointError
from tests.harness import run_ranks
from tests.processes import free_port

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytest.importorskip("flask")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }.items():
        monkeypatch.setenv(name, value)
    try:
        _make_bucket(address)
        yield "s3://bucket/run"
    finally:
        server.kill()
        server.wait()


def _make_bucket(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _model(value: float) -> nn.Module:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.mark.timeout(240)
def test_two_ranks(bucket: str) -> None:
    """Saved, replaced, linked, listed, loaded by ranks of their own; written behind; removed; refused."""

    def body() -> Any:
        rank = dist.get_rank()
        model = nn.ModuleDict({str(rank): _model(rank)})
        path = f"{bucket}/step=1.ckpt"
        for step in (0, 1):
            save_checkpoint(path, model=model, metadata={"step": step})
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        assert load_checkpoint(path, model=model) == {"step": 1}
        assert all(bool((parameter == rank).all()) for parameter in model.parameters())
        checkpointer = AsyncCheckpointer()
        checkpointer.save(f"{bucket}/step=2.ckpt", model=model, metadata={"step": 2})
        checkpointer.close()
        if rank == 0:
            link_checkpoint(f"{bucket}/step=2.ckpt", f"{bucket}/last.ckpt")
            remove_checkpoint(path)
        dist.barrier()
        assert read_metadata(f"{bucket}/last.ckpt") == {"step": 2}
        assert str(newest_checkpoint(bucket)) == f"{bucket}/step=2.ckpt"
        assert not is_checkpoint(path)
        assert not place_of(path).exists()
        texts = []
        for action in (
            lambda: load_checkpoint(path, model=model),
            lambda: save_checkpoint("s3://nobody/a.ckpt", model=model, metadata={}),
        ):
            with pytest.raises(CheckpointError) as error:
                action()
            texts.append(str(error.value))
        return texts

    results = run_ranks(2, body, timeout_s=200)
    assert results[0] == results[1]
    missing, no_bucket = results[0]
    assert (
        "step=1.ckpt does not exist. The newest whole one beside it is s3://bucket/run/step=2.ckpt" in missing
    )
    assert "FileNotFoundError" in no_bucket
