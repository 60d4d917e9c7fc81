"""Tables: what is read, what is rejected and why, and which of them a machine may use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from patches._lib.gemm import table
from patches._lib.gemm.table import Device, Entry, Table, TableError, Tile

H200 = Device("sm90", "NVIDIA H200", 132, "3.6.0")


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
    assert sum('"dtype"' in line for line in path.read_text().splitlines()) == len(read.entries) == 1


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
    entries, used, rejected = table.choose(device, (tmp_path,))
    assert (bool(entries), bool(used)) == ((True, True) if reason is None else (False, False))
    assert reason is None or (len(rejected) == 1 and reason in rejected[0] and "a.json" in rejected[0])


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
    entries, used, rejected = table.choose(H200, (tmp_path, tmp_path / "nowhere"))
    assert len(entries) == 1 and used == ["a.json"]
    assert "broken.json" in rejected[0] and "no such folder" in rejected[1]


def test_the_users_own_entry_takes_the_place_of_the_shipped_one(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    made(shipped), edited(made(own), bn=8)
    (entry,) = table.choose(H200, (shipped, own))[0].values()
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
