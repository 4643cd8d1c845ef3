"""Write LLVM code line by line."""

from __future__ import annotations

V = "<16 x float>"

DECLARE = f"""
declare {V} @llvm.x86.avx512.mask.expand.v16f32({V}, {V}, <16 x i1>)
declare <8 x float> @llvm.x86.avx2.permps(<8 x float>, <8 x i32>)
declare i64 @llvm.ctpop.i64(i64)
declare {V} @llvm.fma.v16f32({V}, {V}, {V})
declare float @llvm.vector.reduce.fadd.v16f32(float, {V})
"""

MASKED = f"""
declare {V} @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, {V})
declare void @llvm.masked.store.v16f32.p0({V}, ptr, i32, <16 x i1>)
"""


class Emitter:
    """Collect instructions; every value gets a number."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def __call__(self, instruction: str) -> str:
        """Add an instruction and return the name of its value."""
        self._count += 1
        self.lines.append(f"  %v{self._count} = {instruction}")
        return f"%v{self._count}"

    def do(self, *lines: str) -> None:
        """Add lines as they are: labels, stores and branches."""
        self.lines += lines

    def field(self, job: str, place: int, kind: str = "i64") -> str:
        """Return a field of a job."""
        return self(f"load {kind}, ptr {self.at(job, place, 'i64')}")

    def at(self, base: str, place: str | int, kind: str) -> str:
        """Return the address of an element.

        Args:
            base: the address of the array.
            place: the element's number.
            kind: the elements' type.
        """
        return self(f"getelementptr {kind}, ptr {base}, i64 {place}")

    def fma(self, a: str, b: str, c: str) -> str:
        """Return a·b + c."""
        return self(f"call {V} @llvm.fma.v16f32({V} {a}, {V} {b}, {V} {c})")

    def text(self) -> str:
        """Return all lines."""
        return "\n".join(self.lines)


def inside(e: Emitter, size: str, start: str) -> str:
    """Return which of 16 numbers from `start` on are below `size`.

    Args:
        e: where to add the code.
        size: the limit.
        start: the first number.
    """
    left = e(f"sub i64 {size}, {start}")
    wide = e(f"insertelement <16 x i64> poison, i64 {left}, i32 0")
    wide = e(f"shufflevector <16 x i64> {wide}, <16 x i64> poison, <16 x i32> zeroinitializer")
    lanes = ", ".join(f"i64 {i}" for i in range(16))
    return e(f"icmp sgt <16 x i64> {wide}, <{lanes}>")


def load(e: Emitter, address: str, mask: str = "") -> str:
    """Return 16 floats.

    Args:
        e: where to add the code.
        address: of the first.
        mask: which to read, others are zero; empty for all.
    """
    if not mask:
        return e(f"load {V}, ptr {address}, align 4")
    return e(
        f"call {V} @llvm.masked.load.v16f32.p0"
        f"(ptr {address}, i32 4, <16 x i1> {mask}, {V} zeroinitializer)"
    )


def store(value: str, address: str, mask: str = "") -> str:
    """Return the line that stores 16 floats.

    Args:
        value: the floats.
        address: of the first.
        mask: which to write; empty for all.
    """
    if not mask:
        return f"  store {V} {value}, ptr {address}, align 4"
    return (
        f"  call void @llvm.masked.store.v16f32.p0"
        f"({V} {value}, ptr {address}, i32 4, <16 x i1> {mask})"
    )


def everywhere(e: Emitter, number: str) -> str:
    """Return a vector of one number."""
    one = e(f"insertelement {V} poison, float {number}, i32 0")
    return e(f"shufflevector {V} {one}, {V} poison, <16 x i32> zeroinitializer")
