"""Generated kernels give what torch gives, in every form that this processor can run."""

from __future__ import annotations

import itertools

import pytest
import torch

from lobs.deploy.accelerate import native
from lobs.deploy.accelerate.native import (
    FORMS,
    STORAGES,
    BitMatrix,
    PlaneMatrix,
    SlotMatrix,
    add_planes,
    block_of,
    multiply,
    multiply_slots,
    rounded,
    turned,
)
from lobs.deploy.accelerate.native.bitmask import reference

# A form uses a part of the instructions of those before it.
FORMS_HERE = FORMS[FORMS.index(native.this_form()) :]


def sparse_matrix(rows, columns, keep, block=1):
    there = torch.rand(-(-rows // block), columns) < keep
    return torch.randn(rows, columns) * there.repeat_interleave(block, 0)[:rows]


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS_HERE)
@pytest.mark.parametrize("storage", STORAGES)
def test_bit_masks_of_every_storage_and_shape(form, storage):
    """Column counts off the grid, one row, one column, nothing kept, everything kept."""
    shapes = itertools.product((1, 2, 26), (1, 15, 64, 130), (1, 3), (0, 0.4, 1))
    for rows, columns, samples, keep in shapes:
        weight = sparse_matrix(rows, columns, keep)
        weight[-1] = 0 if columns == 15 else weight[-1]
        matrix, bias = BitMatrix.pack(weight, storage), torch.randn(rows)
        assert torch.equal(matrix.dense(form=form), rounded(weight, storage))
        assert torch.equal(
            matrix.dense(rows // 2, rows, form), rounded(weight, storage)[rows // 2 :]
        )
        for x in (torch.randn(samples, columns), torch.randn(columns, samples).T):
            expected = reference(matrix, x, bias)
            assert close(multiply(matrix, x, bias, form=form), expected)
            part = multiply(matrix, x, bias, rows=(rows // 2, rows), form=form)
            assert close(part, expected[:, rows // 2 :])


@pytest.mark.parametrize("samples", range(1, 17))
def test_bit_masks_for_every_number_of_samples(samples):
    weight, x = sparse_matrix(50, 200, 0.5), torch.randn(samples, 200)
    assert close(multiply(BitMatrix.pack(weight), x), x @ weight.T)


def test_the_size_of_a_bit_matrix():
    weight = sparse_matrix(512, 1024, 0.5)
    dense = weight.nbytes
    sizes = {s: BitMatrix.pack(weight, s).nbytes / dense for s in STORAGES}
    assert sizes["float32"] < 0.55 and sizes["float16"] == sizes["bfloat16"] < 0.30
    assert sizes["int8"] < 0.17 and sizes["int4"] < 0.11


@pytest.mark.parametrize("storage", STORAGES)
def test_rounding_is_near_and_final(storage):
    weight = sparse_matrix(20, 30, 0.6)
    once = rounded(weight, storage)
    most = weight.abs().amax(dim=1, keepdim=True)
    step = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}
    assert bool(((once - weight).abs() <= step[storage] * most * 1.0001).all())
    assert torch.allclose(rounded(once, storage), once, rtol=1e-6)
    assert not bool(once[weight == 0].any())


@pytest.mark.parametrize("form", FORMS_HERE)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_planes_of_every_length(form, block):
    for columns, span, keep in itertools.product((1, 37), (1, 15, 16, 17, 49, 300), (0, 0.3, 1)):
        weight = sparse_matrix(8, columns, keep, block)
        matrix, bias = PlaneMatrix.pack(weight, block), torch.randn(8)
        x, out = torch.randn(columns, span), torch.full((8, span + 5), 7.0)
        add_planes(matrix, x, out, bias, span=span, pitch=span, form=form)
        assert close(out[:, :span], weight @ x + bias.unsqueeze(1))
        assert bool((out[:, span:] == 7).all())  # nothing is written beyond the span


def test_blocks_of_rows_are_found():
    assert block_of(sparse_matrix(8, 50, 0.5, 4)) == 4
    assert block_of(sparse_matrix(8, 50, 0.5, 2)) == 2
    assert block_of(sparse_matrix(8, 50, 0.5)) == block_of(sparse_matrix(7, 50, 1.0)) == 1


@pytest.mark.parametrize("form", FORMS_HERE)
def test_transposes(form):
    for rows, columns in itertools.product((1, 15, 16, 33), repeat=2):
        x = torch.randn(rows, columns + 3)[:, :columns]
        assert torch.equal(turned(x, form), x.T)


def test_two_threads_compute_the_same():
    threads = torch.get_num_threads()
    weight, x = sparse_matrix(901, 1500, 0.5), torch.randn(5, 1500)
    matrix, planes = BitMatrix.pack(weight), PlaneMatrix.pack(weight)
    try:
        answers = []
        for count in (1, 2):
            torch.set_num_threads(count)
            out, wide = torch.empty(901, 96), torch.randn(1500, 96, generator=torch.manual_seed(0))
            add_planes(planes, wide, out, torch.zeros(901), span=96, pitch=96)
            answers.append((multiply(matrix, x), out, matrix.dense(), turned(weight)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@pytest.mark.skipif(native.this_form() != "avx512", reason="slots need AVX-512")
@pytest.mark.parametrize("storage", STORAGES)
def test_slots_of_every_storage_and_shape(storage):
    """Row and column counts off the grid, empty rows and groups, everything kept."""
    shapes = itertools.product((1, 16, 53), (1, 31, 130), (1, 11), (0, 0.1, 1))
    for rows, columns, samples, keep in shapes:
        weight = sparse_matrix(rows, columns, keep)
        weight[16:32] = 0
        matrix, bias = SlotMatrix.pack(weight, storage), torch.randn(rows)
        assert torch.equal(matrix.dense(), rounded(weight, storage))
        assert torch.equal(matrix.dense(rows // 2, rows), rounded(weight, storage)[rows // 2 :])
        for x in (torch.randn(samples, columns), torch.randn(columns, samples).T):
            expected = torch.nn.functional.linear(x, rounded(weight, storage), bias)
            assert close(multiply_slots(matrix, x, bias), expected)
            part = multiply_slots(matrix, x, bias, rows=(rows // 2, rows))
            assert close(part, expected[:, rows // 2 :])


@pytest.mark.skipif(native.this_form() != "avx512", reason="slots need AVX-512")
def test_slots_with_two_threads_and_every_number_of_samples():
    weight, threads = sparse_matrix(1601, 900, 0.3), torch.get_num_threads()
    matrix = SlotMatrix.pack(weight)
    try:
        for samples in range(1, 17):
            x, answers = torch.randn(samples, 900), []
            for count in (1, 2):
                torch.set_num_threads(count)
                answers.append(multiply_slots(matrix, x))
            assert torch.equal(*answers) and close(answers[0], x @ weight.T)
    finally:
        torch.set_num_threads(threads)
    assert len(matrix.heads) > 2 * 20_000  # enough for two threads
