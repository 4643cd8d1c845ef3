"""Transpose matrices, 16 × 16 numbers at a time in registers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lobs.deploy.accelerate.native.emit import MASKED, Emitter, V, inside, load, store
from lobs.deploy.accelerate.native.machine_code import Form, Kernel, this_form

# Fields of a job, after the number of bands of 16 rows.
_FROM, _TO, _ROWS, _COLUMNS, _FROM_STRIDE, _TO_STRIDE = range(1, 7)
_WORTH_A_THREAD = 100_000  # numbers


def turned(x: Tensor, form: Form | None = None) -> Tensor:
    """Return the transpose of a matrix, contiguous.

    Args:
        x: (rows, columns), float32, contiguous in its rows.
        form: the instructions to use; by default the best that this processor has.
    """
    rows, columns = x.shape
    out = torch.empty(columns, rows)
    bands = -(-rows // 16)
    job = [x.data_ptr(), out.data_ptr(), rows, columns, x.stride(0), rows]
    threads = min(torch.get_num_threads(), bands, x.numel() // _WORTH_A_THREAD)
    if x.numel():
        _kernel(form or this_form())(bands, job, threads)
    return out


@cache  # machine code must outlive every call
def _kernel(form: Form) -> Kernel:
    blocks = [_block("@whole", edge=False), _block("@edge", edge=True)]
    return Kernel("\n".join([MASKED, *blocks, _span()]), form)


def _span() -> str:
    """Return the function that walks over bands of 16 rows, and in each over blocks."""
    e = Emitter()
    e.do("define void @span(ptr %job, i64 %first, i64 %last) {", "entry:")
    rows, columns = e.field("%job", _ROWS), e.field("%job", _COLUMNS)
    e.do("  br label %bands", "bands:", "  %band = phi i64 [%first, %entry], [%next, %end]")
    e.do("  %next = add i64 %band, 1")
    row = e("mul i64 %band, 16")
    fits_below = e(f"icmp sle i64 {e(f'add i64 {row}, 16')}, {rows}")
    e.do("  br label %blocks", "blocks:", "  %column = phi i64 [0, %bands], [%right, %step]")
    e.do("  %right = add i64 %column, 16")
    whole = e(f"and i1 {fits_below}, {e(f'icmp sle i64 %right, {columns}')}")
    e.do(f"  br i1 {whole}, label %inner, label %outer")
    for label, name in (("inner", "@whole"), ("outer", "@edge")):
        e.do(f"{label}:", f"  call void {name}(ptr %job, i64 {row}, i64 %column)")
        e.do("  br label %step")
    e.do("step:")
    more = e(f"icmp slt i64 %right, {columns}")
    e.do(f"  br i1 {more}, label %blocks, label %end", "end:")
    again = e("icmp slt i64 %next, %last")
    e.do(f"  br i1 {again}, label %bands, label %done", "done:", "  ret void", "}", "")
    return e.text()


def _block(name: str, edge: bool) -> str:
    """Return the function that transposes one block; at an edge only what lies inside."""
    e = Emitter()
    e.do(f"define internal void {name}(ptr %job, i64 %row, i64 %column) {{", "entry:")
    stride, to_stride = e.field("%job", _FROM_STRIDE), e.field("%job", _TO_STRIDE)
    rows, columns = e.field("%job", _ROWS), e.field("%job", _COLUMNS)
    source, target = e.field("%job", _FROM, "ptr"), e.field("%job", _TO, "ptr")
    across = inside(e, columns, "%column") if edge else ""
    down = inside(e, rows, "%row") if edge else ""
    lines = []
    for i in range(16):
        row = _limited(e, "%row", i, rows) if edge else e(f"add i64 %row, {i}")
        place = e(f"add i64 {e(f'mul i64 {row}, {stride}')}, %column")
        lines.append(load(e, e.at(source, place, "float"), across))
    for i, line in enumerate(_exchanged(e, lines)):
        column = e(f"add i64 %column, {i}")
        place = e(f"add i64 {e(f'mul i64 {column}, {to_stride}')}, %row")
        mask = down
        if edge:
            there = e(f"icmp slt i64 {column}, {columns}")
            mask = e(f"select i1 {there}, <16 x i1> {down}, <16 x i1> zeroinitializer")
        e.do(store(line, e.at(target, place, "float"), mask))
    e.do("  ret void", "}", "")
    return e.text()


def _exchanged(e: Emitter, lines: list[str]) -> list[str]:
    """Return 16 transposed lines: swap blocks of 8, then 4, 2 and 1, across the diagonal."""
    lines = list(lines)
    for step in (8, 4, 2, 1):
        for i in range(16):
            if i & step:
                continue
            a, b = lines[i], lines[i + step]
            upper = [lane if not lane & step else 16 + lane - step for lane in range(16)]
            lower = [lane + step if not lane & step else 16 + lane for lane in range(16)]
            for j, order in ((i, upper), (i + step, lower)):
                picked = ", ".join(f"i32 {lane}" for lane in order)
                lines[j] = e(f"shufflevector {V} {a}, {V} {b}, <16 x i32> <{picked}>")
    return lines


def _limited(e: Emitter, start: str, ahead: int, size: str) -> str:
    """Return start + ahead, or the last row: rows beyond it are not written."""
    row = e(f"add i64 {start}, {ahead}")
    last = e(f"sub i64 {size}, 1")
    return e(f"select i1 {e(f'icmp slt i64 {row}, {size}')}, i64 {row}, i64 {last}")
