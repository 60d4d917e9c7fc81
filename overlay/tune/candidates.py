"""Tiles worth measuring for one product. Standard library only."""

from __future__ import annotations

from patches._lib.gemm.table import Tile

_SHARED = 200 * 1024  # bytes of shared memory a program may use for its pipeline on current parts


def candidates(m: int, n: int, k: int, processors: int = 132, shared: int = _SHARED) -> list[Tile]:
    """Tiles for x [m, k] times w [n, k], none with programmatic launch (the search tries that on the best).

    processors: multiprocessors of the chip; splits of K are tried only where rows alone cannot fill them.
    A step that does not divide K is left out where one that does was found, since its last step runs masked.
    """
    found = [*_rows(m, n, k, processors)] if m <= 4 else []
    if m >= 2:
        found += [*_lanes(m, n, k, processors, shared), *_tiles(m, n, k, processors, shared)]
    found = [tile for tile in dict.fromkeys(found) if tile.problem(m) is None]
    even = [tile for tile in found if k % tile.span == 0]
    kinds = {tile.kernel for tile in even}
    return even + [tile for tile in found if tile not in even and tile.kernel not in kinds]


def _rows(m: int, n: int, k: int, processors: int) -> list[Tile]:
    """A warp reads 256 (or 512) elements of a row at once, so that x needs no exchange between warps."""
    tiles = []
    for warps in (1, 2, 4, 8):
        for wide in (1, 2):
            for bn in (1, 2, 4, 8, 16):
                registers = 8 * wide * bn * m
                if not 8 <= 8 * wide * bn <= 64 or registers > 128:
                    continue
                programs = -(-n // bn)
                if programs * warps < min(processors * 2, n) or 256 * warps * wide >= 2 * k:
                    continue
                for stages in (1, 3) if wide == 1 and bn in (2, 4, 8) and warps in (2, 4) else (1,):
                    tiles.append(Tile("rows", bn, 256 * warps * wide, warps, stages))
                if programs < processors * 2 and k >= 2048 * warps:
                    tiles.append(Tile("rows", bn, 256 * warps * wide, warps, 1, split=4))
    return tiles


def _splits(programs: int, k: int, span: int, processors: int) -> tuple[int, ...]:
    return tuple(s for s in (1, 2, 4, 8) if s == 1 or (programs * s <= 3 * processors and k >= 2 * s * span))


def _lanes(m: int, n: int, k: int, processors: int, shared: int) -> list[Tile]:
    tiles = []
    for bn, bk, warps, stages in (
        (8, 64, 4, 4), (8, 128, 4, 4), (8, 64, 8, 4), (8, 128, 8, 3), (16, 64, 4, 4), (16, 128, 4, 3), (16, 64, 8, 3),
        (16, 128, 8, 3), (32, 64, 4, 4), (32, 64, 8, 3), (16, 64, 4, 6), (8, 64, 4, 8),
    ):  # fmt: skip
        programs = -(-n // bn)
        if (bn + 16) * bk * warps * 2 * stages > shared or bk * warps > k or programs > 64 * processors:
            continue
        for split in _splits(programs, k, bk * warps, processors):
            tiles.append(Tile("lanes", bn, bk, warps, stages, split, slices=warps))
    return tiles


def _tiles(m: int, n: int, k: int, processors: int, shared: int) -> list[Tile]:
    tiles = []
    for bn, bk, warps, stages in (
        (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 4), (128, 64, 4, 5),
        (128, 128, 4, 3), (128, 128, 8, 4), (32, 128, 4, 6), (32, 256, 4, 4), (16, 256, 2, 6), (32, 256, 2, 4),
    ):  # fmt: skip
        programs = -(-n // bn)
        if (bn + 16) * bk * 2 * stages > shared or bk > k:
            continue
        for split in _splits(programs, k, bk, processors):
            if programs * split < processors // 2:
                continue
            tiles.append(Tile("tiles", bn, bk, warps, stages, split))
            if m <= 8 and bn <= 64 and split == 1:
                tiles.append(Tile("tiles", bn, bk, warps, stages, split, narrow=True))
    return tiles
