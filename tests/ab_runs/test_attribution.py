"""Leave-one-out and bisection on sets whose culprit is known."""

import itertools

import pytest

from ab_runs import attribute
from ab_runs.attribute import BAD, GOOD, UNTESTABLE, search
from ab_runs.spec import SpecError, parse

PATCHES = tuple("abcdefg")


@pytest.mark.parametrize("culprit", PATCHES)
def test_a_single_culprit_is_found_in_few_tests(culprit):
    found = search(PATCHES, lambda subset: BAD if culprit in subset else GOOD)
    assert found.patch == culprit and found.alone == BAD
    assert len(found.tested) <= 6  # 7 patches: the whole, three halvings, alone


@pytest.mark.parametrize("pair", list(itertools.combinations(PATCHES, 2)))
def test_a_pair_that_is_bad_only_together_is_named_with_what_came_before(pair):
    found = search(PATCHES, lambda subset: BAD if set(pair) <= set(subset) else GOOD)
    assert found.patch == pair[1] and pair[0] in found.before and found.alone == GOOD
    assert "bad together with" in str(found)


def test_a_good_set_has_no_culprit():
    found = search(PATCHES, lambda subset: GOOD)
    assert found.patch is None and list(found.tested) == [PATCHES] and "whole set is good" in str(found)


def test_subsets_whose_plan_refuses_are_passed_over():
    """d requires c's neighbour: prefixes of length 3 and 4 cannot be tested."""

    def test(subset):
        if len(subset) in (3, 4):
            return UNTESTABLE
        return BAD if "b" in subset else GOOD

    assert search(PATCHES, test).patch == "b"
    found = search(PATCHES[:3], lambda subset: BAD if len(subset) == 3 else UNTESTABLE)
    assert found.patch is None and "no patch can be named" in str(found)


SPEC = {
    "name": "demo",
    "model": "m",
    "arms": {"stock": "off", "set": {"only": ["a", "b", "c"]}},
    "workload": {"input_len": 8},
}


def test_leave_one_out_compares_the_set_with_each_of_its_reductions():
    made = attribute.leave_one_out(parse(SPEC), None)
    assert made.base == "all" and made.arms["without-b"].only == ("a", "c")
    assert list(made.arms) == ["all", "without-a", "without-b", "without-c"]


@pytest.mark.parametrize(
    ("arms", "arm", "message"),
    [
        (SPEC["arms"], "nope", "'nope' is no arm"),
        (SPEC["arms"], "stock", "name its patches with only"),
        ({"stock": "off", "set": {"only": ["a"]}}, None, "nothing to take apart"),
    ],
)
def test_what_cannot_be_taken_apart_is_said(arms, arm, message):
    with pytest.raises(SpecError, match=message):
        attribute.leave_one_out(parse({**SPEC, "arms": arms}), arm)
