"""A run's folder: interruption at any moment loses nothing, a finished run stays as it is."""

import json

import pytest

from ab_runs.schedule import Slot
from ab_runs.store import Store, StoreError, read_json, write_json

SLOT = Slot(3, "stock", 0)


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "run")
    made.begin({"name": "demo", "boots": 4})
    return made


def sample(store):
    folder = store.sample_folder(SLOT)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text('{"completed": 8}')
    store.finish_sample(SLOT, {"status": "ok"}, ["bench.json", "not-there.json"])
    return folder


def test_a_finished_sample_is_found_again(store):
    sample(store)
    assert Store(store.folder).sample(SLOT)["status"] == "ok"


@pytest.mark.parametrize("name", ["sample.json", "bench.json"])
@pytest.mark.parametrize("keep", [0, 1, 10])
def test_a_sample_whose_file_was_cut_off_counts_as_not_measured_and_is_set_aside(store, name, keep):
    folder = sample(store)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:keep])
    assert store.sample(SLOT) is None
    aside = store.set_aside(SLOT)
    assert not folder.exists() and (aside / name).read_bytes() == whole[:keep]
    sample(store)
    assert store.sample(SLOT) is not None
    (folder / name).unlink()
    assert store.sample(SLOT) is None
    assert store.set_aside(SLOT).name.endswith(".cut-2")


def test_a_missing_sample_has_nothing_to_set_aside(store):
    assert store.sample(SLOT) is None and store.set_aside(SLOT) is None


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"old": 1})

    class Bomb:
        def __str__(self):
            raise RuntimeError("full disk")

    with pytest.raises(RuntimeError):
        write_json(file, {"new": Bomb()})
    assert read_json(file) == {"old": 1}


def test_a_run_is_taken_up_only_with_the_same_spec(store):
    again = Store(store.folder)
    assert again.begin({"name": "demo", "boots": 4}) is True
    with pytest.raises(StoreError, match="another spec .different: boots."):
        again.begin({"name": "demo", "boots": 6})


def test_a_finished_run_is_never_overwritten(store):
    store.finish({"at": "now"})
    with pytest.raises(StoreError, match="finished and is never overwritten"):
        Store(store.folder).begin({"name": "demo", "boots": 4})


def test_a_folder_with_other_files_is_not_taken(tmp_path):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(StoreError, match="holds files but no run .precious.txt."):
        Store(tmp_path).begin({})
    assert (tmp_path / "precious.txt").read_text() == "x"


def test_two_runners_do_not_work_in_one_folder(store):
    with store.locked(), pytest.raises(StoreError, match="another run works"), Store(store.folder).locked():
        pass
    with Store(store.folder).locked():
        pass


def test_what_is_no_run_is_said_by_name(tmp_path, store):
    with pytest.raises(StoreError, match="holds no run"):
        Store(tmp_path / "nothing").run()
    (store.folder / "run.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StoreError, match="is no run of format"):
        store.run()
    (store.folder / "run.json").write_text('{"form')
    with pytest.raises(StoreError, match="cut off or no JSON"):
        store.run()
