# SPDX-License-Identifier: Apache-2.0
"""What one rank hits alone reaches all of them: `FailureWatch`.

[Note: how a failure travels]
A rank that raises leaves the others in a collective that never ends, and gloo cannot be interrupted from Python. So
during a Trainer's run every rank keeps one TCP connection to a small hub on rank 0, read by a thread. A rank that
raises says so there; a process that is killed closes its connection, which says it too, at once and without any
time-out. The hub passes the first failure on, and the thread of every other rank prints it and ends its process. It
waits a moment before, since an error that all ranks meet (a step that a pipeline cannot run) is better raised by each
rank itself. A rank that fails only because a peer is gone waits for the real cause instead of reporting its own.

The same connection finds calls that not all ranks make, like `trainer.save_checkpoint` under `is_global_zero`: ranks
meet at the hub before the first collective, see `FailureWatch.meet`. And it compares where the ranks of a data-parallel
group are in the model when one stands still, see [Note: ranks that part].
"""

import os
import secrets
import socket
import sys
import threading
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.compat import run_exit_functions
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.trail import Trail
from lightning_3d.strategies.failure_hub import SAME_MODULES, FailureHub, Line, Message, keep_alive
from lightning_3d.strategies.standing import Standing

_GRACE_S = 2.0
"""How long a rank may raise its own error after another one has failed."""
_ECHO_WAIT_S = 10.0
"""How long a rank whose connection to a peer broke waits for the peer's own words."""
_LATE_S = 3.0
"""How long a rank waits at a meeting before it asks where the others are."""
_LEAVE_S = 30.0
"""How long a rank that has finished waits for the others to finish."""
_END_S = 20.0
"""How long a rank that has failed may take to end: what it waits for may never come."""
_LAST_WORDS_S = 10.0
"""How long what is registered to run at the end of the process may take after a failure."""
_SAY_S = 20.0
"""How often a rank that waits says for whom."""
_STANDS_S = 4.0
"""How long a rank stands in one place before its trail is compared with the others'."""
_TRACEBACK_LINES = 30

_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection was likely closed",  # the store, which rank 0 serves
    "ncclRemoteError",
    "NCCL error",
    "Timed out waiting",
    "timed out after",
)


