"""LLVM code of the bitmask kernel: kept values are expanded in registers, 64 columns at a time.

A row has one 64-bit word for 64 columns. Each of its four parts of 16 bits says which of 16 columns
have a value. The next 16 stored values are loaded and expanded to those places. Then they are
multiplied with 16 inputs of every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lobs.deploy.accelerate.native.emit import DECLARE, Emitter, V, everywhere, store
from lobs.deploy.accelerate.native.machine_code import Form

PARTS = 4  # of a word, 16 columns each
CHUNK = 24  # rows that all groups of samples visit before the next rows; they stay in the cache
MOST = 8  # samples that one pass over a row serves
# Fields of a job, after the number of rows.
_VALUES, _MASKS, _STARTS, _SCALES, _BIAS, _X, _OUT, _WORDS, _X_STRIDE, _OUT_STRIDE = range(1, 11)


@dataclass(frozen=True)
class Tile:
    """What one loop over columns computes: rows × samples, each in several partial sums."""

    rows: int
    samples: int
    sums: int

    @property
    def name(self) -> str:
        """Return the name of its function."""
        return f"@tile_{self.rows}_{self.samples}"


def code(kind: str, samples: int, form: Form) -> str:
    """Return the kernel for a number of samples.

    Args:
        kind: how values are stored.
        samples: number of inputs.
        form: the instructions to use.
    """
    passes = -(-samples // MOST)
    groups = [samples // passes + (i < samples % passes) for i in range(passes)]
    tiles = {t for n in groups for t in (_tile(n, form), Tile(1, n, 4 if n == 1 else 1))}
    parts = [DECLARE, *(make() for name, make in _HELPERS if name == form)]
    parts += [_function(t, kind, form) for t in sorted(tiles, key=lambda t: t.name)]
    return "\n".join([*parts, _span(groups, form)])


def _tile(samples: int, form: Form) -> Tile:
    """Return the tile that fits into the registers: 32 of 16 floats, or half of that."""
    if samples == 1:
        return Tile(1, 1, 4)
    rows = {2: 4, 3: 4, 4: 4, 5: 4, 6: 3, 7: 3, 8: 3}[samples]
    if form != "avx512":
        rows = max(1, min(rows, 6 // samples))
    return Tile(rows, samples, 1)


def _table() -> str:
    """Return the table of the AVX2 form: for 8 bits, which stored value goes to each place."""
    entries = []
    for mask in range(256):
        places, taken = [], 0
        for bit in range(8):
            places.append(taken)
            taken += mask >> bit & 1
        entries.append(f"<8 x i32> <{', '.join(f'i32 {min(p, 7)}' for p in places)}>")
    return f"@table = private constant [256 x <8 x i32>] [{', '.join(entries)}], align 32\n"


def _plain_expand() -> str:
    """Return a function that expands without special instructions, and without branches."""
    e = Emitter()
    e.do(f"define internal {V} @expand({V} %packed, i16 %mask) noinline {{")
    e.do("  %from = alloca [17 x float], align 64", f"  store {V} %packed, ptr %from, align 64")
    out, at = "zeroinitializer", "0"
    for lane in range(16):
        bit = e(f"and i16 {e(f'lshr i16 %mask, {lane}')}, 1")
        value = e(f"load float, ptr {e.at('%from', at, 'float')}")
        kept = e(f"select i1 {e(f'trunc i16 {bit} to i1')}, float {value}, float 0.0")
        out = e(f"insertelement {V} {out}, float {kept}, i32 {lane}")
        at = e(f"add i64 {at}, {e(f'zext i16 {bit} to i64')}")
    e.do(f"  ret {V} {out}", "}", "")
    return e.text()


def _span(groups: Sequence[int], form: Form) -> str:
    """Return the function that walks over rows in chunks, and in each over groups of samples."""
    e = Emitter()
    e.do("define void @span(ptr %job, i64 %first, i64 %last) {", "entry:", "  br label %chunk")
    e.do("chunk:", "  %low = phi i64 [%first, %entry], [%high, %chunk]")
    ahead = e(f"add i64 %low, {CHUNK}")
    over = e(f"icmp ugt i64 {ahead}, %last")
    e.do(f"  %high = select i1 {over}, i64 %last, i64 {ahead}")
    sample = 0
    for n in groups:
        tile = _tile(n, form)
        rows = e("sub i64 %high, %low")
        whole = e(f"mul i64 {e(f'udiv i64 {rows}, {tile.rows}')}, {tile.rows}")
        middle = e(f"add i64 %low, {whole}")
        for name, low, high in (
            (tile.name, "%low", middle),
            (Tile(1, n, 1).name, middle, "%high"),
        ):
            e.do(f"  call void {name}(ptr %job, i64 {low}, i64 {high}, i64 {sample})")
        sample += n
    more = e("icmp ult i64 %high, %last")
    e.do(f"  br i1 {more}, label %chunk, label %done", "done:", "  ret void", "}", "")
    return e.text()


def dense_code(kind: str, form: Form) -> str:
    """Return the kernel that writes rows as dense numbers, a multiple of 64 columns each.

    Args:
        kind: how values are stored.
        form: the instructions to use.
    """
    e = Emitter()
    e.do("define void @span(ptr %job, i64 %first, i64 %last) {", "entry:")
    places = (_VALUES, _MASKS, _STARTS, _SCALES, _OUT)
    values, masks, starts, scales, out = (e.field("%job", place, "ptr") for place in places)
    words = e.field("%job", _WORDS)
    e.do("  br label %rows", "rows:", "  %row = phi i64 [%first, %entry], [%next_row, %finish]")
    place = e(f"mul i64 %row, {words}")
    start = e(f"load i64, ptr {e.at(starts, '%row', 'i64')}")
    mask, line = e.at(masks, place, "i64"), e.at(out, e(f"mul i64 {place}, 64"), "float")
    scale = everywhere(e, e(f"load float, ptr {e.at(scales, '%row', 'float')}"))
    e.do("  br label %columns", "columns:")
    e.do("  %word = phi i64 [0, %rows], [%next_word, %columns]")
    e.do(f"  %at = phi i64 [{start}, %rows], [%next_at, %columns]")
    bits = e(f"load i64, ptr {e.at(mask, '%word', 'i64')}, align 8")
    target = e.at(line, e("mul i64 %word, 64"), "float")
    for part in range(PARTS):
        value = _expanded(e, values, *_part(e, bits, "%at", part), kind, form)
        value = e(f"fmul {V} {value}, {scale}") if kind in ("int8", "int4") else value
        e.do(store(value, e.at(target, 16 * part, "float")))
    e.do(f"  %next_at = add i64 %at, {_count(e, bits)}", "  %next_word = add i64 %word, 1")
    more = e(f"icmp ult i64 %next_word, {words}")
    e.do(f"  br i1 {more}, label %columns, label %finish", "finish:")
    e.do("  %next_row = add i64 %row, 1")
    again = e("icmp ult i64 %next_row, %last")
    e.do(f"  br i1 {again}, label %rows, label %done", "done:", "  ret void", "}", "")
    helpers = [make() for name, make in _HELPERS if name == form]
    return "\n".join([DECLARE, *helpers, e.text()])


def _function(tile: Tile, kind: str, form: Form) -> str:
    """Return the function that computes some samples of a range of rows."""
    e = Emitter()
    e.do(f"define internal void {tile.name}(ptr %job, i64 %low, i64 %high, i64 %sample) {{")
    e.do("entry:")
    pointers = {
        name: e.field("%job", place, "ptr")
        for name, place in (
            ("values", _VALUES), ("masks", _MASKS), ("starts", _STARTS), ("scales", _SCALES),
            ("bias", _BIAS),
        )
    }  # fmt: skip
    words, stride = e.field("%job", _WORDS), e.field("%job", _X_STRIDE)
    first = e.at(e.field("%job", _X, "ptr"), e(f"mul i64 {stride}, %sample"), "float")
    inputs = [e.at(first, e(f"mul i64 {stride}, {b}"), "float") for b in range(tile.samples)]
    some = e("icmp ult i64 %low, %high")
    e.do(f"  br i1 {some}, label %rows, label %done")
    e.do("rows:", "  %row = phi i64 [%low, %entry], [%next_row, %finish]")
    masks, starts = [], []
    for k in range(tile.rows):
        row = e(f"add i64 %row, {k}")
        masks.append(e.at(pointers["masks"], e(f"mul i64 {row}, {words}"), "i64"))
        starts.append(e(f"load i64, ptr {e.at(pointers['starts'], row, 'i64')}"))
    e.do("  br label %columns")
    _columns(e, tile, kind, form, (pointers["values"], words, masks, starts, inputs))
    _finish(e, tile, kind, pointers)
    more = e("icmp ult i64 %next_row, %high")
    e.do(f"  br i1 {more}, label %rows, label %done", "done:", "  ret void", "}", "")
    return e.text()


def _columns(
    e: Emitter,
    tile: Tile,
    kind: str,
    form: Form,
    given: tuple[str, str, list[str], list[str], list[str]],
) -> None:
    """Add the loop over a row's words.

    Args:
        e: where to add it.
        tile: the rows and samples.
        kind: how values are stored.
        form: the instructions to use.
        given: names of the values, the number of words, and the masks, starts and inputs.
    """
    values, words, masks, starts, inputs = given
    e.do("columns:", "  %word = phi i64 [0, %rows], [%next_word, %columns]")
    for k, start in enumerate(starts):
        e.do(f"  %at{k} = phi i64 [{start}, %rows], [%next_at{k}, %columns]")
    sums = {key: f"%sum_{'_'.join(map(str, key))}" for key in _keys(tile)}
    for name in sums.values():
        new = name.replace("sum", "new")
        e.do(f"  {name} = phi {V} [zeroinitializer, %rows], [{new}, %columns]")
    bits = [e(f"load i64, ptr {e.at(mask, '%word', 'i64')}, align 8") for mask in masks]
    column = e(f"mul i64 %word, {16 * PARTS}")
    for part in range(PARTS):
        place = e(f"add i64 {column}, {16 * part}")
        xs = [e(f"load {V}, ptr {e.at(x, place, 'float')}, align 4") for x in inputs]
        for k in range(tile.rows):
            at, mask = _part(e, bits[k], f"%at{k}", part)
            value = _expanded(e, values, at, mask, kind, form)
            for b, x in enumerate(xs):
                key = (k, b, part % tile.sums)
                sums[key] = e.fma(value, x, sums[key])
    for key, name in sums.items():
        new = f"%new_{'_'.join(map(str, key))}"
        e.do(f"  {new} = select i1 true, {V} {name}, {V} {name}")
    for k in range(tile.rows):
        e.do(f"  %next_at{k} = add i64 %at{k}, {_count(e, bits[k])}")
    e.do("  %next_word = add i64 %word, 1")
    more = e(f"icmp ult i64 %next_word, {words}")
    e.do(f"  br i1 {more}, label %columns, label %finish", "finish:")


def _keys(tile: Tile) -> list[tuple[int, int, int]]:
    return [
        (k, b, s) for k in range(tile.rows) for b in range(tile.samples) for s in range(tile.sums)
    ]


def _count(e: Emitter, bits: str) -> str:
    return e(f"call i64 @llvm.ctpop.i64(i64 {bits})")


def _part(e: Emitter, bits: str, at: str, part: int) -> tuple[str, str]:
    """Return where the values of a part of a word begin, and its 16 bits."""
    if part == 0:
        return at, e(f"trunc i64 {bits} to i16")
    before = e(f"and i64 {bits}, {(1 << 16 * part) - 1}")
    mask = e(f"trunc i64 {e(f'lshr i64 {bits}, {16 * part}')} to i16")
    return e(f"add i64 {at}, {_count(e, before)}"), mask


def _finish(e: Emitter, tile: Tile, kind: str, pointers: dict[str, str]) -> None:
    """Add the sums of a row's lanes, scale, bias and store."""
    stride = e.field("%job", _OUT_STRIDE)
    out = e.at(e.field("%job", _OUT, "ptr"), e(f"mul i64 {stride}, %sample"), "float")
    for k in range(tile.rows):
        row = e(f"add i64 %row, {k}")
        bias = e(f"load float, ptr {e.at(pointers['bias'], row, 'float')}")
        for b in range(tile.samples):
            total = f"%new_{k}_{b}_0"
            for s in range(1, tile.sums):
                total = e(f"fadd {V} {total}, %new_{k}_{b}_{s}")
            number = e(
                f"call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {V} {total})"
            )
            if kind in ("int8", "int4"):
                scale = e(f"load float, ptr {e.at(pointers['scales'], row, 'float')}")
                number = e(f"fmul float {number}, {scale}")
            number = e(f"fadd float {number}, {bias}")
            place = e(f"add i64 {e(f'mul i64 {stride}, {b}')}, {row}")
            e.do(f"  store float {number}, ptr {e.at(out, place, 'float')}")
    e.do(f"  %next_row = add i64 %row, {tile.rows}")


