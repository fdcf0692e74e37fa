# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed itself and its compiled operators: whether they are there, and what keeps them from being built.

[Note: operators]
DeepSpeed compiles an operator when it is first used and keeps it in `TORCH_EXTENSIONS_DIR` (by default torch's cache in
the home directory): `cpu_adam` takes about a minute, `async_io` longer. A build that is killed leaves a file `lock`
behind, for which every later process would wait without a word; a lock that no process holds open is removed here.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_3d.compat import extension_folder
from lightning_3d.errors import SupportError

INSTALL = "pip install 'lightning-3d[deepspeed]'"
_SHARED_MEMORY = "deepspeed_shm_comm"
_CPU_ADAM = "cpu_adam"
_ASYNC_IO = "async_io"
OPERATORS = (_CPU_ADAM, _ASYNC_IO, "pin_memory", _SHARED_MEMORY)
"""Those that are built for a CPU; also the names of their folders."""


def check_installed() -> None:
    """Says how to install DeepSpeed where it is missing.

    Raises:
        SupportError: it is.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise SupportError(f"ZeRO offload runs on DeepSpeed, which is not installed. {INSTALL}")


def before_import() -> None:
    """What must be said before DeepSpeed is imported: it looks for a device once, and compiles nothing on a CPU."""
    check_installed()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def choose_accelerator(device: torch.device) -> None:
    """Makes DeepSpeed use the kind of device that the Trainer uses; it decides by itself when it is first imported.

    Raises:
        SupportError: it is imported already, and has decided otherwise.
    """
    if device.type == "cpu" and "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if chosen != device.type:
        raise SupportError(
            f"DeepSpeed was imported for {chosen}, and the Trainer runs on {device.type}. Set the environment variable"
            f" DS_ACCELERATOR={device.type} before anything imports deepspeed."
        )
    if device.type == "cpu":
        _without_shared_memory()


def _without_shared_memory() -> None:
    """Gloo instead of an operator that DeepSpeed would compile for a faster all-reduce between sockets of one host."""
    import deepspeed.ops

    if not _is_built(_SHARED_MEMORY):
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False


def remove_stale_locks() -> list[str]:
    """Removes the locks of builds that no process works on, on this host.

    Returns:
        The operators that were locked.
    """
    locks = [path for name in OPERATORS if (path := extension_folder(name) / "lock").is_file()]
    held = _open_files() if locks else set()
    stale = [path for path in locks if held is not None and str(path.resolve()) not in held]
    for path in stale:
        with suppress(FileNotFoundError):
            path.unlink()
    return [path.parent.name for path in stale]


def _open_files() -> set[str] | None:
    """Files that processes of this host hold open; None where the system does not say."""
    if not Path("/proc/self/fd").is_dir():
        return None
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.add(os.readlink(link))
    return found


def cpu_adam_builds() -> str | None:
    """Builds, or loads, DeepSpeed's Adam for CPUs.

    Returns:
        What keeps it from being built; None if nothing does.
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder

    if not _is_built(_CPU_ADAM):
        missing = [tool for tool in ("ninja", "g++") if shutil.which(tool) is None and not _is_module(tool)]
        if missing:
            return f"{' and '.join(missing)} not found"
    remove_stale_locks()
    return _build(CPUAdamBuilder())


def _is_built(name: str) -> bool:
    return any(extension_folder(name).glob(f"{name}*.so"))


def _is_module(tool: str) -> bool:
    return importlib.util.find_spec(tool) is not None if tool.isidentifier() else False


def _build(builder: Any) -> str | None:
    try:
        builder.load(verbose=False)
    except Exception as error:
        return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return None


def check_nvme(folder: str) -> None:
    """Checks what offload to a disk needs, before any process starts.

    Raises:
        SupportError: the operator cannot be built, or the folder is on a file system without direct I/O.
    """
    path = Path(folder)
    if not path.is_dir():
        raise SupportError(f"nvme_path={folder!r} is no folder. Make one on a local disk.")
    if not direct_io(path):
        raise SupportError(
            f"nvme_path={folder!r} is on a file system without direct I/O (O_DIRECT), which DeepSpeed's {_ASYNC_IO}"
            " needs. Use a folder on a local disk (ext4, xfs), not one in memory (tmpfs) or on overlayfs."
        )
    if _is_built(_ASYNC_IO):
        return
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise SupportError(
            f"Offload to NVMe needs DeepSpeed's {_ASYNC_IO}, which needs libaio. Run scripts/install_libaio.sh"
            " (Debian: apt-get install libaio-dev; Red Hat: dnf install libaio-devel)."
        )


def direct_io(folder: Path) -> bool:
    """Whether files in a folder open with O_DIRECT."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    handle, name = tempfile.mkstemp(dir=folder)
    os.close(handle)
    try:
        os.close(os.open(name, os.O_RDWR | flag))
    except OSError:
        return False
    finally:
        os.unlink(name)
    return True
