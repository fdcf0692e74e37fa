# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one machine for a test: forked from the warm pytest process, or as a script.

`run_ranks` forks, so a rank costs milliseconds where torchrun costs seconds; `run_script` starts a real
command. Both end everything they started, whatever happens, and neither waits longer than its time limit.

```python
def body() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()

assert run_ranks(4, body) == [6.0] * 4
```

[Note: one thread] A fork copies the forking thread alone. OpenMP's pool of a parent with several threads is
gone in the child, which waits for it for ever; so parent and children use one thread (`tests/conftest.py`
sets it before torch is imported).

[Note: what the parent had] The same goes for process groups: the destructor of one that the parent made waits for its
threads, which the child has not. So a child must never collect what was garbage in the parent, and the parent keeps no
mesh of a world that is gone (`tests/conftest.py`).
"""

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.processes import (
    PATIENCE,
    RUN_MARK,
    ScriptError,
    ScriptResult,
    free_port,
    kill_marked,
    run_script,
    set_environment,
)

__all__ = [
    "RankResults",
    "RanksError",
    "RanksTimeoutError",
    "ScriptError",
    "ScriptResult",
    "run_ranks",
    "run_script",
]

COLLECTIVE_TIMEOUT_S = 60 * PATIENCE
"""How long a gloo collective waits for a rank that never comes."""

_STACKS_SIGNAL = signal.SIGUSR2
_GRACE_S = 3.0 * PATIENCE
_PR_SET_PDEATHSIG = 1
_TAIL_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """What one rank died of."""

    rank: int
    type_name: str
    """Class of the exception, `"exit"` for a silent end, `"timeout"` for a rank that was killed."""
    message: str
    details: str
    """The traceback, or the stacks of a rank that was killed."""
    output: str
    """What the rank wrote to stdout and stderr."""

    def __str__(self) -> str:
        text = f"--- rank {self.rank}: {self.type_name}: {self.message}\n{self.details.rstrip()}"
        if self.output.strip():
            text += f"\n--- rank {self.rank} wrote:\n{self.output.strip()[-_TAIL_CHARS:]}"
        return text


class RanksError(Exception):
    """One or more ranks failed; `failures` has them by rank, the first to fail first."""

    def __init__(self, failures: Sequence[RankFailure], world_size: int) -> None:
        self.failures = {failure.rank: failure for failure in failures}
        first, *rest = failures
        text = f"rank {first.rank} of {world_size} failed: {first.type_name}: {first.message}\n{first}"
        super().__init__("\n".join([text, *(str(failure) for failure in rest)]))


class RanksTimeoutError(RanksError):
    """The time limit passed; the message names the ranks that were still running and shows their stacks."""


class RankResults(list[Any]):
    """The return values by rank; `outputs` holds what each rank wrote to stdout and stderr."""

    outputs: list[str]


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    env: Mapping[str, str | None] | None = None,
    init: bool = True,
) -> RankResults:
    """Run `fn(*args)` on `world_size` forked ranks and return what each returned.

    Args:
        world_size: Number of processes.
        fn: Any callable, closures included; it finds its rank by `dist.get_rank()` or in `RANK`.
        args: Passed on; nothing is pickled on the way in.
        timeout_s: Wall-clock limit for all ranks together, times `PATIENCE`.
        env: Environment of the ranks; `None` removes a variable.
        init: Whether to initialise torch.distributed (gloo over a file). Without, the environment is as under
            torchrun, so that a `Trainer` finds its ranks and initialises by itself.

    Raises:
        RanksError: A rank raised or died. After the first failure the others get a few seconds to fail too.
        RanksTimeoutError: The time limit passed.
    """
    if not init:
        import lightning.pytorch  # noqa: F401  # imported here once, not in every child
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _Launch(Path(folder), world_size, timeout_s * PATIENCE).run(
            lambda: fn(*args), dict(env or {}), init
        )


class _Launch:
    """One set of forked ranks: their processes, files and failures."""

    def __init__(self, folder: Path, world_size: int, timeout_s: float) -> None:
        self.folder = folder
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.mark = uuid.uuid4().hex
        self.pids: dict[int, int] = {}
        self.results: dict[int, Any] = {}
        self.failures: list[RankFailure] = []

    def run(self, body: Callable[[], Any], env: dict[str, str | None], init: bool) -> RankResults:
        environment = {**_rank_environment(self.world_size), RUN_MARK: self.mark, **env}
        read_end, write_end = os.pipe()  # closed by the parent when every rank has reported: "you may leave"
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # see [Note: what the parent had]
        try:
            for rank in range(self.world_size):
                pid = os.fork()
                if pid == 0:
                    os.close(write_end)
                    _child(self.folder, rank, self.world_size, body, environment, init, read_end)
                self.pids[rank] = pid
            gc.unfreeze()
            self._wait()
        finally:
            os.close(write_end)
            os.close(read_end)
            self._end_all()
        if self.failures:
            kind = RanksTimeoutError if self.failures[0].type_name == "timeout" else RanksError
            raise kind(self.failures, self.world_size)
        results = RankResults(self.results[rank] for rank in range(self.world_size))
        results.outputs = [self._output(rank) for rank in range(self.world_size)]
        return results

    def _wait(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        running = set(self.pids)
        while running:
            reported = {rank for rank in running if self._collect(rank)}
            running -= reported
            if reported and self.failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            if running and time.monotonic() > deadline:
                self._give_up(running)
                return
            time.sleep(0.002)

    def _collect(self, rank: int) -> bool:
        """Take the rank's report, if there is one or if its process has ended."""
        report = self.folder / f"report-{rank}"
        ended, status = os.waitpid(self.pids[rank], os.WNOHANG)
        if report.exists():
            kind, value = pickle.loads(report.read_bytes())
            if kind == "result":
                self.results[rank] = value
            else:
                self._fail(rank, *value)
            return True
        if ended:
            code = os.waitstatus_to_exitcode(status)
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            details = self._stacks(rank) or (_kernel_log() if code < 0 else "")
            self._fail(rank, "exit", f"the process ended without a result ({reason})", details)
            return True
        return False

    def _give_up(self, running: set[int]) -> None:
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], _STACKS_SIGNAL)
        time.sleep(0.3)
        message = f"still running after {self.timeout_s:g} s (ranks {sorted(running)}); killed"
        if self.failures:
            message = f"still running {_GRACE_S:g} s after another rank failed; killed"
        for rank in sorted(running):
            self._fail(rank, "timeout", message, self._stacks(rank))

    def _fail(self, rank: int, type_name: str, message: str, details: str) -> None:
        failure = RankFailure(
            rank=rank, type_name=type_name, message=message, details=details, output=self._output(rank)
        )
        self.failures.append(failure)

    def _output(self, rank: int) -> str:
        path = self.folder / f"output-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def _stacks(self, rank: int) -> str:
        path = self.folder / f"stacks-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def _end_all(self) -> None:
        """End every rank with its process group; on a failure also what a rank started in another session."""
        if not self.failures and len(self.results) == self.world_size:
            _wait_until(lambda: all(_has_ended(pid) for pid in self.pids.values()), 1.0)
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self.pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if len(self.results) < self.world_size:
            kill_marked(self.mark)