def _expanded(e: Emitter, values: str, at: str, mask: str, kind: str, form: Form) -> str:
    """Return 16 columns of a row: the next stored values at their places, zeros elsewhere.

    Args:
        e: where to add the code.
        values: address of the stored values.
        at: number of the next value.
        mask: 16 bits, one for each column.
        kind: how values are stored.
        form: the instructions to use.
    """
    if form == "generic":
        packed = loaded(e, values, at, "half bits" if kind == "float16" else kind)
        return e(f"call {V} @expand({V} {packed}, i16 {mask})")
    bits = e(f"bitcast i16 {mask} to <16 x i1>")
    if form == "avx512":
        packed = loaded(e, values, at, kind)
        return e(
            f"call {V} @llvm.x86.avx512.mask.expand.v16f32"
            f"({V} {packed}, {V} zeroinitializer, <16 x i1> {bits})"
        )
    low = e(f"and i16 {mask}, 255")
    later = e(f"add i64 {at}, {_count(e, e(f'zext i16 {low} to i64'))}")
    halves = []
    for byte, place in ((low, at), (e(f"lshr i16 {mask}, 8"), later)):
        packed = loaded(e, values, place, kind, lanes=8)
        entry = e.at("@table", e(f"zext i16 {byte} to i64"), "<8 x i32>")
        order = e(f"load <8 x i32>, ptr {entry}, align 32")
        halves.append(
            e(f"call <8 x float> @llvm.x86.avx2.permps(<8 x float> {packed}, <8 x i32> {order})")
        )
    lanes = ", ".join(f"i32 {i}" for i in range(16))
    both = e(
        f"shufflevector <8 x float> {halves[0]}, <8 x float> {halves[1]}, <16 x i32> <{lanes}>"
    )
    return e(f"select <16 x i1> {bits}, {V} {both}, {V} zeroinitializer")


