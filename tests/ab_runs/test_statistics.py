"""The statistics against synthetic boots whose truth is known. Seeded."""

import math

import numpy as np
import pytest

from ab_runs import stats
from ab_runs.stats import FASTER, SAME, SLOWER, UNDECIDED, Boot, Effect

RUNS = 400


def boots(random, *, effect=0.0, noise=0.02, blocks=2, block_noise=0.05, slope=0.0, tail=False, order="ABBA"):
    """Boots of ``order``: log-normal noise per boot, a shift per block, a linear drift over the run."""
    made = []
    for block in range(blocks):
        shift = random.normal(0, block_noise)
        for place, arm in enumerate(order):
            draw = random.standard_t(3) / math.sqrt(3) if tail else random.normal()
            log = math.log(50) + shift + noise * draw + slope * (block * len(order) + place)
            made.append(Boot(arm, block, math.exp(log + (math.log1p(effect) if arm == "B" else 0))))
    return made


def share(condition, seed, **how):
    random = np.random.default_rng(seed)
    return sum(bool(condition(boots(random, **how))) for _ in range(RUNS)) / RUNS


def verdict(made, margin=0.01):
    effect = stats.estimate(made, "A", "B")
    control = stats.disagreement([boot.value for boot in made if boot.arm == "A"])
    return stats.decide(effect, control, margin).verdict


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("effect", [0.0, -0.03, 0.2])
def test_the_interval_covers_the_true_effect_as_often_as_it_says(blocks, effect):
    def covers(made):
        found = stats.estimate(made, "A", "B")
        return found.low <= effect <= found.high

    covered = share(covers, seed=blocks, effect=effect, blocks=blocks)
    assert 0.925 <= covered <= 0.975  # 400 runs: 0.95 +- 2.3 standard errors


def test_linear_drift_over_the_whole_run_does_not_bias_a_mirrored_order():
    random = np.random.default_rng(3)
    found = [stats.estimate(boots(random, slope=0.03, noise=0.005), "A", "B").estimate for _ in range(200)]
    assert abs(np.mean(found)) < 0.001
    # The same drift biases an order that is not mirrored: the reason for A B B A.
    lopsided = [boots(random, slope=0.03, noise=0.005, order="AABB") for _ in range(200)]
    found = [stats.estimate(made, "A", "B").estimate for made in lopsided]
    assert np.mean(found) > 0.05


def test_heavy_tails_do_not_make_the_interval_too_narrow():
    def covers(made):
        found = stats.estimate(made, "A", "B")
        return found.low <= 0 <= found.high

    assert share(covers, seed=4, tail=True) >= 0.935


def test_equal_arms_are_rarely_called_faster_or_slower():
    wrong = share(lambda made: verdict(made) in (FASTER, SLOWER), seed=5, effect=0.0)
    assert wrong <= 0.05


def test_an_effect_at_the_margin_is_rarely_called_no_difference():
    wrong = share(lambda made: verdict(made, 0.02) == SAME, seed=6, effect=0.02, noise=0.005)
    assert wrong <= 0.035  # one of two one-sided tests at 2.5%


def test_clear_effects_are_found_and_small_noise_gives_equivalence():
    quiet = {"block_noise": 0.001}
    assert share(lambda made: verdict(made) == FASTER, seed=7, effect=-0.10, noise=0.01, **quiet) > 0.95
    assert share(lambda made: verdict(made) == SLOWER, seed=8, effect=0.10, noise=0.01, **quiet) > 0.95
    assert share(lambda made: verdict(made) == SAME, seed=9, effect=0.0, noise=0.001, **quiet) > 0.95


def test_a_base_that_shifts_between_blocks_costs_verdicts_and_gives_no_wrong_ones():
    """The block terms would take the shift out of the interval, but A then disagrees with A: undecided."""
    found = [share(lambda made, v=v: verdict(made) == v, seed=15, effect=-0.04, noise=0.002) for v in (FASTER, SLOWER)]
    assert 0.1 < found[0] < 0.9 and found[1] == 0


def test_throughput_is_better_when_it_is_higher():
    places = [(block, place, arm) for block in range(2) for place, arm in enumerate("ABBA")]
    made = [Boot(arm, block, 100 + 20 * (arm == "B") + place / 10) for block, place, arm in places]
    effect = stats.estimate(made, "A", "B")
    assert stats.decide(effect, 0.001, 0.01, lower_is_better=False).verdict == FASTER
    assert stats.decide(effect, 0.001, 0.01, lower_is_better=True).verdict == SLOWER


def test_a_against_a_disagreeing_as_much_as_a_and_b_is_undecided_whatever_the_interval():
    effect = Effect(-0.04, -0.05, -0.03, 0.95, 0.005, 5, (4, 4))
    assert stats.decide(effect, 0.039, 0.01).verdict == FASTER
    for control in (0.04, 0.2):
        decision = stats.decide(effect, control, 0.01)
        assert decision.verdict == UNDECIDED
        assert "A against A" in decision.why


