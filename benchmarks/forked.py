# SPDX-License-Identifier: Apache-2.0
"""Ranks as forked processes that a benchmark may kill: nothing but their ids holds them together."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def start_ranks(world_size: int, body: Callable[[int], None], outputs: Path | None = None) -> list[int]:
    """Forks the ranks and returns their process ids.

    Args:
        world_size: how many.
        body: what a rank does, given its number; it exits with 0 behind it, and with 1 after an exception.
        outputs: a folder for what each rank writes, as `output-<rank>`; None leaves it on the screen.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            try:
                if outputs is not None:
                    output = os.open(outputs / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                torch.set_num_threads(1)
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    NODE_RANK="0",
                    WORLD_SIZE=str(world_size),
                    LOCAL_WORLD_SIZE=str(world_size),
                    GROUP_RANK="0",
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    TORCHELASTIC_RUN_ID="kill",
                )
                body(rank)
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        pids.append(pid)
    return pids
