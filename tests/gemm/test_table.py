"""Tables: what is read, what is rejected and why, and which of them a machine may use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from patches._lib.gemm import table
from patches._lib.gemm.table import Device, Entry, Mlp, Table, TableError, Tile

H200 = Device("sm90", "NVIDIA H200", 132, "3.6.0")
MLP = Mlp(
    "bfloat16", 1, 1024, 3072, Tile("rows", 4, 512, 1, trigger=True), Tile("rows", 1, 1024, 4, pdl=True, early=True),
    us=7.4, tiles_us=9.0, original_us=13.0, limit_us=4.4,
)  # fmt: skip


def made(tmp_path: Path, name: str = "a.json", **head: object) -> Path:
    entry = Entry("bfloat16", 1, 4096, 1024, Tile("rows", 4, 512, 2), us=3.4, original_us=4.9, limit_us=2.0)
    base = Table(
        "",
        "sm90",
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        132,
        "3.6.0",
        "2.11.0",
        "580",
        "2026-11-29",
        4266,
        0.02,
        "",
        {entry.key: entry},
        {MLP.key: MLP},
    )
    table.save(replace(base, **head), tmp_path / name)
    return tmp_path / name


def edited(path: Path, **values: object) -> Path:
    content = json.loads(path.read_text())
    content["entries"][0] |= values
    path.write_text(json.dumps(content))
    return path


def test_what_is_saved_is_read_back_equal_and_one_entry_a_line(tmp_path: Path) -> None:
    path = made(tmp_path)
    read = table.load(path)
    assert read.entries == table.load(made(tmp_path, "b.json")).entries
    assert read.mlps == {MLP.key: MLP}
    assert sum('"dtype"' in line for line in path.read_text().splitlines()) == len(read.entries) + len(read.mlps) == 2


def test_a_table_without_mlps_is_a_table(tmp_path: Path) -> None:
    path = made(tmp_path)
    content = json.loads(path.read_text())
    del content["mlps"]
    path.write_text(json.dumps(content))
    assert table.load(path).mlps == {} and len(table.load(path).entries) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"us": 50.0}, "no gain"),
        ({"first": {"kernel": "rows", "bn": 1, "bk": 256}}, "first: a program needs a row of the gate"),
        ({"first": None}, "first: expected an object"),
        ({"second": {"kernel": "rows", "bn": 2, "bk": 256, "early": True}}, "second: early belongs to kernel 'rows' with pdl"),
        ({"second": {"kernel": "rows", "bn": 2}}, "second: bk is missing"),
        ({"second": {"kernel": "rows", "bn": 2, "bk": 256, "pdl": 1}}, "second: pdl is 1, of the wrong type"),
        ({"m": 5}, "kernel 'rows' takes no 5 rows"),
        ({"inner": 0}, "must be positive"),
        ({"tiles_us": "1"}, "tiles_us is '1', of the wrong type"),
        ({"n": 4}, "unknown key 'n'"),
    ],
)
def test_a_wrong_mlp_is_an_error_that_names_it(tmp_path: Path, values: dict, message: str) -> None:
    path = made(tmp_path)
    content = json.loads(path.read_text())
    content["mlps"][0] |= values
    path.write_text(json.dumps(content))
    with pytest.raises(TableError, match="mlp 1") as error:
        table.load(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H200, None),
        (replace(H200, triton="3.6.0+git12"), None),
        (replace(H200, name="NVIDIA H200 SXM"), None),
        (replace(H200, triton="3.7.0"), "with Triton 3.6.0, this is 3.7.0"),
        (replace(H200, triton=None), "this is unknown"),
        (replace(H200, arch="sm100"), "measured on sm90, this is sm100"),
        (replace(H200, name="NVIDIA H100"), "this is NVIDIA H100"),
        (replace(H200, sms=66), "132 multiprocessors, here are 66"),
        (Device("gfx936", "BW1000", 80, "3.6.0"), "this is gfx936"),
    ],
)
def test_a_table_serves_its_own_chip_and_triton_release_only(tmp_path: Path, device: Device, reason: str | None) -> None:
    made(tmp_path)
    found = table.choose(device, (tmp_path,))
    assert (bool(found.entries), bool(found.mlps), bool(found.used)) == 3 * (reason is None,)
    assert reason is None or (len(found.rejected) == 1 and reason in found.rejected[0] and "a.json" in found.rejected[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"us": 5.0}, "no gain"),
        ({"m": 17}, "takes no 17 rows"),
        ({"m": 5}, "kernel 'rows' takes no 5 rows"),
        ({"bn": 3}, "bn is 3, expected a power of two"),
        ({"kernel": "magic"}, "is none of"),
        ({"dtype": "float32"}, "expected bfloat16 or float16"),
        ({"pdl": 1}, "of the wrong type"),
        ({"nearest": 1}, "unknown key 'nearest'"),
        ({"n": 0}, "must be positive"),
        ({"slices": 4}, "slices belong to kernel 'lanes'"),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_the_entry(tmp_path: Path, values: dict, message: str) -> None:
    path = edited(made(tmp_path), **values)
    with pytest.raises(TableError, match="entry 1") as error:
        table.load(path)
    assert message in str(error.value)


def test_a_table_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    found = table.choose(H200, (tmp_path, tmp_path / "nowhere"))
    assert len(found.entries) == 1 and found.used == ["a.json"]
    assert "broken.json" in found.rejected[0] and "no such folder" in found.rejected[1]


def test_the_users_own_entry_takes_the_place_of_the_shipped_one(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    made(shipped), edited(made(own), bn=8)
    (entry,) = table.choose(H200, (shipped, own)).entries.values()
    assert entry.tile.bn == 8


def test_there_is_no_nearest_entry(tmp_path: Path) -> None:
    entries = table.load(made(tmp_path)).entries
    assert ("bfloat16", 1, 4096, 1024) in entries
    assert all(("bfloat16", m, n, k) not in entries for m, n, k in [(2, 4096, 1024), (1, 4095, 1024), (1, 4096, 1025)])


@pytest.mark.parametrize("path", sorted(table.SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_every_shipped_entry_is_faster_than_the_original_by_the_margin(path: Path) -> None:
    found = table.load(path)
    assert found.entries
    for entry in found.entries.values():
        assert entry.us <= (1 - found.margin) * entry.original_us + 0.01, entry
        assert entry.error < 1e-2