def _rank_environment(world_size: int) -> dict[str, str | None]:
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _child(
    folder: Path,
    rank: int,
    world_size: int,
    body: Callable[[], Any],
    environment: Mapping[str, str | None],
    init: bool,
    leave: int,
) -> NoReturn:
    """A rank's whole life. It never returns into pytest's frames."""
    try:
        _detach(folder, rank)
        set_environment({"RANK": str(rank), "LOCAL_RANK": str(rank), **environment})
        torch.set_num_threads(1)
        try:
            if init:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(str(folder / "store"), world_size),  # type: ignore[attr-defined]
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                )
            report = pickle.dumps(("result", as_plain(body())))
        except BaseException as error:
            report = pickle.dumps(("failure", (type(error).__name__, str(error), traceback.format_exc())))
        sys.stdout.flush()
        sys.stderr.flush()
        (folder / "reports").mkdir(exist_ok=True)
        unfinished = folder / "reports" / str(rank)
        unfinished.write_bytes(report)
        unfinished.rename(folder / f"report-{rank}")
        os.read(leave, 1)  # a rank that leaves early takes its sockets, and rank 0 the store, with it
    finally:
        os._exit(0)


def _detach(folder: Path, rank: int) -> None:
    """Own session, own output files, stacks on demand; dies with its parent."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    stacks = (folder / f"stacks-{rank}").open("w")  # faulthandler writes to it until the end
    faulthandler.enable(stacks)
    faulthandler.register(_STACKS_SIGNAL, stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def as_plain(value: Any) -> Any:
    """Tensors detached, on the CPU and without the storage they are a view of, in any nesting of containers.

    Raises:
        TypeError: A DTensor; only its owner knows whether the shard or the whole is meant.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            raise TypeError("A rank returned a DTensor. Return value.full_tensor() or value.to_local().")
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(as_plain(item) for item in value)
    return value


def _kernel_log() -> str:
    """The end of the kernel's log, which says where native code failed when faulthandler did not."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "The kernel's last lines:\n" + "\n".join(log.splitlines()[-4:])


def _has_ended(pid: int) -> bool:
    """Whether the child is a zombie; it stays one, so that its process group cannot be another's yet."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
