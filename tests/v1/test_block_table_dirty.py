"""block-table-dirty: the device's block tables are what the original would have left, in every supported release."""


def test_device_copy_equals_the_originals_after_every_step(in_release, release):
    in_release(release, "block_table:device_copy_equals_the_originals_after_every_step")


def test_every_writer_makes_the_table_dirty(in_release, release):
    in_release(release, "block_table:every_writer_makes_the_table_dirty")


def test_a_dummy_run_and_a_wake_up_forget_what_the_device_holds(in_release, release):
    in_release(release, "block_table:a_dummy_run_and_a_wake_up_forget_what_the_device_holds")


def test_without_a_version_counter_nothing_is_skipped(in_release, release):
    in_release(release, "block_table:without_a_version_counter_nothing_is_skipped")
