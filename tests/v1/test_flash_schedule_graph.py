"""flash-schedule-graph: plans and metadata are the original's, in every supported release."""


def test_plans_equal_the_originals_over_random_steps(in_release, release):
    in_release(release, "flash_schedule:plans_equal_the_originals_over_random_steps")


def test_shadow_sees_a_plan_from_elsewhere(in_release, release):
    in_release(release, "flash_schedule:shadow_sees_a_plan_from_elsewhere")


def test_each_condition_broken_once_takes_the_original(in_release, release):
    in_release(release, "flash_schedule:each_condition_broken_once_takes_the_original")
