"""LLVM code of the slots kernel: 16 rows side by side, each slot one weight of every row at most.

Few weights leave most of a row's 16 columns empty, so that expanding them there is wasted. A slot
takes weights of 16 rows from the same 32 columns. Those columns' inputs are in two registers. One
permutation gives every row the input of its own weight. It needs AVX-512.
"""

from __future__ import annotations

from lobs.deploy.accelerate.native.bitmask_code import loaded
from lobs.deploy.accelerate.native.emit import DECLARE, Emitter, V, load, store

ROWS = 16  # of a group, one in each lane
WINDOW = 32  # columns that a slot can take weights from
UNROLL = 4  # slots that one turn of the loop computes
MOST = 8  # samples that one pass over the slots serves
# Fields of a job, after the number of groups.
_VALUES, _HEADS, _PLACES, _FIRST, _STARTS, _SCALES, _BIAS, _X, _OUT, _X_STRIDE, _OUT_STRIDE = range(
    1, 12
)
_PERMUTE = f"declare {V} @llvm.x86.avx512.vpermi2var.ps.512({V}, <16 x i32>, {V})\n"


def code(kind: str, samples: int) -> str:
    """Return the kernel for a number of samples.

    Args:
        kind: how values are stored.
        samples: number of inputs.
    """
    passes = -(-samples // MOST)
    parts = [samples // passes + (i < samples % passes) for i in range(passes)]
    e = Emitter()
    e.do("define void @span(ptr %job, i64 %first, i64 %last) {", "entry:", "  br label %groups")
    e.do("groups:", "  %group = phi i64 [%first, %entry], [%next, %groups]")
    sample = 0
    for some in parts:
        e.do(f"  call void @pass_{some}(ptr %job, i64 %group, i64 {sample})")
        sample += some
    e.do("  %next = add i64 %group, 1")
    more = e("icmp ult i64 %next, %last")
    e.do(f"  br i1 {more}, label %groups, label %done", "done:", "  ret void", "}", "")
    return "\n".join([DECLARE, _PERMUTE, *(_pass(n, kind) for n in sorted(set(parts))), e.text()])


def _pass(samples: int, kind: str) -> str:
    """Return the function that computes some samples of one group of rows."""
    e = Emitter()
    e.do(f"define internal void @pass_{samples}(ptr %job, i64 %group, i64 %sample) {{", "entry:")
    places = (_VALUES, _HEADS, _PLACES, _FIRST, _STARTS)
    values, heads, indices, firsts, starts = (e.field("%job", place, "ptr") for place in places)
    stride = e.field("%job", _X_STRIDE)
    begin = e.at(e.field("%job", _X, "ptr"), e(f"mul i64 {stride}, %sample"), "float")
    inputs = [e.at(begin, e(f"mul i64 {stride}, {b}"), "float") for b in range(samples)]
    first = e(f"load i64, ptr {e.at(firsts, '%group', 'i64')}")
    last = e(f"load i64, ptr {e.at(firsts, e('add i64 %group, 1'), 'i64')}")
    start = e(f"load i64, ptr {e.at(starts, '%group', 'i64')}")
    some = e(f"icmp ult i64 {first}, {last}")
    e.do(f"  br i1 {some}, label %slots, label %finish")
    e.do("slots:", f"  %slot = phi i64 [{first}, %entry], [%next_slot, %slots]")
    e.do(f"  %at = phi i64 [{start}, %entry], [%next_at, %slots]")
    keys = [(b, s) for b in range(samples) for s in range(_sums(samples))]
    for b, s in keys:
        e.do(f"  %sum_{b}_{s} = phi {V} [zeroinitializer, %entry], [%new_{b}_{s}, %slots]")
    sums, at = {(b, s): f"%sum_{b}_{s}" for b, s in keys}, "%at"
    for turn in range(UNROLL):
        slot = e(f"add i64 %slot, {turn}")
        head = e(f"load i32, ptr {e.at(heads, slot, 'i32')}, align 4")
        mask = e(f"trunc i32 {head} to i16")
        window = e(f"zext i32 {e(f'lshr i32 {head}, 16')} to i64")
        value = _expanded(e, values, at, mask, kind)
        wide = e(f"call i64 @llvm.ctpop.i64(i64 {e(f'zext i16 {mask} to i64')})")
        at = e(f"add i64 {at}, {wide}")
        bytes_ = e(f"load <16 x i8>, ptr {e.at(indices, slot, '<16 x i8>')}, align 1")
        index = e(f"zext <16 x i8> {bytes_} to <16 x i32>")
        column = e(f"mul i64 {window}, {WINDOW}")
        for b, x in enumerate(inputs):
            low, high = e.at(x, column, "float"), e.at(x, e(f"add i64 {column}, 16"), "float")
            taken = e(
                f"call {V} @llvm.x86.avx512.vpermi2var.ps.512"
                f"({V} {load(e, low)}, <16 x i32> {index}, {V} {load(e, high)})"
            )
            key = (b, turn % _sums(samples))
            sums[key] = e.fma(value, taken, sums[key])
    for (b, s), name in sums.items():
        e.do(f"  %new_{b}_{s} = select i1 true, {V} {name}, {V} {name}")
    e.do(f"  %next_at = add i64 {at}, 0", f"  %next_slot = add i64 %slot, {UNROLL}")
    more = e(f"icmp ult i64 %next_slot, {last}")
    e.do(f"  br i1 {more}, label %slots, label %finish", "finish:")
    for b, s in keys:
        e.do(f"  %end_{b}_{s} = phi {V} [zeroinitializer, %entry], [%new_{b}_{s}, %slots]")
    _finish(e, samples, kind)
    e.do("  ret void", "}", "")
    return e.text()


def _finish(e: Emitter, samples: int, kind: str) -> None:
    """Add partial sums, scale and bias, and store 16 rows of every sample."""
    row = e(f"mul i64 %group, {ROWS}")
    bias = load(e, e.at(e.field("%job", _BIAS, "ptr"), row, "float"))
    stride = e.field("%job", _OUT_STRIDE)
    out = e.at(e.field("%job", _OUT, "ptr"), e(f"mul i64 {stride}, %sample"), "float")
    for b in range(samples):
        total = f"%end_{b}_0"
        for s in range(1, _sums(samples)):
            total = e(f"fadd {V} {total}, %end_{b}_{s}")
        if kind in ("int8", "int4"):
            scale = load(e, e.at(e.field("%job", _SCALES, "ptr"), row, "float"))
            total = e(f"fmul {V} {total}, {scale}")
        place = e(f"add i64 {e(f'mul i64 {stride}, {b}')}, {row}")
        e.do(store(e(f"fadd {V} {total}, {bias}"), e.at(out, place, "float")))


def _sums(samples: int) -> int:
    """Return how many partial sums hide the latency of multiply-adds."""
    return 4 if samples == 1 else 2 if samples <= 4 else 1


def _expanded(e: Emitter, values: str, at: str, mask: str, kind: str) -> str:
    """Return the slot's stored values in the lanes of their rows, zeros elsewhere."""
    bits = e(f"bitcast i16 {mask} to <16 x i1>")
    return e(
        f"call {V} @llvm.x86.avx512.mask.expand.v16f32"
        f"({V} {loaded(e, values, at, kind)}, {V} zeroinitializer, <16 x i1> {bits})"
    )
