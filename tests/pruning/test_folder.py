"""A network in a folder is pruned block by block, with the bits of a run in memory."""

from __future__ import annotations

import gc
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lobs
from lobs import Execution, LobsError, NByM, Sparsity
from lobs.pruning import folder_walk
from lobs.solvers.patterns.nbym import broken_groups
from lobs.storage.shards import INDEX


class Part(nn.Module):
    """A residual block that takes a shared argument and returns a tuple."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x, scale=None):
        out = x + self.down(torch.relu(self.up(self.norm(x)))) * (1.0 if scale is None else scale)
        return (out, None)


class Decoder(nn.Module):
    """An embedding, blocks and a head that shares the embedding's weights."""

    def __init__(self, depth=4, tied=True):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Part() for _ in range(depth))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.0, 8), persistent=False)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, scale=self.scale)[0]
        return self.head(self.norm(h))


class Own(Decoder):
    """Every block has an argument of its own."""

    def forward(self, ids):
        h = self.embed(ids)
        for number, block in enumerate(self.blocks):
            h = block(h, scale=self.scale * number)[0]
        return self.head(self.norm(h))


class Fickle(Own):
    """One batch's third block is called without a tensor first."""

    def forward(self, ids):
        h, odd = self.embed(ids), torch.equal(ids.flatten(), data(6)[5].flatten())
        for number, block in enumerate(self.blocks):
            h = block(None if odd and number == 2 else h, scale=self.scale * number)[0]
        return self.head(self.norm(h))


class Skips(Decoder):
    def forward(self, ids):
        before = h = self.embed(ids)
        for block in self.blocks:
            before, h = h, block(h + before)[0]
        return self.head(h)


class Depends(Decoder):
    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, scale=h.mean(0, keepdim=True))[0]
        return self.head(h)


class Twice(Decoder):
    def forward(self, ids):
        h = self.embed(ids)
        for block in (*self.blocks[:1], *self.blocks[:1], *self.blocks[1:]):
            h = block(h)[0]
        return self.head(h)


class Loops(Decoder):
    def forward(self, ids):
        h = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            h = block(h)[0]
        return self.head(h)


def data(number=4):
    return [
        torch.randint(0, 20, (6, 9), generator=torch.Generator().manual_seed(s))
        for s in range(number)
    ]


