# SPDX-License-Identifier: Apache-2.0
"""`FailureHub`: the place on rank 0 that every rank keeps a connection to, for words that no collective can carry."""

import json
import selectors
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from lightning_3d.parallel.trail import first_parting

Message = dict[str, Any]

SAME_MODULES = (
    "All ranks of a data-parallel group must run the same modules: a rank whose batch does not need a block, or a layer"
    " inside one, runs it on a dummy input and multiplies the result by zero (docs/data.md)."
)


class Line:
    """Messages as lines of JSON over one socket; sending is safe from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message; a peer that is gone is found by reading, not here."""
        with suppress(OSError), self._sending:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Waits for some data and returns the messages that are complete; None when the peer has closed."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Closes the connection and wakes a thread that reads it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel find a machine that vanished: a process that dies closes its sockets, a machine does not."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class FailureHub(threading.Thread):
    """Passes on the first failure to all ranks, and knows at once when a process is gone: its connection closes."""

    def __init__(self, token: str, world_size: int) -> None:
        """Opens a port; the thread serves it once started.

        Args:
            token: what a rank must say to be let in.
            world_size: ranks that will come.
        """
        super().__init__(name="lightning_3d failure hub", daemon=True)
        self._token, self._world_size = token, world_size
        self._server = socket.create_server(("", 0), backlog=world_size)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._lines: dict[int, Line] = {}
        self._names: dict[int, str] = {}
        self._processes: dict[int, str] = {}
        self._left: set[int] = set()
        self._meetings: dict[tuple[int, str], set[int]] = {}
        self._trails: dict[int, dict[int, list[tuple[int, str]]]] = {}
        self._unused: dict[tuple[int, int], dict[str, set[int]]] = {}
        """By a data-parallel group's first rank and its size, then by what has no gradient: the ranks that say so."""
        self._failure: str | None = None

    def run(self) -> None:
        """Serves until every rank has left or closed its connection."""
        while len(self._left) < self._world_size:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._welcome()
                else:
                    self._serve(key.data)
        if self._failure is None:
            for rank in sorted(self._lines, reverse=True):  # rank 0 last: its process may end when it knows
                self._lines[rank].send({"kind": "all left"})
        self._selector.close()
        self._server.close()

    def _welcome(self) -> None:
        connection, _ = self._server.accept()
        keep_alive(connection)
        connection.settimeout(10)
        line = Line(connection)
        first = line.receive() or [{}]
        if first[0].get("token") != self._token:
            line.close()
            return
        connection.settimeout(None)
        rank = int(first[0]["rank"])
        self._lines[rank], self._names[rank], self._processes[rank] = (
            line,
            first[0]["name"],
            first[0]["process"],
        )
        self._selector.register(connection, selectors.EVENT_READ, rank)
        for message in first[1:]:
            self._on_message(rank, message)

    def _serve(self, rank: int) -> None:
        messages = self._lines[rank].receive()
        if messages is None:
            self._selector.unregister(self._lines[rank].connection)
            if rank not in self._left:
                self._left.add(rank)
                self._fail(
                    f"{self._names[rank]} ended without an exception ({self._processes[rank]}): it was killed, or ran"
                    " out of memory."
                )
            return
        for message in messages:
            self._on_message(rank, message)

    def _on_message(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "failed":
            self._left.add(rank)
            self._fail(f"{self._names[rank]} failed first: {message['text']}")
        elif kind == "left":
            self._left.add(rank)
        elif kind == "stop":
            self._lines[0].send(message)
        elif kind == "meet":
            self._meet(rank, (message["number"], message["name"]))
        elif kind == "late":
            for other in self._missing((message["number"], message["name"])):
                self._lines[other].send({"kind": "where"})
        elif kind == "at":
            self._compare(rank, message["number"], message["name"])
        elif kind == "trail":
            self._compare_trails(rank, message["group"], [(number, name) for number, name in message["places"]])
        elif kind == "unused":
            group = (message["group"], message["of"])
            self._unused.setdefault(group, {}).setdefault(message["text"], set()).add(rank)

    def _fail(self, text: str) -> None:
        """Tells everyone the first failure; rank 0 last, which may end the hub when it knows."""
        self._failure = self._failure or text + self._unused_somewhere()
        for rank in sorted(self._lines, reverse=True):
            self._lines[rank].send({"kind": "failed", "text": self._failure})

    def _unused_somewhere(self) -> str:
        """Modules for which some ranks of a data-parallel group, not all, had no gradient: a backend may end a process."""
        found = [
            f"{', '.join(self._names[rank] for rank in sorted(ranks))}: {text}"
            for (_, size), texts in self._unused.items()
            for text, ranks in texts.items()
            if len(ranks) < size  # what no rank uses is no fault
        ]
        if not found:
            return ""
        return f" Before that, on {'; on '.join(found)}. {SAME_MODULES}"

    def _compare_trails(self, rank: int, group: int, places: list[tuple[int, str]]) -> None:
        """Ends all ranks when two of a group wait in different places of the model."""
        trails = self._trails.setdefault(group, {})
        trails[rank] = places
        for other, theirs in trails.items():
            parting = first_parting(places, theirs)
            if parting is not None:
                mine = f"{self._names[rank]} is in {parting[0]}"
                self._fail(f"{mine}, but {self._names[other]} is in {parting[1]}. {SAME_MODULES}")
                return

    def _missing(self, meeting: tuple[int, str]) -> Iterable[int]:
        return set(self._lines) - self._meetings.get(meeting, set())

    def _meet(self, rank: int, meeting: tuple[int, str]) -> None:
        present = self._meetings.setdefault(meeting, set())
        present.add(rank)
        if len(present) == self._world_size:
            del self._meetings[meeting]
            for line in self._lines.values():
                line.send({"kind": "met", "number": meeting[0]})

    def _compare(self, rank: int, number: int, name: str) -> None:
        """Tells those who wait for a rank where it is, and whether it can still come."""
        for (waiting, wanted), present in self._meetings.items():
            if rank in present:
                continue
            gone = number > waiting or (number == waiting and name != wanted)
            for other in present:
                self._lines[other].send(
                    {
                        "kind": "elsewhere",
                        "number": waiting,
                        "rank": self._names[rank],
                        "name": name,
                        "gone": gone,
                    }
                )