def loaded(e: Emitter, values: str, at: str, kind: str, lanes: int = 16) -> str:
    """Return the next stored values as floats.

    Loads are volatile, so that the code generator does not join them with the expansion. That would
    be slower.

    Args:
        e: where to add the code.
        values: address of the stored values.
        at: number of the next value.
        kind: how values are stored.
        lanes: number of values.
    """
    floats, ints = f"<{lanes} x float>", f"<{lanes} x i32>"
    if kind == "int4":
        return _nibbles(e, values, at, lanes)
    element = {"float32": "float", "float16": "half", "int8": "i8"}.get(kind, "i16")
    size = {"float": 4, "i8": 1}.get(element, 2)
    address = e.at(values, at, element)
    raw = e(f"load volatile <{lanes} x {element}>, ptr {address}, align {size}")
    if kind == "float16":
        return e(f"fpext <{lanes} x half> {raw} to {floats}")
    if kind == "half bits":
        return _widened(e, raw)
    if kind == "bfloat16":
        wide = e(f"zext <{lanes} x i16> {raw} to {ints}")
        by = ", ".join(["i32 16"] * lanes)
        return e(f"bitcast {ints} {e(f'shl {ints} {wide}, <{by}>')} to {floats}")
    return e(f"sitofp <{lanes} x i8> {raw} to {floats}") if kind == "int8" else raw


