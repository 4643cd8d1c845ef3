"""Pruning in stages: counts are reached, finished stages are taken up, mistakes are refused."""

from __future__ import annotations

import pytest
import torch

from lobs import Budget, Execution, LobsError, Sparsity, prune_in_stages, retrain
from lobs.training import Shuffled, Stage, sgd
from tests.training.test_retrain import equal, net, pruned, score, task, zeros_held


def stages():
    return [Stage(Sparsity(0.4, scope="layer"), 20), Stage(Sparsity(0.7, scope="layer"), 30)]


def test_stages_reach_their_counts_and_hold_their_zeros():
    x, y = task()
    run = {"evaluate": score, "retraining": {"optimizer": sgd(0.1)}, "progress": False}
    done = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), **run)
    assert [s.kept for s in done.stages] == [128 - 38 - 13, 128 - 67 - 22] and done.iterations == 50
    assert (
        sum(int(m.sum()) for n, m in done.masks.items() if n.endswith("weight"))
        == done.stages[-1].kept
    )
    assert zeros_held(done.model, done.masks)
    assert all(s.pruned_score is not None and s.score == s.history[-1][1] for s in done.stages)


def test_stages_that_cannot_be_meant_are_refused_before_anything_is_pruned(monkeypatch):
    x, y = task()
    monkeypatch.setattr("lobs.training.staged.prune", lambda *_, **__: pytest.fail("pruned"))
    for plan, more, words in (
        (
            [Stage(keep=0.1, iterations=5), Stage(Sparsity(0.5), 5)],
            {},
            "a stage keeps 0.5 of the network after one that kept 0.1",
        ),
        ([Stage(keep=0.5)], {"decay": "slow"}, "decay is 'slow'"),
        ([Stage(Sparsity(0.5), 5, 1.0)], {}, "until_score needs evaluate"),
        (
            [Stage(Budget(parameters=10)), Stage(Budget(parameters=50))],
            {},
            "keeps 50 weights after one that kept 10",
        ),
        ([Stage(keep=0.5), Stage(Budget(bytes=1))], {}, "what cannot be removed"),
        ([Stage(Sparsity(0.5), "5")], {}, "iterations = '5'"),
        ([0.5], {}, "give a list such as"),
        (
            [Stage(keep=0.5)],
            {"until_score": 3},
            "retraining has 'until_score': give it to its Stage",
        ),
    ):
        with pytest.raises(LobsError, match=words):
            prune_in_stages(
                net(), [(x, y)], Shuffled(x, y, 24), plan, retraining=more, progress=False
            )


def test_stages_that_stay_or_come_from_a_generator_are_taken():
    x, y = task()
    plan = (Stage(Sparsity(removed), 2) for removed in (0.93, 1 - 0.07))  # not the same float
    assert (
        prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), plan, progress=False).iterations == 4
    )


def test_a_folder_of_stages_knows_how_they_were_retrained(tmp_path):
    x, y = task()

    def run(rate):
        settings = {"optimizer": sgd(rate)}
        return prune_in_stages(
            net(),
            [(x, y)],
            Shuffled(x, y, 24),
            [Stage(keep=0.5, iterations=5)],
            retraining=settings,
            execution=Execution(resume=tmp_path),
            progress=False,
        )

    assert equal(run(0.05).model, run(0.05).model)
    with pytest.raises(LobsError, match="holds another way of retraining"):
        run(5.0)


def test_one_stage_is_pruning_then_retraining():
    x, y = task()
    done = prune_in_stages(
        net(), [(x, y)], Shuffled(x, y, 24), [Stage(Sparsity(0.5), 25)], progress=False
    )
    cut = pruned()
    assert equal(
        done.model,
        retrain(cut.model, cut.masks, Shuffled(x, y, 24), iterations=25, progress=False).model,
    )


def test_stages_with_a_fixed_inverse_only_shrink_their_masks():
    x, y = task()
    run = {"pruning": {"solver": "lobs", "inputs": "dense"}, "progress": False}
    first = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages()[:1], **run)
    both = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), **run)
    assert all(bool((first.masks[name] | ~mask).all()) for name, mask in both.masks.items())


