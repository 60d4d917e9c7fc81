"""decode-input-prep: every buffer is what the original leaves, and every broken condition goes to the original."""


def test_every_buffer_equals_the_stock_twins_after_every_step(in_release, release):
    in_release(release, "preparation:every_buffer_equals_the_stock_twins_after_every_step")


def test_preempted_and_resumed_requests_leave_what_the_stock_twin_leaves(in_release, release):
    in_release(release, "preparation:preempted_and_resumed_requests_leave_what_the_stock_twin_leaves")


def test_every_buffer_equals_the_stock_twins_with_mrope(in_release, release):
    in_release(release, "preparation:every_buffer_equals_the_stock_twins_with_mrope")


def test_positions_are_copied_only_where_the_batch_changed(in_release, release):
    in_release(release, "preparation:positions_are_copied_only_where_the_batch_changed")


def test_the_shadow_finds_every_integer_equal(in_release, release):
    in_release(release, "preparation:the_shadow_finds_every_integer_equal")


def test_each_service_condition_turns_the_fast_path_off(in_release, release):
    in_release(release, "decode_gates:each_service_condition_turns_the_fast_path_off")


def test_each_step_condition_takes_the_original(in_release, release):
    in_release(release, "decode_gates:each_step_condition_takes_the_original")


def test_the_first_step_goes_to_the_original(in_release, release):
    in_release(release, "decode_gates:the_first_step_goes_to_the_original")


def test_moved_buffers_rebuild_the_pointers(in_release, release):
    in_release(release, "decode_gates:moved_buffers_rebuild_the_pointers")


def test_a_shadow_difference_is_reported_and_ends_the_fast_path(in_release, release):
    in_release(release, "decode_gates:a_shadow_difference_is_reported_and_ends_the_fast_path")


def test_logits_indices_pick_the_same_rows(in_release, release):
    in_release(release, "decode_gates:logits_indices_pick_the_same_rows")


def test_a_kernel_that_does_not_compile_leaves_the_original(in_release, release):
    in_release(release, "decode_gates:a_kernel_that_does_not_compile_leaves_the_original")


def test_the_state_is_made_at_the_end_of_warm_up(in_release, release):
    in_release(release, "decode_gates:the_state_is_made_at_the_end_of_warm_up")


def test_what_a_dummy_run_leaves_behind_is_overwritten(in_release, release):
    in_release(release, "preparation:what_a_dummy_run_leaves_behind_is_overwritten")