class FailureWatch:
    """One rank's connection to the hub during one run of a Trainer. See [Note: how a failure travels]."""

    def __init__(self, address: str, name: str, device: torch.device) -> None:
        """Connects; collective over the world.

        Args:
            address: where the other ranks reach rank 0.
            name: of this rank in messages.
            device: where collectives run.
        """
        offer: list[Any] = [None]
        if dist.get_rank() == 0:
            token = secrets.token_hex(16)
            hub = FailureHub(token, dist.get_world_size())
            hub.start()
            offer = [(hub.port, token)]
        dist.broadcast_object_list(offer, device=device)
        port, token = offer[0]
        connection = socket.create_connection((address if dist.get_rank() else "127.0.0.1", port), timeout=30)
        connection.settimeout(None)
        keep_alive(connection)
        self._name, self._line = name, Line(connection)
        process = f"process {os.getpid()} on {socket.gethostname()}"
        hello = {"rank": dist.get_rank(), "name": name, "process": process, "token": token}
        self._line.send({"kind": "hello", **hello})
        self.stop_requested = 0
        self._watching = True
        self._place, self._moved_at = (0, "the start"), time.monotonic()
        self._trail: Trail | None = None
        self._group: list[int] = []
        self._failure: str | None = None
        self._failed, self._all_left, self._moved = threading.Event(), threading.Event(), threading.Event()
        self._met = 0
        self._unused = ""
        self._deadline: threading.Timer | None = None
        self._elsewhere: Message | None = None
        threading.Thread(target=self._listen, name="lightning_3d failure watch", daemon=True).start()
        threading.Thread(target=self._look, name="lightning_3d standing", daemon=True).start()

    # --- the main thread --------------------------------------------------------------------------------------------

    def enter(self, name: str) -> None:
        """Notes that this rank begins something that all ranks do; costs nothing."""
        self._place, self._moved_at = (self._place[0] + 1, name), time.monotonic()

    def meet(self, name: str, limit_s: float = float("inf")) -> bool:
        """Waits for all ranks before something that hangs unless all of them do it.

        Args:
            name: of what all ranks must call.
            limit_s: how long to wait.

        Returns:
            Whether all ranks came within the limit.

        Raises:
            CheckpointError: another rank is past this point and will not come.
        """
        self.enter(name)
        number = self._place[0]
        self._line.send({"kind": "meet", "number": number, "name": name})
        start = said = time.monotonic()
        while self._met < number:
            if time.monotonic() - start > limit_s:
                return False
            if not self._moved.wait(min(_LATE_S, limit_s)):
                self._line.send({"kind": "late", "number": number, "name": name})
            self._moved.clear()
            elsewhere, self._elsewhere = self._elsewhere, None
            if elsewhere is None or elsewhere["number"] != number:
                continue
            if elsewhere["gone"]:
                raise CheckpointError(
                    f"{self._name} is in {name}, but {elsewhere['rank']} went on to {elsewhere['name']}. All ranks must"
                    f" call it: do not put {name} under `if trainer.is_global_zero` or @rank_zero_only."
                )
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                _print(
                    f"{self._name} has waited {said - start:.0f} s in {name} for {elsewhere['rank']}, which is in"
                    f" {elsewhere['name']}."
                )
        return True

    def follow(self, trail: Trail, group: list[int]) -> None:
        """Sends this rank's trail to the hub whenever the rank stands still. See [Note: ranks that part].

        Args:
            trail: of this rank.
            group: ranks of its data-parallel group.
        """

        def tell_unused(text: str) -> None:
            self._unused = text
            self._line.send({"kind": "unused", "group": group[0], "of": len(group), "text": text})

        trail.on_unused = tell_unused
        self._group, self._trail = group, trail

    def request_stop(self, kind: int) -> None:
        """Asks rank 0 for a stop of all ranks between two steps; called in a signal handler."""
        # In a thread of its own: the handler may have interrupted a message of this very thread.
        message = {"kind": "stop", "of": kind}
        threading.Thread(target=self._line.send, args=(message,), daemon=True).start()

    def report(self, error: BaseException) -> None:
        """Tells the other ranks why this one ends; of an error that another rank caused, tells that cause here."""
        if not self._watching:
            return
        self._watching = False
        _end_after_traceback()
        if _is_echo(error) and self._failed.wait(_ECHO_WAIT_S):
            _print(f"{self._name} ends because {self._failure}")
            if hasattr(error, "add_note"):
                error.add_note(f"Not the first cause: {self._failure}")
            return
        self._line.send({"kind": "failed", "text": _describe(error)})
        self._failed.wait(_ECHO_WAIT_S)  # the hub has told the others
        time.sleep(0.1)
        self._deadline = threading.Timer(_END_S, end_process, [f"{self._name} did not end by itself: {error}"])
        self._deadline.daemon = True
        self._deadline.start()

    def leave(self) -> None:
        """Ends the watch and waits for the other ranks to finish; after a failure it does nothing."""
        if self._watching:
            self._place = (self._place[0] + 1, "the end of the run")
            self._line.send({"kind": "left"})
            self._all_left.wait(_LEAVE_S)
            self._watching = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._line.close()

    # --- the threads ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Sends the trail of a rank that stands still, and says so if it does for long."""
        standing = Standing(self._since, lambda text: _print(f"{self._name} {text}"))
        told = 0
        while self._watching:
            time.sleep(1.0)
            trail = self._trail
            if trail is not None and told < trail.count and time.monotonic() - trail.since > _STANDS_S:
                told = trail.count
                self._line.send({"kind": "trail", "group": self._group[0], "places": list(trail.places)})
            standing.look(trail.places[-1][1] if trail is not None and trail.places else self._place[1])

    def _since(self) -> float:
        return self._moved_at if self._trail is None else max(self._moved_at, self._trail.since)

    def _listen(self) -> None:
        while True:
            messages = self._line.receive()
            if messages is None:
                here = f" Before that, here: {self._unused}; if other ranks had one, that ended it."
                unused = f"{here} {SAME_MODULES}" if self._unused else ""
                self._on_failure(f"rank 0 is gone: it was killed, or ran out of memory.{unused}")
                return
            for message in messages:
                self._on_message(message)

    def _on_message(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "failed":
            # Not in this thread: a rank that fails while it waits must still hear what comes.
            threading.Thread(target=self._on_failure, args=(message["text"],), daemon=True).start()
        elif kind == "all left":
            self._watching = False
            self._all_left.set()
        elif kind == "stop":
            self.stop_requested = max(self.stop_requested, int(message["of"]))
        elif kind == "where":
            number, name = self._place
            self._line.send({"kind": "at", "number": number, "name": name})
        elif kind == "met":
            self._met = max(self._met, int(message["number"]))
            self._moved.set()
        elif kind == "elsewhere":
            self._elsewhere = message
            self._moved.set()

    def _on_failure(self, text: str) -> None:
        self._failure = self._failure or text
        self._failed.set()
        if not self._watching:
            return
        time.sleep(_GRACE_S)
        if self._watching:
            end_process(f"{self._name} ends because {self._failure}")


def _describe(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    notes = [] if hasattr(error, "add_note") else getattr(error, "__notes__", [])  # Python 3.10 leaves them out
    return "\n".join([f"{type(error).__name__}: {error}", *lines[-_TRACEBACK_LINES:], *notes])


def _is_echo(error: BaseException) -> bool:
    """Whether an error says no more than that a peer is gone."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ECHOES)


def _end_after_traceback() -> None:
    """Makes an exception that nobody catches end this process for certain.

    The destructors of gloo's groups may wait for ranks that are gone, for ever, when the interpreter shuts down.
    """
    show = sys.excepthook

    def show_and_end(*error: Any) -> None:
        show(*error)
        last_words = threading.Timer(_LAST_WORDS_S, os._exit, [1])
        last_words.daemon = True
        last_words.start()
        run_exit_functions()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    if show.__name__ != show_and_end.__name__:
        sys.excepthook = show_and_end


def end_process(text: str) -> None:
    """Ends this process: its main thread may be in a collective that never returns."""
    _print(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _print(text: str) -> None:
    print(f"[lightning_3d] {text}", file=sys.stderr, flush=True)
