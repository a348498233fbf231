"""Colours that colour-blind readers can tell apart, as many as there are."""

from __future__ import annotations

# Okabe and Ito, "Color Universal Design" (2008), without black.
BASE = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#F0E442", "#D55E00")
ABSENT = "#F1F1F1"  # a place whose elements this rank does not hold
EDGE = "#6B6B6B"
_TOWARDS = ((0.0, 255), (0.5, 255), (0.35, 0))  # as it is, then paler, then darker
COLOURS = len(BASE) * len(_TOWARDS)


def colour(number: int) -> str:
    """Return colour `number` of `COLOURS`, as #RRGGBB.

    Example:
        >>> colour(0), colour(7)
        ('#56B4E9', '#AADAF4')
    """
    amount, target = _TOWARDS[number // len(BASE)]
    mixed = (round(c + (target - c) * amount) for c in _rgb(BASE[number % len(BASE)]))
    return "#" + "".join(f"{c:02X}" for c in mixed)


def ink(background: str) -> str:
    """Return black or white: what is legible on `background` (Rec. 709 luma).

    Example:
        >>> ink("#F0E442"), ink("#0072B2")
        ('#000000', '#FFFFFF')
    """
    red, green, blue = _rgb(background)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 120 else "#FFFFFF"


def _rgb(code: str) -> tuple[int, int, int]:
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16)
