# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as people read them."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at one or above.

    >>> format_bytes(3 * 1024**3)
    '3.00 GiB'
    >>> format_bytes(512)
    '512 B'
    """
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def format_count(number: float) -> str:
    """A count with a decimal suffix.

    >>> format_count(70_553_706_496)
    '70.6B'
    >>> format_count(12_500)
    '12.5K'
    """
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= unit:
            return f"{number / unit:.1f}{suffix}"
    return f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that reads best.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms"
