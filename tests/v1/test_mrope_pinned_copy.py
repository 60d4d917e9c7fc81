"""mrope-pinned-copy: the positions on the device are the original's, in the releases before 0.28."""

from overlay.facts import Build, Facts
from patches.common.mrope_pinned_copy import row_by_row_upstream

RELEASES = ("0.18.1", "0.23.0", "0.26.0")


def test_mrope_rows_are_copied_and_the_buffer_is_back_in_its_place(in_release, release):
    events = in_release(release, "preparation:mrope_rows_are_copied_and_the_buffer_is_back_in_its_place")
    assert events["hit"] > 10


def test_superseded_since_0_28():
    for public, expected in (("0.27.1", False), ("0.28.0", True), ("0.33.0", True), (None, False)):
        assert bool(row_by_row_upstream(Facts(build=Build(public=public)))) is expected
