"""Numbers and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4) -> str:
    """A few significant digits; a dash where there is no number.

    >>> number(10.4312), number(7.8813e6), number(None)
    ('10.43', '7.881×10⁶', '–')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return mantissa + (f"×10{str(int(exponent)).translate(_SUPERSCRIPT)}" if exponent else "")


def fixed(value: float | None) -> str:
    """Two decimals, for percentages and seconds; more where those would be all zeros.

    >>> fixed(1.5), fixed(0.0), fixed(0.006999)
    ('1.50', '0.00', '0.006999')
    """
    plain = value is not None and math.isfinite(value) and (value == 0 or abs(value) >= 0.095)
    return f"{value:,.2f}" if plain else number(value)


def plain(value: float) -> str:
    """A number for machines to sort by; nothing where there is none.

    >>> plain(0.25), plain(float("nan"))
    ('0.25', '')
    """
    return f"{value:.9g}" if math.isfinite(value) else ""


def percent(fraction: float) -> str:
    """A fraction in percent, on one line with its sign."""
    return f"{fixed(100 * fraction)}\u202f%"


def short_names(names: Sequence[str], limit: int = 24) -> list[str]:
    """Names cut to fit an axis: first the dotted parts that all long ones share, then the front.

    >>> short_names(["net.features.stage_1.block_1.convolution", "net.features.stage_1.block_2.convolution", "head"])
    ['…block_1…', '…block_2…', 'head']
    """
    long = [name.split(".") for name in names if len(name) > limit]
    head, tail = _shared(long), _shared([parts[::-1] for parts in long])
    return [
        name if len(name) <= limit else _cut(name.split("."), head, tail, limit) for name in names
    ]


def _shared(names: Sequence[Sequence[str]]) -> int:
    """How many leading parts are the same in all, where there is more than one to compare."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
    return len(list(same)) if len(names) > 1 else 0


def _cut(parts: Sequence[str], head: int, tail: int, limit: int) -> str:
    middle = ".".join(parts[head : len(parts) - tail] or parts)
    text = f"{'…' * bool(head)}{middle}{'…' * bool(tail)}"
    return text if len(text) <= limit else f"…{text[1 - limit :]}"
