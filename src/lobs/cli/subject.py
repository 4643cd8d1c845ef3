"""From what the user typed to a network, its calibration batches and a way to evaluate it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lobs import zoo
from lobs.calibration.forward import batch_size
from lobs.deploy.shrink import fit_to
from lobs.errors import FileError, LobsError
from lobs.storage import checkpoint
from lobs.storage.run_store import weights_hash
from lobs.zoo.training import error_rate


@dataclass(frozen=True, eq=False)
class Subject:
    """A network and all that the commands need around it.

    `origin` is what finds the dense network again: a zoo name, a checkpoint's path or
    package.module:function. `network` is what builds it: a zoo name or package.module:function.
    """

    origin: str
    network: str
    title: str
    model: nn.Module
    batches: Iterable[Any]
    evaluate: Callable[[nn.Module], float] | None
    metric: str
    held_out: Iterable[Any] | None = None
    samples: int | None = None

    def score(self, model: nn.Module) -> float | None:
        """What `evaluate` says of a network, if there is one."""
        if self.evaluate is None:
            return None
        value = self.evaluate(model)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise LobsError(
                f"{self.title}: evaluate returned {value!r}; it must return a number."
            ) from None

    def first(self) -> Any:
        """The first batch."""
        for batch in self.batches:
            return batch
        raise LobsError(f"{self.title}: there are no batches.")

    def provenance(self) -> dict[str, Any]:
        """What a saved result must say so that `lobs verify` can find the dense network and the data again."""
        return {
            "network": self.network,
            "origin": self.origin,
            "origin_weights": weights_hash(self.model),
            "calibration_limit": self.samples,
        }


def open_subject(spec: str, samples: int | None = None, *, trust: bool = False) -> Subject:
    """Resolve a zoo name, a checkpoint file, or package.module:function, in this order.

    A file may name a function as its network; that runs code the user did not type, so it takes
    `trust`.
    """
    if spec in zoo.ZOO:
        return _from_zoo(spec, samples)
    if Path(spec).is_file():
        return _from_file(spec, samples, trust)
    if ":" in spec:
        return _from_function(spec, samples)
    if spec and Path(spec).is_dir():
        raise FileError(f"'{spec}' is a folder: name a safetensors file in it.")
    raise FileError(
        f"'{spec}' is neither a zoo network ({', '.join(zoo.ZOO)}), nor a file, nor "
        "package.module:function."
    )


def require_file(path: Path) -> None:
    """Refuse the name of a network where a command takes what was saved of one."""
    if not path.exists() and (str(path) in zoo.ZOO or ":" in path.name):
        raise FileError(
            f"'{path}' names a network, and this takes a file: `lobs prune {path} --keep 10% --out "
            "small.safetensors` "
            f"writes one."
        )


def require_trust(path: str | Path, network: str, trust: bool, otherwise: str = "") -> None:
    """Refuse to run code that a file names, and not the user, unless told to; `otherwise` is another way out."""
    if network not in zoo.ZOO and not trust:
        raise FileError(
            f"'{path}' names '{network}' as its network. Add --trust to run that code{otherwise}."
        )


def _from_zoo(name: str, samples: int | None, model: nn.Module | None = None) -> Subject:
    from lobs.zoo.datasets import sets

    data = zoo.entry(name).data
    model = zoo.trained(name) if model is None else model
    test = sets.load(data, "test").batches()
    return Subject(
        origin=name,
        network=name,
        title=zoo.entry(name).title,
        model=model,
        batches=sets.load(data, "train").batches(limit=samples),
        evaluate=lambda model: error_rate(model, test),
        metric="test error (%)",
        held_out=test,
        samples=samples,
    )


def _from_file(path: str, samples: int | None, trust: bool) -> Subject:
    saved = checkpoint.load(path)
    network = saved.record.get("network")
    if not isinstance(network, str):
        raise FileError(
            f"'{path}' does not say which network it holds; only files written by lobs train and "
            "lobs prune do. For your own "
            f"network write a function and name it as package.module:function."
        )
    require_trust(path, network, trust)
    in_zoo = network in zoo.ZOO
    base = (
        _from_zoo(network, samples, zoo.fresh(network))
        if in_zoo
        else _from_function(network, samples)
    )
    try:
        load = fit_to if saved.record.get("shrunk") else nn.Module.load_state_dict
        load(base.model, saved.state_dict)
    except RuntimeError as error:
        raise FileError(
            f"'{path}' does not fit {network}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return Subject(
        path,
        network,
        base.title,
        base.model.eval(),
        base.batches,
        base.evaluate,
        base.metric,
        base.held_out,
        samples,
    )


def _from_function(spec: str, samples: int | None) -> Subject:
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(
        0, str(Path.cwd())
    )  # as `python -m` does, so that a file beside the user is found
    try:
        module = importlib.import_module(module_name)
        if not hasattr(module, function_name):
            raise LobsError(f"module '{module_name}' has no '{function_name}'.")
        answer = getattr(module, function_name)()
    except LobsError:
        raise
    except Exception as error:  # the user's code may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name in _with_parents(module_name):
            raise LobsError(
                f"cannot import '{module_name}': {error}. Run lobs from the folder that holds it."
            ) from error
        raise LobsError(
            f"'{spec}' raised {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    finally:
        sys.path.pop(0)
    if (
        not isinstance(answer, tuple)
        or len(answer) not in (2, 3)
        or not isinstance(answer[0], nn.Module)
    ):
        raise LobsError(
            f"'{spec}' must return (model, batches) or (model, batches, evaluate), not "
            f"{type(answer).__name__}."
        )
    model, batches, *rest = answer
    return Subject(
        origin=spec,
        network=spec,
        title=spec,
        model=model,
        batches=_again(batches) if samples is None else limit(batches, samples),
        evaluate=rest[0] if rest else None,
        metric="evaluate()",
        samples=samples,
    )


def _with_parents(module: str) -> set[str]:
    """a, a.b and a.b.c of a.b.c: what is missing if the module is."""
    parts = module.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


def _again(batches: Iterable[Any]) -> Iterable[Any]:
    """Commands run through the batches several times: a generator is read into a list."""
    return list(batches) if isinstance(batches, Iterator) else batches


def limit(batches: Iterable[Any], samples: int) -> list[Any]:
    """As many whole batches as hold at least `samples` samples."""
    taken: list[Any] = []
    seen = 0
    for batch in batches:
        if seen >= samples:
            break
        taken.append(batch)
        seen += batch_size(batch)
    return taken
