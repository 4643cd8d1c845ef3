"""Turn what the user typed into a network, its calibration batches and a way to evaluate it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lobs import zoo
from lobs.calibration.forward import batch_size
from lobs.deploy.shrink import fit_to
from lobs.errors import FileError, LobsError, clipped
from lobs.layers.folding import folded
from lobs.layers.mixtures import remove
from lobs.storage import checkpoint
from lobs.storage.run_store import weights_hash
from lobs.zoo.training import error_rate

Evaluate = Callable[[nn.Module], float]


@dataclass(frozen=True, eq=False)
class Subject:
    """A network and all that the commands need around it.

    `origin` finds the dense network again: a zoo name, a checkpoint's path or
    package.module:function. `network` builds it: a zoo name or package.module:function. `evaluate`
    returns the `metric` as people read it; `score` is the same with larger values better.
    """

    origin: str
    network: str
    title: str
    model: nn.Module
    batches: Iterable[Any]
    evaluate: Evaluate | None
    metric: str
    larger_is_better: bool = True
    held_out: Iterable[Any] | None = None
    samples: int | None = None

    @property
    def in_zoo(self) -> bool:
        """Return whether the network is one of the zoo's, with a test error in percent."""
        return self.network in zoo.ZOO

    def measure(self, model: nn.Module) -> float | None:
        """Return the metric of a network; None without an evaluate function."""
        if self.evaluate is None:
            return None
        value = self.evaluate(model)
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise LobsError(
                f"{self.title}: evaluate returned {clipped(value)}; it must return a number."
            ) from None

    def score(self, model: nn.Module) -> float:
        """Return a number that is larger for better networks: accuracy from 0 to 1 in the zoo."""
        value = self.measure(model)
        assert value is not None  # callers ask `require_metric` first
        return self.as_score(value)

    def as_score(self, value: float) -> float:
        """Turn the metric into a score."""
        if self.in_zoo:
            return 1 - value / 100
        return value if self.larger_is_better else -value

    def in_metric(self, score: float) -> float:
        """Turn a score back into the metric."""
        if self.in_zoo:
            return round(100 * (1 - score), 10)  # exact: an error counts images
        return score if self.larger_is_better else -score

    def require_metric(self, purpose: str) -> None:
        """Refuse a network without an evaluate function."""
        if self.evaluate is None:
            raise LobsError(
                f"{purpose} needs a metric, and '{self.origin}' has no evaluate function: return "
                "(model, batches, evaluate)."
            )

    def first(self) -> Any:
        """Return the first batch."""
        for batch in self.batches:
            return batch
        raise LobsError(f"{self.title}: there are no batches.")

    def provenance(self) -> dict[str, Any]:
        """Return the record by which `lobs verify` finds network and data again."""
        return {
            "network": self.network,
            "origin": self.origin,
            "origin_weights": weights_hash(self.model),
            "calibration_limit": self.samples,
        }


def open_subject(
    spec: str,
    samples: int | None = None,
    *,
    trust: bool = False,
    network: str | None = None,
    metric: str | None = None,
) -> Subject:
    """Open a zoo name, a checkpoint file, or package.module:function, in this order.

    Args:
        spec: what was typed.
        samples: how many calibration samples to take; all by default.
        trust: run the function that a file names. The user did not type that name.
        network: the function or zoo name that builds a file's network, typed by the user.
        metric: "score" or "error": what the user's evaluate returns.
    """
    if metric not in (None, "score", "error"):
        raise LobsError(f"--metric {metric}: use score (larger is better) or error.")
    found = _found(spec, samples, trust, network)
    if metric is None or found.in_zoo:
        return found
    return replace(found, larger_is_better=metric == "score")


