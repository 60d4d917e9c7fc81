"""gdn-metadata-once: every group's metadata, and what captured graphs read, are the original's (releases up to 0.30)."""

RELEASES = ("0.18.1", "0.23.0", "0.26.0", "0.28.0")


def test_every_groups_metadata_equals_the_originals(in_release, release):
    events = in_release(release, "gdn:every_groups_metadata_equals_the_originals")
    assert events["graphs=True"]["hit"] >= 80


def test_graphs_captured_without_the_patch_keep_their_own_buffers(in_release, release):
    in_release(release, "gdn:graphs_captured_without_the_patch_keep_their_own_buffers")


def test_another_step_another_builder_and_speculation_are_not_shared(in_release, release):
    in_release(release, "gdn:another_step_another_builder_and_speculation_are_not_shared")
