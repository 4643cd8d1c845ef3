from __future__ import annotations

import importlib
import pkgutil

import benchmarks
import pytest

import experiments

MODULES = [
    module.name
    for package in (benchmarks, experiments)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_and_experiment_imports(name):
    importlib.import_module(name)


def test_the_list_is_not_empty():
    assert {"benchmarks.rivals", "experiments.dong2017.table1"} <= set(MODULES)