def _widened(e: Emitter, half: str) -> str:
    """Return finite 16-bit floats as 32-bit floats, for processors without an instruction for it.

    Exponent and fraction move to their places. The exponent's offset differs by 112.
    """
    ints = "<16 x i32>"

    def each(number: int | str, kind: str = "i32") -> str:
        return "<" + ", ".join([f"{kind} {number}"] * 16) + ">"

    wide = e(f"zext <16 x i16> {half} to {ints}")
    size = e(f"shl {ints} {e(f'and {ints} {wide}, {each(0x7FFF)}')}, {each(13)}")
    sign = e(f"shl {ints} {e(f'and {ints} {wide}, {each(0x8000)}')}, {each(16)}")
    power = each("0x46F0000000000000", "float")  # 2 to the power of 112
    scaled = e(f"fmul {V} {e(f'bitcast {ints} {size} to {V}')}, {power}")
    both = e(f"or {ints} {e(f'bitcast {V} {scaled} to {ints}')}, {sign}")
    return e(f"bitcast {ints} {both} to {V}")


def _nibbles(e: Emitter, values: str, at: str, lanes: int) -> str:
    """Return the next stored numbers of 4 bits, which may begin in the middle of a byte."""
    ints = f"<{lanes} x i32>"
    address = e.at(values, e(f"lshr i64 {at}, 1"), "i8")
    shift = e(f"shl i64 {e(f'and i64 {at}, 1')}, 2")
    parts = []
    for half in range(lanes // 8):
        raw = e(f"load i64, ptr {e.at(address, 4 * half, 'i8')}, align 1")
        parts.append(e(f"trunc i64 {e(f'lshr i64 {raw}, {shift}')} to i32"))
    spread = "poison"
    for half, part in enumerate(parts):
        spread = e(f"insertelement {ints} {spread}, i32 {part}, i32 {8 * half}")
    order = ", ".join(f"i32 {8 * (i // 8)}" for i in range(lanes))
    spread = e(f"shufflevector {ints} {spread}, {ints} poison, <{lanes} x i32> <{order}>")
    # Shift each number to the top, then back with its sign.
    left = ", ".join(f"i32 {28 - 4 * (i % 8)}" for i in range(lanes))
    right = ", ".join(["i32 28"] * lanes)
    top = e(f"shl {ints} {spread}, <{left}>")
    return e(f"sitofp {ints} {e(f'ashr {ints} {top}, <{right}>')} to <{lanes} x float>")


# What the code of a form needs besides.
_HELPERS = (("avx2", _table), ("generic", _plain_expand))