def _found(spec: str, samples: int | None, trust: bool, network: str | None) -> Subject:
    if Path(spec).is_file() and spec not in zoo.ZOO:
        return _from_file(spec, samples, trust, network)
    if network is not None:
        raise LobsError(
            f"--network {network} says what a file holds, and '{spec}' is no file. Leave it out, "
            "or name a file."
        )
    if spec in zoo.ZOO:
        return _from_zoo(spec, samples)
    if ":" in spec:
        return _from_function(spec, samples)
    if spec and Path(spec).is_dir():
        raise FileError(
            f"'{spec}' is a folder: name a safetensors file in it. Folders of transformers or timm "
            "go to lobs prune, eval, compare and verify."
        )
    raise FileError(
        f"'{spec}' is neither a zoo network ({', '.join(zoo.ZOO)}), nor a file, nor "
        "package.module:function."
    )


def require_file(path: Path) -> None:
    """Refuse the name of a network where a command takes a saved file."""
    if not path.exists() and (str(path) in zoo.ZOO or ":" in path.name):
        raise FileError(
            f"'{path}' names a network, and this takes a file: `lobs prune {path} --keep 10% --out "
            "small.safetensors` writes one."
        )


def require_trust(path: str | Path, network: str, trust: bool, otherwise: str = "") -> None:
    """Refuse to run or open what only a file names; `otherwise` is another way out."""
    what = "run that code" if ":" in network else "open that file"
    if network not in zoo.ZOO and not trust:
        raise FileError(
            f"'{path}' names '{network}' as its network. Add --trust to {what}{otherwise}."
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
        larger_is_better=False,
        held_out=test,
        samples=samples,
    )


def _from_file(path: str, samples: int | None, trust: bool, typed: str | None) -> Subject:
    saved = checkpoint.load(path)
    network = typed or saved.record.get("network")
    if not isinstance(network, str):
        raise FileError(
            f"'{path}' does not say which network it holds. Add --network mycode:network, a "
            "function that returns (model, batches), or save with result.save(path, "
            "network='mycode:network'). Files of lobs train and lobs prune say it."
        )
    if typed is None:
        require_trust(path, network, trust)
    base = (
        _from_zoo(network, samples, zoo.fresh(network))
        if network in zoo.ZOO
        else _from_function(network, samples)
    )
    try:
        if base.model.state_dict().keys() != saved.state_dict.keys():
            base = replace(base, model=folded(base.model))  # as the file's network was
        if saved.record.get("shrunk"):
            changed = saved.record.get("shrinkage", {}).get("attributes")
            fit_to(base.model, saved.state_dict, changed)
        else:
            _without_experts(base.model, saved.record)
            base.model.load_state_dict(saved.state_dict)
    except RuntimeError as error:
        raise FileError(
            f"'{path}' does not fit {network}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return replace(base, origin=path, model=base.model.eval(), samples=samples)


def _without_experts(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Take the experts out of a network that a file's record says have left it."""
    settings = record.get("settings")
    experts = settings.get("experts") if isinstance(settings, dict) else None
    try:
        gone = (
            {} if experts is None else {n: torch.tensor(x) for n, x in experts["removed"].items()}
        )
        if gone:
            remove(model, gone)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"experts that left it are not there ({error})") from error


def _from_function(spec: str, samples: int | None) -> Subject:
    answer = _called(spec)
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


def _called(spec: str) -> Any:
    """Import package.module, call its function, and return the answer."""
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a file in this folder is found
    try:
        module = importlib.import_module(module_name)
        if not hasattr(module, function_name):
            raise LobsError(f"module '{module_name}' has no '{function_name}'.")
        return getattr(module, function_name)()
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


def _with_parents(module: str) -> set[str]:
    """Return a, a.b and a.b.c for a.b.c: any of them may be the one that is missing."""
    parts = module.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


def _again(batches: Iterable[Any]) -> Iterable[Any]:
    """Read a generator into a list, because commands read the batches several times."""
    return list(batches) if isinstance(batches, Iterator) else batches


def limit(batches: Iterable[Any], samples: int) -> list[Any]:
    """Return the first whole batches that together hold at least `samples` samples."""
    taken: list[Any] = []
    seen = 0
    for batch in batches:
        if seen >= samples:
            break
        taken.append(batch)
        seen += batch_size(batch)
    return taken
