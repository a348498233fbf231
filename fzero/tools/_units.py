"""Numbers as people read them: bytes and seconds with three digits and a prefix."""

from __future__ import annotations

_BYTES = ("B", "KB", "MB", "GB", "TB", "PB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def in_bytes(count: float) -> str:
    """Return bytes with a decimal prefix, as 1 KB = 1000 B.

    Example:
        >>> in_bytes(0), in_bytes(999), in_bytes(17956), in_bytes(2.5e9)
        ('0 B', '999 B', '18 KB', '2.5 GB')
    """
    for unit in _BYTES:
        if count < 999.5 or unit == _BYTES[-1]:
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """Return a duration with a prefix.

    Example:
        >>> in_seconds(0), in_seconds(1.5), in_seconds(0.00012), in_seconds(2.5e-8)
        ('0 s', '1.5 s', '120 us', '25 ns')
    """
    size, unit = next((pair for pair in _SECONDS if seconds >= 0.9995 * pair[0]), _SECONDS[-1])
    return f"{seconds / size:.3g} {unit}" if seconds else "0 s"