def test_interrupted_stages_go_on_where_they_were(tmp_path):
    x, y = task()
    run = {"evaluate": score, "progress": False}
    whole = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), **run)
    prune_in_stages(
        net(),
        [(x, y)],
        Shuffled(x, y, 24),
        stages()[:1],
        execution=Execution(resume=tmp_path),
        **run,
    )
    before = (tmp_path / "stage-1.safetensors").stat().st_mtime_ns
    again = prune_in_stages(
        net(), [(x, y)], Shuffled(x, y, 24), stages(), execution=Execution(resume=tmp_path), **run
    )
    assert equal(again.model, whole.model) and again.stages == whole.stages
    assert (tmp_path / "stage-1.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "stage-1.safetensors",
        "stage-2.safetensors",
    ]
    with pytest.raises(LobsError, match="holds another stage"):
        prune_in_stages(
            net(),
            [(x, y)],
            Shuffled(x, y, 24),
            [Stage(Sparsity(0.2), 20)],
            execution=Execution(resume=tmp_path),
            **run,
        )


def test_finished_stages_of_another_network_or_another_solver_are_refused(tmp_path):
    x, y = task()
    run = {"execution": Execution(resume=tmp_path), "progress": False}
    prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages()[:1], **run)
    other = net()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    with pytest.raises(LobsError, match="holds another network"):
        prune_in_stages(other, [(x, y)], Shuffled(x, y, 24), stages()[:1], **run)
    with pytest.raises(LobsError, match="holds another way of pruning"):
        prune_in_stages(
            net(),
            [(x, y)],
            Shuffled(x, y, 24),
            stages()[:1],
            pruning={"solver": "magnitude"},
            **run,
        )


def test_no_stages_is_a_mistake():
    with pytest.raises(LobsError, match="no stages"):
        prune_in_stages(net(), [task()], [task()], [], progress=False)


def test_training_inside_a_stage_goes_on_where_it_was(tmp_path):
    x, y = task()
    run = {"retraining": {"every": 5}, "progress": False}
    whole = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), evaluate=score, **run)
    looks = 0

    def interrupted(model):
        nonlocal looks
        looks += 1
        if looks == 9:
            raise KeyboardInterrupt
        return score(model)

    run["execution"] = Execution(resume=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), evaluate=interrupted, **run)
    assert (tmp_path / "stage-2" / "training.safetensors").is_file()
    again = prune_in_stages(net(), [(x, y)], Shuffled(x, y, 24), stages(), evaluate=score, **run)
    assert equal(again.model, whole.model) and again.stages == whole.stages


def test_a_stage_speaks_of_what_is_kept():
    assert Stage(keep="7%").wanted == Stage(keep=0.07).wanted == Sparsity(0.93)
    with pytest.raises(LobsError, match=r"target is 0\.93: say keep=0\.93"):
        Stage(0.93)
    with pytest.raises(LobsError, match="neither target nor keep"):
        Stage()


def test_execution_goes_to_all_stages_or_is_refused():
    x, y = task()
    rest = (net(), [(x, y)], Shuffled(x, y, 24), [Stage(keep=0.5)])
    with pytest.raises(LobsError, match="pruning has 'execution': give it to prune_in_stages"):
        prune_in_stages(*rest, pruning={"execution": Execution()}, progress=False)
    with pytest.raises(LobsError, match=r"does not support Execution\(distributed=True\)"):
        prune_in_stages(*rest, execution=Execution(distributed=True), progress=False)
    with pytest.raises(TypeError, match="there is no option 'inplace'"):
        prune_in_stages(*rest, pruning={"inplace": True}, progress=False)
    done = prune_in_stages(*rest, execution=Execution(memory="64GB"), progress=False)
    assert repr(done).startswith("StagedResult(1 stages, kept 64 of 128 weights, 0 iterations")