def test_a_small_but_certain_difference_within_the_margin_is_no_difference():
    effect = Effect(-0.0002, -0.0003, -0.0001, 0.95, 0.0001, 5, (4, 4))
    assert stats.decide(effect, 0.0001, 0.01).verdict == SAME


def test_a_noisy_base_cannot_show_equivalence():
    effect = Effect(0.0, -0.005, 0.005, 0.95, 0.003, 5, (4, 4))
    assert stats.decide(effect, 0.02, 0.01).verdict == UNDECIDED


@pytest.mark.parametrize("values", [[100, 110, 110, 100], [100, 110, 100, 110], [100, 100, 110, 110]])
def test_the_control_sees_every_split_of_four_boots(values):
    assert stats.disagreement(values) == pytest.approx(0.1, abs=1e-9)


def test_the_control_needs_two_boots():
    assert stats.disagreement([1.0]) is None
    assert stats.disagreement([1.0, 1.5]) == pytest.approx(0.5)
    assert stats.decide(Effect(-0.1, -0.2, -0.05, 0.95, 0.01, 2, (1, 2)), None, 0.01).verdict == UNDECIDED


def test_the_boots_said_to_decide_do_decide():
    """Undecided at four boots; with the boots that the estimate asks for, most runs decide."""
    random = np.random.default_rng(10)
    effect = stats.estimate(boots(random, effect=-0.02, noise=0.03, blocks=2), "A", "B")
    typical = Effect(-0.02, effect.low, effect.high, 0.95, 0.03, effect.df, effect.boots)
    more = stats.boots_to_decide(typical, 0.005)
    assert more is not None and 10 <= more <= 25
    blocks = math.ceil((4 + more) / 2)
    truth = {"effect": -0.02, "noise": 0.03, "block_noise": 0.002}
    decided = share(lambda made: verdict(made, 0.005) == FASTER, seed=11, blocks=blocks, **truth)
    assert 0.35 <= decided <= 0.75  # an interval that just reaches zero at the estimate leaves it out half the time


def test_boots_to_decide_is_unknown_without_noise_or_beyond_reach():
    assert stats.boots_to_decide(Effect(0.1, None, None, 0.95, None, 0, (1, 1)), 0.01) is None
    assert stats.boots_to_decide(Effect(0.0001, -0.5, 0.5, 0.95, 0.4, 5, (4, 4)), 0.0002) is None


def test_the_exact_permutation_of_one_block_cannot_go_below_its_smallest_value():
    made = [Boot("A", 0, 10.0), Boot("B", 0, 20.0), Boot("B", 0, 21.0), Boot("A", 0, 11.0)]
    assert stats.permutation(made, "A", "B") == pytest.approx(2 / 6)


def test_permutation_has_the_size_it_claims():
    small = share(lambda made: stats.permutation(made, "A", "B") <= 0.05, seed=12, effect=0.0, blocks=2)
    assert small <= 0.075
    random = np.random.default_rng(0)
    made = boots(random, effect=-0.2, noise=0.01, blocks=6)
    assert stats.permutation(made, "A", "B", limit=500) < 0.01  # sampled, since 6 ** 6 ways are too many


def test_a_failed_boot_leaves_an_unbalanced_but_usable_comparison():
    random = np.random.default_rng(13)
    made = boots(random, effect=0.1, noise=0.001, blocks=2)[:-1]
    found = stats.estimate(made, "A", "B")
    assert found.estimate == pytest.approx(0.1, abs=0.005)
    assert found.boots == (3, 4)


def test_what_cannot_be_compared_is_an_error_that_names_the_arm():
    with pytest.raises(ValueError, match="'B' has no boot"):
        stats.estimate([Boot("A", 0, 1.0)], "A", "B")
    with pytest.raises(ValueError, match="share no block"):
        stats.estimate([Boot("A", 0, 1.0), Boot("B", 1, 1.0)], "A", "B")
    with pytest.raises(ValueError, match="positive"):
        stats.estimate([Boot("A", 0, 0.0), Boot("B", 0, 1.0)], "A", "B")
    assert stats.estimate([Boot("A", 0, 1.0), Boot("B", 0, 2.0)], "A", "B").low is None


def test_mean_interval_covers():
    random = np.random.default_rng(14)
    inside = 0
    for _ in range(RUNS):
        found = stats.mean_interval(random.normal(1.0, 0.3, size=12))
        inside += found.low <= 1.0 <= found.high
    assert 0.925 <= inside / RUNS <= 0.975
    assert stats.mean_interval([2.0]).low is None
