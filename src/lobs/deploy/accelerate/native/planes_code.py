"""LLVM code that adds multiples of planes: one product with many positions.

A plane is a run of numbers, one for each position: pixels of a channel, or one feature of every
input. A weight adds its plane, times its value, to the plane of its row. The sums of up to 128
positions stay in registers while a row's weights go by. Rows that share their columns, as
`Block` makes them, also share the loads of planes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lobs.deploy.accelerate.native.emit import (
    DECLARE,
    MASKED,
    Emitter,
    V,
    everywhere,
    inside,
    load,
    store,
)

# Fields of a job, after the number of row blocks.
_VALUES, _PLACES, _STARTS, _BIAS, _PLANES, _OUT, _SPAN, _IN_STRIDE, _OUT_STRIDE = range(1, 10)


@dataclass(frozen=True)
class Tile:
    """What one loop over weights computes: `rows` that share columns × vectors of 16 positions.

    `sums` is the number of partial sums of each; that many weights are added at a time.
    """

    rows: int
    vectors: int
    sums: int

    @property
    def name(self) -> str:
        """Return the name of its function."""
        return f"@tile_{self.vectors}"


def code(rows: int, sums: int) -> str:
    """Return the kernel for blocks of rows that share their columns.

    Args:
        rows: rows of a block.
        sums: every block has a multiple of this many weights.
    """
    most = 8 if rows == 1 else 4 if rows <= 4 else 2
    tiles = [Tile(rows, n, sums) for n in (8, 4, 2, 1) if n <= most]
    return "\n".join([DECLARE, MASKED, *map(_function, tiles), _span(tiles)])


def _span(tiles: list[Tile]) -> str:
    """Return the function that walks over positions, the largest tiles first.

    The last tile of a size may overlap the one before, so that none reads or writes beyond the
    span. Spans below 16 are masked.
    """
    e = Emitter()
    e.do("define void @span(ptr %job, i64 %first, i64 %last) {", "entry:")
    span = e.field("%job", _SPAN)
    e.do("  br label %test0")
    before, at = "%entry", "0"
    for i, tile in enumerate(tiles):
        width, smallest = 16 * tile.vectors, tile.vectors == 1
        e.do(f"test{i}:", f"  %p{i} = phi i64 [{at}, {before}], [%q{i}, %work{i}]")
        left = e(f"sub i64 {span}, %p{i}")
        enough = e(f"icmp sgt i64 {left}, {width - 16}")
        fits = e(f"icmp sge i64 {span}, {0 if smallest else width}")
        go = e(f"and i1 {enough}, {fits}")
        e.do(f"  br i1 {go}, label %work{i}, label %test{i + 1}", f"work{i}:")
        end = e(f"sub i64 {span}, {width}")
        early = e(f"icmp slt i64 {end}, %p{i}")
        place = e(f"select i1 {early}, i64 {end}, i64 %p{i}")
        if smallest:
            place = e(f"select i1 {e(f'icmp slt i64 {place}, 0')}, i64 0, i64 {place}")
        e.do(f"  call void {tile.name}(ptr %job, i64 %first, i64 %last, i64 {place})")
        e.do(f"  %q{i} = add i64 %p{i}, {width}", f"  br label %test{i}")
        before, at = f"%test{i}", f"%p{i}"
    e.do(f"test{len(tiles)}:", "  ret void", "}", "")
    return e.text()


def _function(tile: Tile) -> str:
    """Return the function that computes one tile of positions of a range of row blocks."""
    e = Emitter()
    e.do(f"define internal void {tile.name}(ptr %job, i64 %low, i64 %high, i64 %position) {{")
    e.do("entry:")
    values, places, starts, bias = (
        e.field("%job", n, "ptr") for n in (_VALUES, _PLACES, _STARTS, _BIAS)
    )
    pitch = e.field("%job", _IN_STRIDE)
    planes = e.at(e.field("%job", _PLANES, "ptr"), "%position", "float")
    out = e.at(e.field("%job", _OUT, "ptr"), "%position", "float")
    stride, mask = e.field("%job", _OUT_STRIDE), ""
    if tile.vectors == 1:
        mask = inside(e, e.field("%job", _SPAN), "%position")
    e.do("  br label %rows", "rows:", "  %row = phi i64 [%low, %entry], [%next_row, %finish]")
    start = e(f"load i64, ptr {e.at(starts, '%row', 'i64')}")
    e.do("  %next_row = add i64 %row, 1")
    stop = e(f"load i64, ptr {e.at(starts, '%next_row', 'i64')}")
    first = e(f"mul i64 %row, {tile.rows}")
    begin = [
        everywhere(e, e(f"load float, ptr {e.at(bias, e(f'add i64 {first}, {r}'), 'float')}"))
        for r in range(tile.rows)
    ]
    e.do("  br label %weights", "weights:", f"  %j = phi i64 [{start}, %rows], [%next, %weights]")
    sums = _weights(e, tile, begin, (values, places, pitch, planes), mask)
    e.do(f"  %next = add i64 %j, {tile.sums}")
    more = e(f"icmp ult i64 %next, {stop}")
    e.do(f"  br i1 {more}, label %weights, label %finish", "finish:")
    for r in range(tile.rows):
        line = e.at(out, e(f"mul i64 {stride}, {e(f'add i64 {first}, {r}')}"), "float")
        for t in range(tile.vectors):
            total = sums[r, t, 0]
            for s in range(1, tile.sums):
                total = e(f"fadd {V} {total}, {sums[r, t, s]}")
            place = e.at(line, 16 * t, "float")
            e.do(store(total, place, mask))
    again = e("icmp ult i64 %next_row, %high")
    e.do(f"  br i1 {again}, label %rows, label %done", "done:", "  ret void", "}", "")
    return e.text()


def _weights(
    e: Emitter, tile: Tile, begin: list[str], given: tuple[str, str, str, str], mask: str
) -> dict[tuple[int, int, int], str]:
    """Add the body of the loop over a row block's weights; return the names of the sums.

    Args:
        e: where to add it.
        tile: the rows and vectors.
        begin: what each row's first sum begins with.
        given: addresses of values and places, the distance of planes, and their address.
        mask: which positions of a single vector are read; empty for all.
    """
    values, places, pitch, planes = given
    keys = [
        (r, t, s) for r in range(tile.rows) for t in range(tile.vectors) for s in range(tile.sums)
    ]
    new = {(r, t, s): f"%new_{r}_{t}_{s}" for r, t, s in keys}
    for r, t, s in keys:
        start = begin[r] if s == 0 else "zeroinitializer"
        e.do(f"  %sum_{r}_{t}_{s} = phi {V} [{start}, %rows], [{new[r, t, s]}, %weights]")
    for s in range(tile.sums):
        j = e(f"add i64 %j, {s}")
        number = e(f"load i32, ptr {e.at(places, j, 'i32')}")
        offset = e(f"mul i64 {e(f'zext i32 {number} to i64')}, {pitch}")
        plane = e.at(planes, offset, "float")
        base = e(f"mul i64 {j}, {tile.rows}")
        numbers = [
            everywhere(e, e(f"load float, ptr {e.at(values, e(f'add i64 {base}, {r}'), 'float')}"))
            for r in range(tile.rows)
        ]
        for t in range(tile.vectors):
            x = load(e, e.at(plane, 16 * t, "float"), mask)
            for r, number in enumerate(numbers):
                e.do(
                    f"  {new[r, t, s]} = call {V} @llvm.fma.v16f32"
                    f"({V} {number}, {V} {x}, {V} %sum_{r}_{t}_{s})"
                )
    return new