def written(path, build=Decoder, kind=torch.float32):
    """Write a network's folder and return the network."""
    torch.manual_seed(0)
    model = build().to(kind).eval()
    state = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    names = sorted(state)
    path.mkdir()
    files = {}
    for part in range(3):  # tensors of one block lie in several shards
        file = f"model-{part + 1:05}-of-00003.safetensors"
        files |= dict.fromkeys(names[part::3], file)
        save_file({name: state[name].clone() for name in names[part::3]}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (path / "config.json").write_text('{"depth": 4}')
    return model


def add_head(folder):
    """Add the weights of a head that is not tied."""
    save_file({"head.weight": torch.randn(20, 8)}, folder / "head.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["head.weight"] = "head.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def pruned(path, build=Decoder, name="small", **how):
    """Prune the folder `path / 'big'`."""
    if "target" not in how:
        how.setdefault("keep", 0.5)
    how = {"progress": False, "out": path / name, **how}
    return lobs.prune_folder(build, path / "big", how.pop("batches", data()), **how)


def state(folder):
    """Return a folder's tensors, by its index."""
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    parts = {file: load_file(folder / file) for file in sorted({*listed.values()})}
    assert sum(map(len, parts.values())) == len(listed)
    return {name: parts[file][name] for name, file in listed.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a
    )


def refused(work, *words):
    with pytest.raises(LobsError) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("build", [Decoder, Own])
@pytest.mark.parametrize(
    ("refit", "number", "rows"), [("layers", 8, 6), ("blocks", 8, 6), ("blocks", 3, 16)]
)
def test_the_bits_are_those_of_a_run_in_memory(tmp_path, build, refit, number, rows):
    dense = written(tmp_path / "big", build)
    batches = [torch.cat([x] * 3)[:rows] for x in data(number)]
    result = pruned(tmp_path, build, refit=refit, batches=batches)
    whole = lobs.prune(
        dense,
        batches,
        Sparsity(0.5, scope="layer"),
        layers=[layer.name for layer in result.layers],
        refit=refit,
        progress=False,
    )
    found = state(tmp_path / "small")
    assert equal(found, {n: t for n, t in whole.model.state_dict().items() if n in found})
    assert [x.kept for x in result.layers] == [x.kept for x in whole.layers]
    assert len(result.layers) == 8 and result.kept == result.total // 2
    assert len(result.refits) == (4 if refit == "blocks" else 0)


def test_the_folder_is_complete_and_says_what_stayed_dense(tmp_path):
    dense = written(tmp_path / "big")
    (tmp_path / "big" / "tokenizer.json").write_text("[]")
    result = pruned(tmp_path)
    found, before = state(tmp_path / "small"), state(tmp_path / "big")
    assert found.keys() == before.keys()
    assert all(found[n].shape == t.shape and found[n].dtype == t.dtype for n, t in before.items())
    assert torch.equal(found["embed.weight"], dense.embed.weight)
    there = {p.name for p in (tmp_path / "small").iterdir()}
    assert {"config.json", "tokenizer.json", INDEX} < there
    assert not [name for name in there if name.startswith(".")]
    size = json.loads((tmp_path / "small" / INDEX).read_text())["metadata"]["total_size"]
    assert size == sum(t.numel() * t.element_size() for t in found.values())
    assert result.dense == ("head",) and "Left dense: head." in result.summary()
    assert "2.0× fewer weights" in result.summary() and result.seconds > 0
    built = Decoder()
    missing, unexpected = built.load_state_dict(found, strict=False)
    assert missing == ["head.weight"] and not unexpected


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("solver", ["auto", "columns"])
def test_patterns_are_exact_and_types_stay(tmp_path, kind, solver):
    written(tmp_path / "big", kind=kind)
    result = pruned(tmp_path, lambda: Decoder().to(kind), target=NByM(2, 4), solver=solver)
    found = state(tmp_path / "small")
    assert {t.dtype for t in found.values()} == {kind}
    for layer in result.layers:
        weight = found[f"{layer.name}.weight"]
        assert broken_groups(weight, NByM(2, 4)) == 0 and layer.kept == weight.numel() // 2


class Killed(BaseException):
    pass


@pytest.mark.parametrize("refit", ["layers", "blocks"])
@pytest.mark.parametrize("store", [None, "work"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, monkeypatch, refit, store):
    written(tmp_path / "big")
    pruned(tmp_path, name="whole", refit=refit)
    write, calls = folder_walk.write_shard, []

    def dying(path, tensors, masks=None):
        calls.append(path)
        if len(calls) == 3:  # in the middle of the third block's file
            (path.parent / f".{path.name}.half").write_bytes(b"half")
            raise Killed
        write(path, tensors, masks)

    how = {"refit": refit}
    if store:
        how["execution"] = Execution(resume=tmp_path / store)
    monkeypatch.setattr(folder_walk, "write_shard", dying)
    with pytest.raises(Killed):
        pruned(tmp_path, **how)
    assert not (tmp_path / "small" / INDEX).exists()
    monkeypatch.setattr(folder_walk, "write_shard", write)
    refused(lambda: pruned(tmp_path, keep=0.4, **how), "another run", "target was")
    refused(lambda: pruned(tmp_path, batches=data(5), **how), "another run", "data was")
    result = pruned(tmp_path, **how)
    assert result.found == 2 and len(result.layers) == 8
    assert "interrupted run: 2 blocks" in result.summary()
    assert equal(state(tmp_path / "small"), state(tmp_path / "whole"))
    assert {p.name for p in (tmp_path / "small").iterdir()} == {
        p.name for p in (tmp_path / "whole").iterdir()
    }
    if store:  # the run store is the user's own, so the call can be repeated
        assert pruned(tmp_path, **how).found == 4
    else:
        refused(lambda: pruned(tmp_path, **how), "no unfinished run")


class Shares(Decoder):
    """Blocks share a buffer, which a folder stores once."""

    def __init__(self):
        super().__init__()
        gain = torch.linspace(0.5, 1.0, 8)
        for block in self.blocks:
            block.register_buffer("gain", gain)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, scale=block.gain)[0]
        return self.head(self.norm(h))


def test_a_buffer_that_blocks_share_is_stored_once(tmp_path, monkeypatch):
    dense = written(tmp_path / "big", Shares)
    places = json.loads((tmp_path / "big" / INDEX).read_text())["weight_map"]
    gains = sorted(name for name in places if name.endswith(".gain"))
    for name in gains[1:]:
        path = tmp_path / "big" / places.pop(name)
        save_file({n: t for n, t in load_file(path).items() if n != name}, path)
    (tmp_path / "big" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    pruned(tmp_path, Shares, name="whole")
    write, calls = folder_walk.write_shard, []

    def dying(*given):
        calls.append(given)
        if len(calls) == 3:
            raise Killed
        write(*given)

    monkeypatch.setattr(folder_walk, "write_shard", dying)
    with pytest.raises(Killed):
        pruned(tmp_path, Shares)
    monkeypatch.setattr(folder_walk, "write_shard", write)
    assert pruned(tmp_path, Shares).found == 2
    found = state(tmp_path / "small")
    assert [name for name in found if name.endswith(".gain")] == gains[:1]
    assert torch.equal(found[gains[0]], dense.blocks[0].gain)
    assert equal(found, state(tmp_path / "whole"))


class Both(Decoder):
    """An encoder and a decoder: two rows of blocks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Part() for _ in range(2))

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.encoder:
            h = block(h)[0]
        for block in self.blocks:
            h = block(h, scale=self.scale)[0]
        return self.head(self.norm(h))


def test_a_second_row_of_blocks_stays_dense_and_is_named(tmp_path):
    written(tmp_path / "big", Both)
    with pytest.warns(lobs.NumericalWarning, match=r"4 layers with .* stay dense, such as 'enc"):
        result = pruned(tmp_path, Both)
    assert {name for name in result.dense if name.startswith("encoder")} == {
        f"encoder.{i}.{part}" for i in range(2) for part in ("up", "down")
    }


def test_a_head_over_the_vocabulary_stays_dense_without_a_warning(tmp_path, recwarn):
    written(tmp_path / "big", lambda: Decoder(tied=False))
    add_head(tmp_path / "big")
    assert "head" in pruned(tmp_path, lambda: Decoder(tied=False)).dense
    assert not [w for w in recwarn if "lie outside" in str(w.message)]


def test_batches_run_once_up_to_the_first_block(tmp_path):
    written(tmp_path / "big")
    seen = []

    class Counted(Decoder):
        def forward(self, ids):
            seen.append(id(ids))
            return super().forward(ids)

    pruned(tmp_path, Counted, batches=data(5))
    assert len(seen) == 3 + 5  # three looks at the first batch, then each once


def test_other_weights_are_another_run(tmp_path, monkeypatch):
    written(tmp_path / "big")
    monkeypatch.setattr(folder_walk.Walk, "complete", lambda _: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        pruned(tmp_path)
    shutil.rmtree(tmp_path / "big")
    written(tmp_path / "big", lambda: Decoder(tied=True).requires_grad_(False).apply(_louder))
    refused(lambda: pruned(tmp_path), "another run", "weights was")


def _louder(module):
    if isinstance(module, nn.Linear):
        module.weight.mul_(2)


def test_two_blocks_are_in_memory_at_most(tmp_path, monkeypatch):
    written(tmp_path / "big", lambda: Decoder(depth=6))
    live = []

    def look(*_):
        tensors = [x for x in gc.get_objects() if type(x) is nn.Parameter and not x.is_meta]
        live.append(sum(t.shape == (16, 8) for t in tensors))  # one in every block

    solve = folder_walk.solve
    monkeypatch.setattr(folder_walk, "solve", lambda *a: (look(), solve(*a))[1])
    write = folder_walk.write_shard
    monkeypatch.setattr(folder_walk, "write_shard", lambda *a: (look(), write(*a))[1])
    gc.collect()
    look()
    before = live.pop()
    pruned(tmp_path, lambda: Decoder(depth=6))
    assert max(live) - before == 2
    assert len(live) == 12 + 7


def test_the_head_is_never_read(tmp_path, monkeypatch):
    written(tmp_path / "big", lambda: Decoder(tied=False))
    add_head(tmp_path / "big")
    read, seen = folder_walk.Shards.read, []

    def spy(self, names):
        names = list(names)
        seen.append(names)
        return read(self, names)

    monkeypatch.setattr(folder_walk.Shards, "read", spy)
    monkeypatch.setattr(folder_walk.Walk, "complete", lambda _: None)
    result = pruned(tmp_path, lambda: Decoder(tied=False))
    named = {name for names in seen for name in names}
    assert "embed.weight" in named and not {"head.weight", "norm.weight"} & named
    assert result.dense == ("head", "embed.weight")


def test_a_module_on_the_meta_device_needs_real_buffers(tmp_path):
    written(tmp_path / "big")
    with torch.device("meta"):
        model = Decoder()
    model.scale = torch.empty(8, device="meta")  # transformers, once imported, makes it real
    refused(lambda: pruned(tmp_path, model), "buffer 'scale'", "lambda: MyModel(config)")
    model.scale = torch.linspace(0.5, 1.0, 8)
    before = {n: id(p) for n, p in model.named_parameters()}
    pruned(tmp_path, model)
    pruned(tmp_path, name="other")
    assert equal(state(tmp_path / "small"), state(tmp_path / "other"))
    assert {n: id(p) for n, p in model.named_parameters()} == before  # the caller's own is left
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Skips, "block 'blocks.1' does not get what block 'blocks.0' returned"),
        (Depends, "arguments of block 'blocks.1' follow the activations"),
        (Twice, "block 'blocks.0' runs 2 times"),
        (Loops, "block 'blocks.0' runs 2 times"),
    ],
)
def test_networks_whose_blocks_do_not_make_a_row_are_refused(tmp_path, build, words):
    written(tmp_path / "big", build)
    refused(lambda: pruned(tmp_path, build), words, "lobs.prune")


def test_what_cannot_be_done_is_one_line(tmp_path):
    dense = written(tmp_path / "big")
    refused(lambda: pruned(tmp_path, target=Sparsity(0.5)), "scope='layer'")
    refused(lambda: pruned(tmp_path, target=lobs.Budget(parameters=9)), "all layers at once")
    refused(lambda: pruned(tmp_path, refit="network"), "'layers' or 'blocks'")
    refused(lambda: pruned(tmp_path, inputs="dense"), "'asymmetric'")
    refused(lambda: pruned(tmp_path, solver="obd-fisher"), "gradients")
    refused(lambda: pruned(tmp_path, layers="head"), "outside the blocks")
    refused(lambda: pruned(tmp_path, dense), "in memory", "lobs.prune")
    refused(lambda: pruned(tmp_path, lambda: 3), "returned a int")
    refused(lambda: pruned(tmp_path, 3), "model is a int")
    refused(lambda: pruned(tmp_path, batches=[]), "batches is empty")
    assert not (tmp_path / "small").exists() or not any((tmp_path / "small").iterdir())
    refused(lambda: pruned(tmp_path, lambda: nn.Linear(2, 2)), "holds no tensor 'weight'")
    refused(lambda: pruned(tmp_path, lambda: Decoder(depth=5)), "no tensor 'blocks.4.")
    refused(lambda: pruned(tmp_path, lambda: Decoder().half()), "float32", "float16")
    refused(lambda: pruned(tmp_path, out=tmp_path / "big"), "the source itself")
    refused(lambda: pruned(tmp_path, execution=Execution(memory="9MB")), "not enough", "Allow")
    same = Execution(resume=tmp_path / "small")
    refused(lambda: pruned(tmp_path, execution=same), "the output folder: leave resume out")


def test_shared_blocks_are_refused(tmp_path):
    def shared():
        model = Decoder()
        model.blocks[1].up.weight = model.blocks[0].up.weight
        return model

    written(tmp_path / "big")
    refused(lambda: pruned(tmp_path, shared), "blocks.0.up.weight", "share one parameter")


def test_weights_that_are_not_finite_are_named(tmp_path):
    written(tmp_path / "big", lambda: Decoder().requires_grad_(False).apply(_spoil))
    refused(lambda: pruned(tmp_path), "layer 'blocks.0.up'")


def _spoil(module):
    if isinstance(module, nn.Linear) and module.out_features == 16:
        module.weight[0, 0] = float("nan")


def test_a_memory_limit_that_suffices_gives_the_pattern_and_a_log(tmp_path):
    written(tmp_path / "big")
    execution = Execution(memory="8GB", log=tmp_path / "log.jsonl")
    result = pruned(tmp_path, target=NByM(2, 4), execution=execution, skip="*.0.up")
    assert len(result.layers) == 7 and "blocks.0.up" in result.dense
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "block" for line in lines) == 4
    assert torch.equal(
        state(tmp_path / "small")["blocks.0.up.weight"],
        state(tmp_path / "big")["blocks.0.up.weight"],
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_llama(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    dense = transformers.LlamaForCausalLM(config).eval()
    dense.save_pretrained(tmp_path / "big")
    batches = [{"input_ids": x} for x in data()]
    result = pruned(tmp_path, lambda: transformers.LlamaForCausalLM(config), batches=batches)
    whole = lobs.prune(
        dense,
        batches,
        Sparsity(0.5, scope="layer"),
        refit="layers",
        layers=[layer.name for layer in result.layers],
        progress=False,
    )
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "small")
    assert equal(again.state_dict(), whole.model.state_dict())
    assert len(result.layers) == 21 and "lm_head" in result.dense
