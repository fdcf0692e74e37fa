# SPDX-License-Identifier: Apache-2.0
"""Commands as subprocesses of a test, with everything they start ended afterwards."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RUN_MARK = "LIGHTNING_3D_TEST_RUN"
"""Environment variable that tells which run a process belongs to."""

PATIENCE = float(os.environ.get("LIGHTNING_3D_TEST_PATIENCE", "3"))
"""Every time limit of the tests, which is meant for a machine that does nothing else, is this much longer."""

_TAIL_CHARS = 8000
_KILL_S = 20
"""How long the kernel may take to end what was killed."""


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    killed: int
    """Processes that it started and that were still there `leave_s` after its end."""


class ScriptError(Exception):
    """A command failed or did not end in time; the message holds the end of what it wrote."""


def run_script(
    args: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 120,
    *,
    cwd: str | os.PathLike[str] | None = None,
    check: bool = True,
    leave_s: float = 0,
) -> ScriptResult:
    """Run a command in its own session; nothing that it started outlives the call.

    Args:
        args: The command. A first argument ending in `.py`, or `-m`, is given to this Python.
        env: Changes to the environment; `None` removes a variable.
        timeout_s: Wall-clock limit, times `PATIENCE`. Python processes show their stacks before they are killed.
        cwd: Folder to run in.
        check: Whether a non-zero exit status raises.
        leave_s: How long what it started may go on after its end, before it is killed.

    Raises:
        ScriptError: Time-out, or a non-zero exit status with `check`.
    """
    command = [os.fspath(arg) for arg in args]
    if command[0].endswith(".py") or command[0] == "-m":
        command.insert(0, sys.executable)
    timeout_s *= PATIENCE
    mark = uuid.uuid4().hex
    changes = {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
        RUN_MARK: mark,
    }
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            kill_marked(mark, signal.SIGABRT)  # faulthandler prints the stacks
            time.sleep(0.5)
        finally:
            _wait_for_end(mark, leave_s if process.poll() is not None else 0)
            killed = kill_marked(mark)
            process.wait()
            _wait_for_end(mark, _KILL_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    result = ScriptResult(
        returncode=process.returncode,
        stdout=texts[0],
        stderr=texts[1],
        seconds=time.monotonic() - start,
        killed=killed,
    )
    if timed_out or (check and result.returncode != 0):
        ending = (
            f"did not end within {timeout_s:g} s" if timed_out else f"ended with status {result.returncode}"
        )
        tails = "\n".join(text[-_TAIL_CHARS:] for text in texts)
        raise ScriptError(f"{' '.join(command)} {ending}\n{tails}")
    return result


def marked(mark: str) -> list[int]:
    """The processes that run with this mark in their environment, in whatever session they are.

    torchrun starts its workers in sessions of their own, so their group is not that of the command.
    """
    needle = f"{RUN_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended has no environment either
            if int(entry.name) != os.getpid() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _wait_for_end(mark: str, limit_s: float) -> None:
    over = time.monotonic() + limit_s
    while time.monotonic() < over and marked(mark):
        time.sleep(0.05)


def kill_marked(mark: str, signum: int = signal.SIGKILL) -> int:
    """Signal every process that was started with this mark in its environment; returns how many."""
    processes = marked(mark)
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signum)
    return len(processes)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def set_environment(changes: Mapping[str, str | None]) -> None:
    """Set variables of this process; `None` removes one."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
