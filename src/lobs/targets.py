"""What the user wants, as frozen values: how much to remove, or how much error to allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from lobs.errors import TargetError

T = TypeVar("T")
ROUNDS = 2  # allocation rounds by default


class _Brief:
    """A short repr: only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        parts = []
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if default is MISSING or value != default:
                shown = _name(value) if callable(value) else repr(value)
                parts.append(f"{item.name}={shown}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _name(function: object) -> str:
    """Return a function's name, or its type's where it has none: a repr may print its data."""
    return str(getattr(function, "__name__", None) or type(function).__name__)


@dataclass(frozen=True, repr=False)
class Sparsity(_Brief):
    """Remove a fraction of the weights.

    The count is exact: ⌊fraction · n + ½⌋ weights go, whatever the ties. One number is a fraction
    of all layers together. Each layer then gives what costs the network's output least. A mapping
    of layer names or globs sets each layer's own fraction; layers that no key matches stay dense.
    An exact name beats a glob, and among globs the first match wins.

    Args:
        fraction: the fraction removed, or a mapping from layer names or globs to fractions.
        scope: "network" shares one count among the layers, "layer" takes the fraction of each.
        keep_at_least: smallest kept fraction of layers in a network-wide budget, by name or glob.
        keep_at_most: largest kept fraction of layers in a network-wide budget, by name or glob.
        rounds: number of allocation rounds. Round 2 uses output sensitivities of the network pruned
            in round 1.

    >>> Sparsity(0.93).count(1000)
    930
    >>> for_layer(Sparsity({"fc3": 0.35, "fc*": 0.9}), "fc3").fraction
    0.35
    """

    fraction: float | Mapping[str, float]
    scope: Literal["layer", "network"] | None = None
    keep_at_least: Mapping[str, float] = field(default_factory=dict)
    keep_at_most: Mapping[str, float] = field(default_factory=dict)
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        if self.scope is None:
            several = isinstance(self.fraction, Mapping)
            object.__setattr__(self, "scope", "layer" if several else "network")
        if self.scope not in ("layer", "network"):
            raise TargetError(f"scope is '{self.scope}': use 'layer' or 'network'.")
        if self.scope == "network" and isinstance(self.fraction, Mapping):
            raise TargetError("a network-wide Sparsity takes one number, not a mapping of layers.")
        if self.scope == "layer" and (self.keep_at_least or self.keep_at_most):
            raise TargetError(
                "keep_at_least and keep_at_most go with a network-wide budget; give each layer its "
                "own fraction."
            )
        _check_limits(self.keep_at_least, self.keep_at_most)
        _check_fractions(self.fraction, "Sparsity")
        _check_rounds(self.rounds)

    def count(self, n: int) -> int:
        """Return how many of `n` weights go."""
        return math.floor(_single(self.fraction, "Sparsity") * n + 0.5)


@dataclass(frozen=True)
class ErrorBudget:
    """Remove as many weights as keep every layer's error √E at or below ε.

    √E = (1/√n)‖ΔZ‖_F is the root mean square change of the layer's output vector.

    Args:
        epsilon: ε, or a mapping from layer names or globs to their own ε.
        relative: measure ε in units of the norm of the layer's output.
    """

    epsilon: float | Mapping[str, float]
    relative: bool = False

    def __post_init__(self) -> None:
        for where, value in _entries(self.epsilon):
            if not (value >= 0.0 and math.isfinite(value)):
                raise TargetError(
                    f"ErrorBudget{where} is {value:g}: ε must be finite and not negative."
                )

    def limit(self, energy: float) -> float:
        """The largest error E allowed for a layer whose mean squared output is `energy`."""
        epsilon = _single(self.epsilon, "ErrorBudget")
        return (
            epsilon * epsilon * (energy if self.relative else 1.0)
        )  # a power would overflow with an exception


@dataclass(frozen=True, repr=False)
class Budget(_Brief):
    """Share one budget among all layers. Give exactly one of the first six.

    Args:
        parameters: how many weights to keep.
        bytes: size of the compact file that `PruningResult.export` writes, with its header. The
            summary says so where a number leaves no room for one and counts tensors alone.
        flops: operations that one input may cost in the pruned layers, two for every use of a kept
            weight.
        drop: how far the score may fall. The smallest network within it is searched. With
            `evaluate` it is in the score's unit, without it a fraction: 0.005 is half a point.
        latency: seconds that the network may take for one batch on this machine, once `accelerate`
            has chosen its kernels. Layers where sparsity does not pay stay dense.
        speedup: the same, as a ratio to the dense network.
        keep_at_least: smallest kept fraction of layers, by name or glob.
        keep_at_most: largest kept fraction of layers, by name or glob.
        evaluate: a function from a network to its score, larger is better. It goes with `drop`.
            By default the drop is the accuracy that changed answers are expected to lose on
            kept-back inputs, by the dense network's own probabilities. For outputs that are no
            answers it is the relative change.
        rounds: number of allocation rounds, as for `Sparsity`. Each trial of `drop` takes one.
        batch: number of samples that are timed, with `latency` or `speedup`.
    """

    parameters: int | None = None
    bytes: int | None = None
    flops: float | None = None
    drop: float | None = None
    latency: float | None = None
    speedup: float | None = None
    keep_at_least: Mapping[str, float] = field(default_factory=dict)
    keep_at_most: Mapping[str, float] = field(default_factory=dict)
    evaluate: Callable[[Any], float] | None = None
    rounds: int = ROUNDS
    batch: int = 1

    @property
    def timed(self) -> bool:
        """Whether the budget is one of time."""
        return self.latency is not None or self.speedup is not None

    def __post_init__(self) -> None:
        wishes = {
            name: _number(value, f"Budget {name}")
            for name, value in self._wishes.items()
            if value is not None
        }
        given = [f"{name}={value:g}" for name, value in wishes.items()]
        if len(given) != 1:
            raise TargetError(
                f"Budget takes exactly one of {', '.join(self._wishes)}; it was given "
                f"{', '.join(given) or 'none'}."
            )
        for name, value in wishes.items():
            if not (value >= 0 and math.isfinite(value)):
                raise TargetError(
                    f"Budget {name} is {value:g}: it must be finite and not negative."
                )
            counted = name in ("parameters", "bytes")
            if counted and value != int(value):
                raise TargetError(
                    f"Budget {name} is {value:g}: it is a whole number; for a fraction use "
                    "keep=… or Sparsity."
                )
            # A plain number, whatever kind of number was given.
            object.__setattr__(self, name, int(value) if counted else value)
        _check_limits(self.keep_at_least, self.keep_at_most)
        _check_rounds(self.rounds)
        self._check_score()
        self._check_time()

    def _check_score(self) -> None:
        if self.drop is None:
            if self.evaluate is not None:
                raise TargetError("evaluate is the score that drop=… is about: leave it out.")
        elif self.evaluate is None:
            if not 0 < self.drop < 1:
                raise TargetError(
                    f"Budget drop is {self.drop:g}, which needs evaluate=…: without evaluate it is "
                    "the accuracy that may be lost, such as 0.005."
                )
        elif not callable(self.evaluate):
            raise TargetError(
                f"evaluate is {self.evaluate!r}: give a function from a network to its score, "
                "larger is better."
            )

    def _check_time(self) -> None:
        if self.speedup is not None and self.speedup < 1:
            raise TargetError(
                f"Budget speedup is {self.speedup:g}: it is a ratio of at least 1, such as 1.5."
            )
        if self.latency == 0:
            raise TargetError("Budget latency is 0: give seconds, such as 0.002.")
        if not isinstance(self.batch, Integral) or isinstance(self.batch, bool) or self.batch < 1:
            raise TargetError(f"Budget batch is {self.batch!r}: it is a whole number, at least 1.")

    @property
    def label_free(self) -> bool:
        """Return whether networks are judged by the dense network's answers, without labels."""
        return self.drop is not None and self.evaluate is None

    @property
    def _wishes(self) -> dict[str, float | None]:
        return {
            "parameters": self.parameters,
            "bytes": self.bytes,
            "flops": self.flops,
            "drop": self.drop,
            "latency": self.latency,
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class Pattern:
    """Base of the targets that fix where zeros may lie.

    A pattern needs three things: a class here, the module that solves it, and an option of the
    command line. Nothing else lists patterns.
    """

    #: Module whose constant `SOLVER` solves the pattern (`lobs.solvers.patterns.PatternSolver`).
    solved_by: ClassVar[str]
    #: Field that is one value for all layers, or a mapping by layer name or glob.
    by_layer: ClassVar[str] = "fraction"
    #: One value for all layers leaves the network's own ends whole, so it depends on their order.
    ordered: ClassVar[bool] = False

    @property
    def table(self) -> Mapping[str, float] | None:
        """The mapping by layer; None where one value serves all layers."""
        value = getattr(self, self.by_layer)
        return value if isinstance(value, Mapping) else None

    def for_layer(self, name: str) -> Pattern | None:
        """Return the pattern of one layer; None where the mapping leaves it dense."""
        if self.table is None:
            return self
        value = _lookup(self.table, name)
        return None if value is None else replace(self, **{self.by_layer: value})

    def inside(self, order: Sequence[str]) -> Pattern:
        """Return the pattern for layers that run in this order."""
        return self

    @property
    def coupled(self) -> bool:
        """Whether units leave all layers that share or read them, so that the network shrinks."""
        return False

    @property
    def takes_experts(self) -> bool:
        """Whether whole experts leave the network, which comes back smaller."""
        return False

    def span(self, columns: int, positions: int) -> int | None:
        """Return within how many consecutive columns a kept weight may change its place.

        None where no single weight may.
        """
        return None

    def count(self, n: int) -> int:
        """Return how many of `n` parts go."""
        raise NotImplementedError

    @property
    def removes_everything(self) -> bool:
        """Whether a layer with this pattern keeps no weight."""
        return bool(getattr(self, self.by_layer) == 1)

    def check_layer(self, name: str, groups: int, rows: int, columns: int) -> None:
        """Raise a `TargetError` where a layer cannot take the pattern.

        Args:
            name: the layer's name.
            groups: its number of groups.
            rows: rows per group.
            columns: columns per group, without a bias.
        """


@dataclass(frozen=True)
class NByM(Pattern):
    """Keep `n` of every `m` consecutive weights of a row: 2:4, 4:8, 1:4.

    A last group of r < m columns keeps ⌈n·r/m⌉.

    Args:
        n: weights kept in each group. A mapping by layer name or glob leaves other layers dense.
        m: size of a group.
        along: "columns" counts groups along the flattened kernel (channel, height, width).
            "channels" groups input channels at one kernel position, as hardware kernels for
            convolutions expect.

    >>> NByM(2, 4).groups(6)
    [0, 0, 0, 0, 1, 1]
    >>> NByM(2, 4).quota(4), NByM(2, 4).quota(1)
    (2, 0)
    """

    solved_by: ClassVar[str] = "lobs.solvers.patterns.nbym"
    by_layer: ClassVar[str] = "n"
    n: int | Mapping[str, int]
    m: int
    along: Literal["columns", "channels"] = "columns"

    def __post_init__(self) -> None:
        if self.along not in ("columns", "channels"):
            raise TargetError(f"along is '{self.along}': use 'columns' or 'channels'.")
        for where, n in _entries(self.n):
            whole = isinstance(self.m, Integral) and math.isfinite(n) and n == int(n)
            if not (whole and self.m >= 1 and 0 <= n <= self.m):
                raise TargetError(
                    f"NByM{where} is {n:g}:{self.m}: it keeps n of every m weights, whole numbers, "
                    "0 ≤ n ≤ m."
                )

    def span(self, columns: int, positions: int) -> int | None:
        """Return the size of a group, where groups lie side by side."""
        whole = columns % self.m == 0 and (self.along == "columns" or positions == 1)
        return self.m if whole else None

    def groups(self, columns: int, positions: int = 1) -> list[int]:
        """Return the group of each column; `positions` consecutive columns form a channel."""
        if self.along == "columns":
            return [j // self.m for j in range(columns)]
        per_position = -(-(columns // positions) // self.m)
        return [(j % positions) * per_position + j // positions // self.m for j in range(columns)]

    @property
    def removes_everything(self) -> bool:
        """Whether a layer with this pattern keeps no weight."""
        return self.n == 0

    def quota(self, size: int) -> int:
        """Return how many weights a group of `size` columns loses."""
        return size - math.ceil(int(_single(self.n, "NByM")) * size / self.m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if not isinstance(self.n, Mapping) else repr(self)


@dataclass(frozen=True)
class Block(Pattern):
    """Remove whole blocks of the weight matrix.

    ⌊fraction · blocks + ½⌋ blocks go. Blocks tile the matrix from its first row and column. A
    smaller block at an edge counts as one.

    Args:
        fraction: share of blocks to remove, or a mapping by layer name or glob.
        shape: (rows, columns) of a block.
    """

    solved_by: ClassVar[str] = "lobs.solvers.patterns.block"
    fraction: float | Mapping[str, float]
    shape: tuple[int, int] = (1, 4)

    def __post_init__(self) -> None:
        _check_fractions(self.fraction, "Block")
        sides = tuple(self.shape) if isinstance(self.shape, Sequence) else ()
        if len(sides) != 2 or not all(isinstance(k, Integral) and k >= 1 for k in sides):
            raise TargetError(
                f"Block has shape {self.shape}: give (rows, columns), whole numbers of at least 1, "
                "such as (1, 4)."
            )
        object.__setattr__(self, "shape", tuple(int(k) for k in sides))

    def count(self, blocks: int) -> int:
        """Return how many of `blocks` blocks go."""
        return math.floor(_single(self.fraction, "Block") * blocks + 0.5)

    def check_layer(self, name: str, groups: int, rows: int, columns: int) -> None:
        """Refuse a layer of so few blocks that all would go."""
        if self.fraction == 1:
            return
        high, wide = self.shape
        blocks = groups * -(-rows // high) * -(-columns // wide)
        if self.count(blocks) == blocks:
            raise TargetError(
                f"layer '{name}' has only {blocks} block(s) of {high}×{wide} or what fits of it: "
                f"all would go for {self.fraction:g}. Take smaller blocks, or skip the layer."
            )


@dataclass(frozen=True)
class Structured(Pattern):
    """Remove whole units (rows, filters, hidden units, attention heads) or whole input channels.

    ⌊fraction · n + ½⌋ of n units or channels go. `lobs.shrink` then takes them out of the network.

    In `prune`, units go together with everything that shares or reads them: the gate of a hidden
    unit, the query, key and value of a head, the columns of the next layer. Those that cost the
    next layer least go, and it makes up for them with the others. Units that could not leave the
    network stay, such as the outputs or the channels that a layer norm reads.

    A mapping does the same where it names all the layers concerned. In other layers, and where no
    units can leave the network, each layer loses units by itself: a removed unit keeps its bias at
    the best constant. A single number then leaves the last layer whole (for units) or the first
    (for inputs): those are the network's own outputs and inputs.

    Whole experts leave a mixture of experts at once, so `prune` returns a smaller network. Those go
    whose absence changes the mixture's output least. The others are refitted.

    Args:
        fraction: share of units, channels or experts to remove; for the first two, a mapping by
            layer name or glob works too.
        what: "units", "inputs" or "experts". A channel covers all kernel positions, in every row.
    """

    solved_by: ClassVar[str] = "lobs.solvers.patterns.structured"
    ordered: ClassVar[bool] = True
    fraction: float | Mapping[str, float]
    what: Literal["units", "inputs", "experts"] = "units"

    def __post_init__(self) -> None:
        _check_fractions(self.fraction, "Structured")
        if self.what not in ("units", "inputs", "experts"):
            raise TargetError(f"what is '{self.what}': use 'units', 'inputs' or 'experts'.")

    def count(self, n: int) -> int:
        """Return how many of `n` units or channels go."""
        return math.floor(_single(self.fraction, "Structured") * n + 0.5)

    def check_layer(self, name: str, groups: int, rows: int, columns: int) -> None:
        """Refuse a layer of so few units that all would go, and experts, which no layer holds."""
        if self.takes_experts:
            raise TargetError(
                "what='experts' takes experts out of a whole network in memory: call "
                "lobs.prune(model, batches, lobs.Structured(…, what='experts'))."
            )
        n = groups * rows if self.what == "units" else columns
        if self.fraction != 1 and n and self.count(n) == n:
            raise TargetError(
                f"layer '{name}' has only {n} {self.what}: all would go for {self.fraction:g}. "
                "Keep more, or skip the layer."
            )

    @property
    def coupled(self) -> bool:
        """Whether units leave all layers that share or read them."""
        return self.what == "units"

    @property
    def takes_experts(self) -> bool:
        """Whether whole experts leave the network."""
        return self.what == "experts"

    def inside(self, order: Sequence[str]) -> Structured:
        """Return the target for layers in this order; the network's own ends stay whole."""
        if isinstance(self.fraction, Mapping):
            return self
        inner = order[1:] if self.what == "inputs" else order[:-1]
        if not inner:
            raise TargetError(
                f"there is only layer '{order[0]}', whose {self.what} are the network's own. "
                f"Structured({{'{order[0]}': {self.fraction:g}}}, '{self.what}') "
                "removes them all the same."
            )
        return replace(self, fraction=dict.fromkeys(inner, self.fraction))


Target: TypeAlias = Sparsity | ErrorBudget | Budget | Pattern


def wanted(target: Target | None, keep: float | str | Mapping[str, float | str] | None) -> Target:
    """Return the target that `target` or `keep`, exactly one of them, asks for.

    >>> wanted(None, "7%")
    Sparsity(fraction=0.93, scope='network')
    """
    if (target is None) == (keep is None):
        wrong = "neither target nor keep is" if target is None else "both target and keep are"
        raise TargetError(
            f"{wrong} given: say keep=0.1 to keep 10 % of the weights, or give a target."
        )
    if keep is not None:
        if isinstance(keep, Mapping):
            if not keep:
                raise TargetError("keep is {}: name at least one layer, such as {'fc*': 0.1}.")
            return Sparsity(
                {name: _removed(part, f"keep['{name}']") for name, part in keep.items()}
            )
        return Sparsity(_removed(keep, "keep"))
    if isinstance(target, Target):
        return target
    if isinstance(target, Real) and not isinstance(target, bool):
        shown = f"{_number(target, 'target'):g}"
        raise TargetError(
            f"target is {shown}: say keep={shown} to keep that fraction of the weights, or "
            f"lobs.Sparsity({shown}) to remove it."
        )
    raise TargetError(
        f"target {target!r} is not one of ours: use Sparsity, Budget, ErrorBudget, NByM, Block or "
        "Structured."
    )


def _removed(keep: float | str, name: str) -> float:
    """Turn a kept fraction, 0.07 or "7%", into the fraction removed."""
    text = str(keep).strip()
    percent = text.endswith("%")
    value = _number(text.removesuffix("%"), name) / (100 if percent else 1)
    if not 0.0 < value <= 1.0:
        raise TargetError(
            f"{name} is {keep}: the kept fraction must lie above 0 and at most at 1 (10 % is 0.1 "
            'or "10%").'
        )
    return round(1.0 - value, 12)


def _check_rounds(rounds: object) -> None:
    if not isinstance(rounds, Integral) or isinstance(rounds, bool) or rounds < 1:
        raise TargetError(f"rounds is {rounds!r}: it is a whole number of at least 1.")


def for_layer(target: Target, name: str) -> Target | None:
    """What a target asks of one layer; None where it asks nothing."""
    match target:
        case Sparsity(fraction=Mapping() as table):
            value = _lookup(table, name)
            return None if value is None else Sparsity(value, scope="layer")
        case ErrorBudget(epsilon=Mapping() as table, relative=relative):
            value = _lookup(table, name)
            return None if value is None else ErrorBudget(value, relative)
        case Pattern():
            return target.for_layer(name)
    return target


def check_names(target: Target, names: Iterable[str]) -> None:
    """Refuse a mapping with a key that matches no layer: it is a typing error, not a wish."""
    known = list(names)
    for key in names_in(target):
        if not isinstance(key, str):
            raise TargetError(f"target names a layer {key!r}: names are strings, such as '{key}'.")
        if not any(key == name or fnmatchcase(name, key) for name in known):
            raise TargetError(
                f"target names '{key}', which matches no prunable layer. There are: "
                f"{', '.join(known)}."
            )


def names_in(target: Target) -> list[str]:
    """Return the names and globs of layers that a target has numbers for."""
    tables: list[object] = []
    match target:
        case Sparsity():
            tables = [target.fraction, target.keep_at_least, target.keep_at_most]
        case ErrorBudget():
            tables = [target.epsilon]
        case Pattern():
            tables = [target.table]
        case Budget():
            tables = [target.keep_at_least, target.keep_at_most]
    return [key for table in tables if isinstance(table, Mapping) for key in table]


def removable(target: Sparsity | Budget, name: str, prunable: int) -> tuple[int, int]:
    """The fewest and the most weights that a network-wide budget may take from one layer."""
    least, most = _lookup(target.keep_at_least, name), _lookup(target.keep_at_most, name)
    # 0.07 of 100 is 7, whatever floating point makes of it.
    fewest = 0 if most is None else prunable - math.floor(most * prunable + 1e-6)
    largest = prunable if least is None else prunable - math.ceil(least * prunable - 1e-6)
    if fewest > largest:
        raise TargetError(
            f"layer '{name}': keep_at_least {least:g} is above keep_at_most {most:g}."
        )
    return fewest, largest


def _check_limits(*tables: Mapping[str, float]) -> None:
    for table in tables:
        if not isinstance(table, Mapping):
            raise TargetError(
                "keep_at_least and keep_at_most are mappings of layer names to fractions, not "
                f"{table!r}."
            )
        for key, given in table.items():
            value = _number(given, f"the kept fraction for '{key}'")
            if not 0.0 <= value <= 1.0:
                raise TargetError(
                    f"the kept fraction {value:g} for '{key}' must lie between 0 and 1."
                )


def _lookup(table: Mapping[str, T], name: str) -> T | None:
    if name in table:
        return table[name]
    return next((value for key, value in table.items() if fnmatchcase(name, key)), None)


def _check_fractions(fraction: float | Mapping[str, float], kind: str) -> None:
    for where, value in _entries(fraction):
        if not 0.0 <= value <= 1.0:
            raise TargetError(
                f"{kind}{where} is {value:g}: the fraction removed must lie between 0 and 1 (90 % "
                "is 0.9)."
            )


def _entries(value: float | Mapping[str, float]) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [
            (f" for '{key}'", _number(v, f"the target for '{key}'")) for key, v in value.items()
        ]
    return [("", _number(value, "the target"))]


def _number(value: object, what: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise TargetError(f"{what} is {shown}: it must be a number, such as 0.9.") from None


def _single(value: float | Mapping[str, float], kind: str) -> float:
    if isinstance(value, Mapping):
        raise TargetError(
            f"{kind} holds a mapping of layer names; a single layer problem needs one number."
        )
    return float(value)
