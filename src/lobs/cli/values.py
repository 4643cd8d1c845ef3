"""Read what was typed: fractions, percentages, values by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lobs.errors import LobsError, TargetError


def parse_fractions(text: str, option: str) -> float | dict[str, float]:
    """Read '0.07', '7%' or 'fc1=5%,conv*=0.2'."""
    try:
        if "=" not in text:
            return _fraction(text, option)
        pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
        names = [name.strip() for name, _ in pairs]
        named_once(names, option)
        return {
            name: _fraction(value, option) for name, (_, value) in zip(names, pairs, strict=True)
        }
    except TargetError:
        raise
    except ValueError:
        raise TargetError(
            f"{option} {text!r} is not a number, a percentage, or name=number pairs. Examples: "
            "0.07, 7%, fc1=5%,conv*=20%."
        ) from None


def parse_fraction(text: str, option: str) -> float:
    """Read one fraction: '0.07' or '7%'."""
    found = parse_fractions(text, option)
    if isinstance(found, dict):
        raise TargetError(f"{option} takes one number here, not {text!r}. Example: {option} 7%.")
    return found


def parse_drop(text: str) -> float:
    """Read `--drop`: '0.5%' is 0.005, and a bare number is in the score's own unit."""
    try:
        drop = float(text[:-1]) / 100 if text.strip().endswith("%") else float(text)
    except ValueError:
        raise TargetError(
            f"--drop {text!r} is not a number or a percentage. Examples: 0.5%, 0.005."
        ) from None
    if not (drop >= 0 and math.isfinite(drop)):
        raise TargetError(f"--drop {text} must be finite and not negative. Example: --drop 0.5%.")
    return drop


def parse_factor(text: str) -> float:
    """Read `--speedup`: '2x' or '1.5'."""
    try:
        return float(text.strip().removesuffix("x").removesuffix("×"))
    except ValueError:
        raise TargetError(f"--speedup {text!r} is not a factor. Examples: 2x, 1.5.") from None


def parse_seconds(text: str) -> float:
    """Read `--latency`: '5ms', '200us' or '0.2s'; a bare number has no unit and is refused."""
    plain = text.strip().lower()
    for unit, seconds in (("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("s", 1.0)):
        if plain.endswith(unit):
            try:
                return float(plain.removesuffix(unit)) * seconds
            except ValueError:
                break
    raise TargetError(f"--latency {text!r} is not a time with its unit. Examples: 5ms, 0.2s.")


def _fraction(text: str, option: str) -> float:
    text = text.strip()
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if option != "--epsilon" and not 0 <= value <= 1:
        hint = f"; did you mean {text}%?" if 1 < value <= 100 and not text.endswith("%") else ""
        raise TargetError(f"{option} {text} is {100 * value:g} %, not between 0 and 100 %{hint}")
    return value


def named_once(names: Sequence[str], option: str) -> None:
    """Refuse an option that names a layer twice."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise TargetError(f"{option} names '{twice[0]}' twice: give it one number.")


def complement(kept: float | dict[str, float]) -> float | dict[str, float]:
    """Turn kept fractions into removed fractions."""
    if isinstance(kept, dict):
        return {name: 1 - value for name, value in kept.items()}
    return 1 - kept


def require_one(**options: Any) -> None:
    """Refuse unless exactly one of several options is given."""
    spelled = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    given = [name for name, value in spelled.items() if value is not None]
    if len(given) != 1:
        names = ", ".join(spelled)
        raise LobsError(
            f"give exactly one of {names}" + (f", not {' and '.join(given)}." if given else ".")
        )
