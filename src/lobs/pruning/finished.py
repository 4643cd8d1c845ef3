"""What a run keeps of a layer that is done, and how that goes to disk and comes back to the bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import cycle
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from torch import Tensor

from lobs.pruning.result import LayerResult
from lobs.solvers.solution import Solution

_TENSORS = ("weight", "mask", "curve")


@dataclass(frozen=True, eq=False)
class FinishedLayer:
    """A layer's solution, its line in the result, and its error with room for rounding."""

    solution: Solution
    result: LayerResult
    largest_error: float

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and a JSON-able record; JSON writes floats so that they come back exactly."""
        solution = {field.name: getattr(self.solution, field.name) for field in fields(Solution)}
        tensors = {name: tensor for name in _TENSORS if (tensor := solution.pop(name)) is not None}
        return tensors, {
            "solution": solution,
            "result": asdict(self.result),
            "largest_error": self.largest_error,
        }

    @classmethod
    def unpacked(
        cls, saved: dict[str, Tensor], record: dict[str, Any], like: Tensor
    ) -> FinishedLayer:
        """The same again, on the device of `like`."""
        tensors: dict[str, Any] = {name: t.to(like.device) for name, t in saved.items()}
        result = _restored(LayerResult, record["result"])
        return cls(Solution(**tensors, **record["solution"]), result, record["largest_error"])


def _restored(kind: Any, value: Any) -> Any:
    """What `asdict` and JSON have made of a value, as its type says it was."""
    if value is None:
        return None
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return _restored(next(part for part in parts if part is not type(None)), value)
    if is_dataclass(kind):
        make, hints = cast(Any, kind), get_type_hints(kind)
        return make(**{name: _restored(hints[name], item) for name, item in value.items()})
    if get_origin(kind) is tuple:
        return tuple(
            _restored(parts[0] if parts[-1] is Ellipsis else part, x)
            for part, x in zip(cycle(parts), value)
        )
    if get_origin(kind) is dict:
        return {name: _restored(parts[1], item) for name, item in value.items()}
    return value
