"""The tuner without a device: shapes from configurations, candidates, the search's decisions, resuming, the command."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from overlay import tune
from overlay.tune import search
from overlay.tune.candidates import candidates
from patches._lib.gemm import table
from patches._lib.gemm.shapes import gated_mlps, products
from patches._lib.gemm.table import Tile

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936,
}  # fmt: skip
QWEN35_27B = {
    "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 17408, "vocab_size": 248320, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    }
}  # fmt: skip


def sizes(config: dict, tp: int = 1) -> dict[str, tuple[int, int, int]]:
    return {product.name: (product.n, product.k, product.count) for product in products(config, tp)}


def test_a_dense_model_has_five_products_and_lm_head_is_one() -> None:
    assert sizes(QWEN3_4B) == {
        "attention qkv": (6144, 2560, 36), "attention o": (2560, 4096, 36), "gate_up": (19456, 2560, 36),
        "down": (2560, 9728, 36), "lm_head": (151936, 2560, 1),
    }  # fmt: skip


def test_a_hybrid_model_has_the_published_products() -> None:
    assert sizes(QWEN35_27B) == {
        "attention qkv": (14336, 5120, 16), "attention o": (5120, 6144, 16), "gdn qkvz": (16384, 5120, 48),
        "gdn ba": (96, 5120, 48),
        "gdn out": (5120, 6144, 48), "gate_up": (34816, 5120, 64), "down": (5120, 17408, 64), "lm_head": (248320, 5120, 1),
    }  # fmt: skip


def test_a_rank_of_two_holds_half_of_each_and_kv_heads_are_not_split_below_one() -> None:
    assert sizes(QWEN3_4B, 2)["attention qkv"] == (3072, 2560, 36)
    assert sizes(QWEN3_4B, 2)["down"] == (2560, 4864, 36)
    assert sizes(QWEN3_4B, 16)["attention qkv"] == ((32 // 16 + 2) * 128, 2560, 36)
    assert sizes(QWEN3_4B | {"vocab_size": 49153})["lm_head"][0] == 49216  # padded to a multiple of 64


def test_a_configuration_that_says_too_little_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match="intermediate_size"):
        products({key: value for key, value in QWEN3_4B.items() if key != "intermediate_size"})


@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 3072), (96, 5120), (151936, 2560), (1000, 999)])
def test_every_candidate_can_compute_its_product(m: int, n: int, k: int) -> None:
    found = candidates(m, n, k)
    assert found and len(found) == len(set(found))
    assert all(tile.problem(m) is None for tile in found)


class Bench:
    """A device that gives the times it is told to: a stand-in for the clock, not for the search."""

    processors = 132

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ours: float, theirs: float, spaced: float | None = None, same: bool = True
    ) -> None:
        self.ours, self.theirs, self.spaced, self.same = ours, theirs, spaced or ours, same
        stand_in = types.ModuleType("overlay.tune.measure")
        stand_in.original, stand_in.with_tile = None, lambda tile: tile
        monkeypatch.setitem(sys.modules, "overlay.tune.measure", stand_in)

    def check(self, *_: object) -> tuple[float, float, bool]:
        return 2e-3, 2e-3, self.same


def measured(bench: Bench) -> dict:
    times = {True: bench.spaced, False: bench.ours}

    def time(product: object, m: int, n: int, k: int, spaced: bool = False, repeats: int = 3) -> list[float]:
        if isinstance(product, Tile):
            return [times[spaced]] * repeats
        return [bench.theirs] * repeats

    bench.time = time
    return search.measure_cell(bench, ("bfloat16", 1, 4096, 1024), 0.02, 4266)


@pytest.mark.parametrize(
    ("ours", "spaced", "theirs", "same", "kept", "why"),
    [
        (3.0, 3.0, 5.0, True, True, ""),
        (4.95, 4.95, 5.0, True, False, "not beyond the margin"),
        (3.0, 5.1, 5.0, True, False, "spaced"),
        (5.1, 3.0, 5.0, True, False, "raw"),
        (3.0, 3.0, 5.0, False, False, "two runs differ"),
    ],
)
def test_a_tile_is_kept_only_beyond_the_margin_in_both_regimes(
    monkeypatch: pytest.MonkeyPatch, ours: float, spaced: float, theirs: float, same: bool, kept: bool, why: str
) -> None:
    record = measured(Bench(monkeypatch, ours, theirs, spaced, same))
    assert record["kept"] is kept and why in record["why"]
    assert len(search.entries([record])) == kept


def test_a_wrong_answer_is_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 1.0, 5.0)
    bench.check = lambda *_: (float("nan"), 2e-3, True)
    assert "error" in measured(bench)["why"]
    bench.check = lambda *_: (8e-3, 2e-3, True)
    assert "error" in measured(bench)["why"]


FAST, SAME = [7.0, 7.1, 7.2], (3e-3, True)


@pytest.mark.parametrize(
    ("times", "checks", "winner", "why"),
    [
        ({}, {}, "chained", ""),
        ({"gated": [6.9, 6.9, 7.0]}, {}, "gated", ""),
        ({"original": [7.1, 7.2, 7.2]}, {}, "chained", "against original"),
        ({"tiles": [7.1, 7.15, 7.2]}, {}, "chained", "against tiles"),
        ({"tiles": [7.19, 7.3, 7.3]}, {}, "chained", "against tiles"),  # its fastest is faster than our slowest
        ({}, {"chained": (3e-3, False)}, "chained", "two runs differ"),
        ({}, {"chained": (7e-3, True)}, "chained", "error"),
        ({}, {"chained": (float("nan"), True)}, "chained", "error"),
    ],
)
def test_a_fused_mlp_is_kept_where_it_beats_both_the_original_and_the_tiles(
    times: dict, checks: dict, winner: str, why: str
) -> None:
    from overlay.tune.mlp import verdict

    all_times = {"original": [13.0] * 3, "tiles": [9.0] * 3, "gated": [8.0] * 3, "chained": FAST} | times
    all_checks = dict.fromkeys(all_times, SAME) | checks
    found = verdict(all_times, all_checks, 0.02)
    assert found[0] == winner and (found[1] == "" if not why else why in found[1])


def test_mlp_records_become_the_tables_mlps_and_know_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    product = measured(Bench(monkeypatch, 3.0, 5.0)) | {"cell": ("bfloat16", 1, 2048, 64)}
    cell = ("mlp", "bfloat16", 1, 64, 1024)
    assert search.products_of(cell, [product]) == (Tile(**product["winner"]), None)
    tile = {"kernel": "rows", "bn": 4, "bk": 64}
    record = {"cell": cell, "kept": True, "first": tile | {"trigger": True}, "second": None, "us": 1.0, "tiles_us": 2.0,
              "original_us": 3.0, "limit_us": 0.5, "error": 1e-3}  # fmt: skip
    machine = {"arch": "sm90", "name": "Chip", "sms": 1, "triton": "3.6.0", "torch": "2", "driver": "5", "date": "2026-11-30",
               "copy_gbs": 4266}  # fmt: skip
    made = search.to_table([product, record, record | {"cell": (*cell[:2], 2, *cell[3:]), "kept": False}], machine,
                           margin=0.02, note="")  # fmt: skip
    assert list(made.entries) == [("bfloat16", 1, 2048, 64)] and list(made.mlps) == [("bfloat16", 1, 64, 1024)]
    assert made.mlps["bfloat16", 1, 64, 1024].first == Tile("rows", 4, 64, trigger=True)


def test_only_a_dense_gated_silu_model_on_one_rank_has_an_mlp_to_tune(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    silu = {"hidden_act": "silu"}
    assert gated_mlps(QWEN3_4B | silu) == [(2560, 9728)]
    assert gated_mlps({"text_config": QWEN35_27B["text_config"] | silu}) == [(5120, 17408)]
    assert gated_mlps(QWEN3_4B) == gated_mlps(QWEN3_4B | {"hidden_act": "gelu"}) == []
    assert gated_mlps(QWEN3_4B | silu | {"num_experts": 8}) == []
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | silu))
    tune.main([str(tmp_path), "--rows", "1", "--list"])
    assert "bfloat16 1 x mlp 2560, 9728" in capsys.readouterr().out
    tune.main([str(tmp_path), "--rows", "1", "--list", "-tp", "2"])
    assert " mlp " not in capsys.readouterr().out


def test_a_qwen3_model_has_its_norms_to_tune_too_for_one_and_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"hidden_act": "silu"}))
    tune.main([str(tmp_path), "--rows", "2,4", "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert [line for line in listed if "normed" in line] == [
        "bfloat16 2 x normed 6144, 2560", "bfloat16 2 x normed_mlp 2560, 9728",
    ]  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B | {"hidden_act": "silu", "model_type": "llama"}))
    tune.main([str(tmp_path), "--rows", "2", "--list"])
    assert "normed" not in capsys.readouterr().out


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(6144, 2560, False), (19456, 2560, True), (6144, 1024, True), (1000, 999, False)]
)
def test_every_candidate_with_the_norm_fits_an_entry_of_the_table(rows: int, n: int, k: int, gated: bool) -> None:
    from overlay.tune import behind_norm

    found = behind_norm.candidates(rows, n, k, gated)
    assert found and len(found) == len(set(found))
    figures = {"us": 1.0, "apart_us": 2.0, "limit_us": 0.5}
    for tile in found:
        line = table.Normed("bfloat16", rows, n, k, gated, tile, None, **figures).to_line()
        assert table._normed(json.loads(json.dumps(line)), "here").tile == tile


def test_records_with_the_norm_become_entries_of_their_own() -> None:
    tile = {"kernel": "rows", "bn": 4, "bk": 64}
    common = {"kept": True, "tile": tile, "second": None, "us": 1.0, "apart_us": 2.0, "limit_us": 0.5, "error": 1e-3}
    records = [common | {"cell": ("normed", "bfloat16", 1, 96, 64)}, common | {"cell": ("normed_mlp", "bfloat16", 1, 64, 48)},
               common | {"cell": ("normed", "bfloat16", 2, 96, 64), "kept": False}]  # fmt: skip
    machine = {"arch": "sm90", "name": "Chip", "sms": 1, "triton": "3.6.0", "torch": "2", "driver": "5", "date": "2026-11-30",
               "copy_gbs": 4266}  # fmt: skip
    made = search.to_table(records, machine, margin=0.02, note="")
    assert list(made.normed) == [("bfloat16", 1, 96, 64)] and list(made.normed_mlps) == [("bfloat16", 1, 96, 64)]
    assert not made.normed["bfloat16", 1, 96, 64].gated and made.normed_mlps["bfloat16", 1, 96, 64].gated


def test_a_search_started_again_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cells = [("bfloat16", 1, 4096, 1024), ("bfloat16", 2, 4096, 1024), ("bfloat16", 4, 4096, 1024)]
    done: list = []
    monkeypatch.setattr(
        search,
        "measure_cell",
        lambda bench, cell, *_: (
            done.append(cell) or {"cell": cell, "kept": False, "why": "x", "original_us": 1.0, "limit_us": 1.0}
        ),
    )
    log = tmp_path / "log.jsonl"
    search.search(None, cells[:1], log, copy_gbs=1, margin=0.02, seconds=60, say=lambda _: None)
    log.write_text(log.read_text() + '{"cell": ["bfloat16", 2')  # stopped in the middle of a line
    found = search.search(None, cells, log, copy_gbs=1, margin=0.02, seconds=60, say=lambda _: None)
    assert done == cells and [record["cell"] for record in found] == cells


def test_the_command_lists_products_and_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    assert tune.main([str(tmp_path), "--rows", "1,5", "--list", "-tp", "2"]) == 0
    assert "bfloat16 5 x 3072 x 2560" in capsys.readouterr().out
    for arguments, message in [
        ([str(tmp_path), "--rows", "17"], "17 is not between 1 and 16"),
        ([str(tmp_path), "--rows", "a"], "--rows"),
        (["--shapes", "12"], "'12' is not NxK"),
        ([], "give a MODEL or --shapes"),
    ]:
        assert tune.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_records_of_another_triton_are_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "chip.jsonl"
    log.write_text("{}\n")
    machine = {"arch": "sm90", "name": "Chip", "sms": 1, "triton": "3.6.0"}
    log.with_suffix(".machine").write_text(json.dumps(machine))
    tune._same_machine(log, machine)
    assert log.exists()
    tune._same_machine(log, machine | {"triton": "3.7.0"})
    assert not log.exists() and (tmp_path / "chip.jsonl.3.6.0").exists()


def test_a_search_becomes_a_table_that_is_read_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = measured(Bench(monkeypatch, 3.0, 5.0))
    machine = {
        "arch": "sm90",
        "name": "Chip",
        "sms": 1,
        "triton": "3.6.0",
        "torch": "2",
        "driver": "5",
        "date": "2026-11-29",
        "copy_gbs": 4266,
    }
    table.save(search.to_table([record], machine, margin=0.02, note=""), tmp_path / "chip.json")
    assert table.load(tmp_path / "chip.json").entries[("bfloat16", 1, 4096, 1024)].us == 3.0
