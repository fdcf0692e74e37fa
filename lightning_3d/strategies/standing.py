# SPDX-License-Identifier: Apache-2.0
"""Where a rank stands that has not moved for long: the lines of all ranks side by side tell who waits for whom."""

import sys
import threading
import time
import traceback
from collections.abc import Callable

FIRST_S = 60.0
"""How long a rank stands before it says so for the first time; then twice as long each time, compiling takes minutes."""
_LIBRARIES = ("site-packages", "/lib/python3")


class Standing:
    """Says now and then, and each time later, that this rank stands still."""

    def __init__(self, moved_at: Callable[[], float], say: Callable[[str], None]) -> None:
        """Starts nothing; `look` is called again and again.

        Args:
            moved_at: when this rank last moved, of `time.monotonic`.
            say: tells the user.
        """
        self._moved_at, self._say = moved_at, say
        self._limit_s, self._said_of = FIRST_S, 0.0

    def look(self, place: str) -> None:
        """Says where the main thread is, if it has not moved for too long.

        Args:
            place: what the rank last began.
        """
        moved_at = self._moved_at()
        still_s = time.monotonic() - moved_at
        if still_s < self._limit_s or moved_at == self._said_of:
            return
        self._limit_s, self._said_of = 2 * self._limit_s, moved_at
        self._say(f"has not moved for {still_s:.0f} s since {place}: it is in {main_thread_place()}.")


def main_thread_place() -> str:
    """The innermost call of the main thread, and the one of user code or of this package that led there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    if not stack:
        return "an unknown place"
    inner = stack[-1]
    text = f"{inner.name} ({inner.filename}:{inner.lineno})"
    own = next((call for call in reversed(stack) if not any(part in call.filename for part in _LIBRARIES)), inner)
    return text if own is inner else f"{text}, called from {own.name} ({own.filename}:{own.lineno})"
