"""Write numbers and names the way people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lobs.certificate.bound import Certificate

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4) -> str:
    """Write a few significant digits, or a dash where there is no number.

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
    """Write two decimals, for percentages and seconds; more where both would be zero.

    >>> fixed(1.5), fixed(0.0), fixed(0.006999)
    ('1.50', '0.00', '0.006999')
    """
    plain = value is not None and math.isfinite(value) and (value == 0 or abs(value) >= 0.095)
    return f"{value:,.2f}" if plain else number(value)


def plain(value: float) -> str:
    """Write a number for machines to sort by, or nothing where it is not finite.

    >>> plain(0.25), plain(float("nan"))
    ('0.25', '')
    """
    return f"{value:.9g}" if math.isfinite(value) else ""


def percent(fraction: float) -> str:
    """Write a fraction in percent, joined to its sign.

    >>> percent(0.0701), percent(1.0), percent(0.000123)
    ('7.01\u202f%', '100\u202f%', '0.0123\u202f%')
    """
    value = 100 * fraction
    if not math.isfinite(value) or value in (0, 100):
        return f"{number(value)}\u202f%"
    text = f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
    return f"{text if 'e' not in text else number(value, 3)}\u202f%"


def relative(change: float | None, certificate: Certificate) -> str:
    """Write a change of the output as a share of the dense output's norm, if the norm is known."""
    share = certificate.relative(change)
    return number(change) if share is None else percent(share)


def times(factor: float) -> str:
    """Write a factor with two digits, or without decimals from 10 upwards.

    >>> times(14.29), times(2.0), times(1.04)
    ('14×', '2.0×', '1.04×')
    """
    if not math.isfinite(factor):
        return f"{number(factor)}×"
    digits = 0 if factor >= 9.95 else 1 if factor >= 1.1 else 2
    return f"{factor:,.{digits}f}×"


def size(count: float) -> str:
    """Write a number of bytes in the unit people use for it.

    >>> size(812), size(93_400), size(1_066_000), size(2.5e9)
    ('812 B', '93.4 kB', '1.07 MB', '2.5 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def short_names(names: Sequence[str], limit: int = 24) -> list[str]:
    """Cut names to fit an axis: first the dotted parts that all long ones share, then the front.

    >>> long = "net.features.stage_1.block_{}.convolution".format
    >>> short_names([long(1), long(2), "head"])
    ['…block_1…', '…block_2…', 'head']
    """
    long = [name.split(".") for name in names if len(name) > limit]
    head, tail = _shared(long), _shared([parts[::-1] for parts in long])
    return [
        name if len(name) <= limit else _cut(name.split("."), head, tail, limit) for name in names
    ]


def _shared(names: Sequence[Sequence[str]]) -> int:
    """Count the leading parts that all names share, if there are several names."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False))
    return len(list(same)) if len(names) > 1 else 0


def _cut(parts: Sequence[str], head: int, tail: int, limit: int) -> str:
    middle = ".".join(parts[head : len(parts) - tail] or parts)
    text = f"{'…' * bool(head)}{middle}{'…' * bool(tail)}"
    return text if len(text) <= limit else f"…{text[1 - limit :]}"
