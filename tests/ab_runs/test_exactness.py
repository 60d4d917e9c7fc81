"""Answers compared: identical, near-tie, divergent, untestable."""

import copy

import pytest

from ab_runs import answers, exactness
from ab_runs.client import CallError
from ab_runs.exactness import DIVERGENT, IDENTICAL, NEAR_TIE, UNTESTABLE
from ab_runs.spec import Exactness, SpecError


def answer(tokens, gap=1.0, plain=None):
    """An answer whose runner-up is token + 1000, ``gap`` nats behind."""
    top = [{str(token): -0.1, str(token + 1000): -0.1 - gap} for token in tokens]
    return {"tokens": list(tokens), "plain": list(tokens if plain is None else plain), "top": top}


def flipped(index, gap, tokens=(5, 6, 7, 8)):
    """The same answer, but at ``index`` the runner-up won by ``gap``."""
    made = answer(tokens)
    made["tokens"][index] += 1000
    made["plain"][index] += 1000
    made["top"][index] = {str(tokens[index]): -0.1 - gap, str(tokens[index] + 1000): -0.1}
    return made


def judged(base, arm, kind="bitwise", **more):
    return exactness.judge(base, arm, near_tie=0.1, exactness=kind, **more)


def test_equal_answers_are_identical():
    base = [[answer([5, 6])], [answer([5, 6])]]
    found = judged(base, copy.deepcopy(base))
    assert found.verdict == IDENTICAL and found.acceptable and found.base_repeats_logprobs


def test_a_flip_between_candidates_within_the_tolerance_is_a_near_tie_at_its_token():
    one = answer((5, 6, 7, 8))
    one["top"][2] = {"7": -0.70, "1007": -0.72}
    found = exactness.compare(one, flipped(2, 0.03), 0.1)
    assert (found.verdict, found.token, found.candidates) == (NEAR_TIE, 2, (7, 1007))
    assert found.gap == pytest.approx(0.03)


def test_a_flip_beyond_the_tolerance_in_either_arm_is_a_divergence():
    tie = answer((5, 6, 7, 8))
    tie["top"][2] = {"7": -0.70, "1007": -0.72}
    assert exactness.compare(tie, flipped(2, 0.5), 0.1).verdict == DIVERGENT
    assert exactness.compare(answer((5, 6, 7, 8)), flipped(2, 0.01), 0.1).verdict == DIVERGENT


def test_a_candidate_that_the_other_arm_does_not_even_name_is_a_divergence():
    other = flipped(1, 0.0)
    other["top"][1] = {"4242": -0.1, "1006": -0.1}
    assert exactness.compare(answer((5, 6, 7, 8)), other, 0.1).verdict == DIVERGENT


def test_an_answer_that_ends_early_is_a_divergence_at_its_end():
    found = exactness.compare(answer((5, 6, 7)), answer((5, 6)), 0.1)
    assert (found.verdict, found.token) == (DIVERGENT, 2)


def test_the_request_without_logprobs_is_compared_too():
    """A patch that acts only where nobody asked for log-probabilities must not slip through."""
    found = exactness.compare(answer((5, 6)), answer((5, 6), plain=(5, 9)), 0.1)
    assert (found.verdict, found.token, found.way) == (DIVERGENT, 1, "plain")


def test_the_worst_prompt_and_the_worst_boot_decide():
    base = [[answer([5, 6]), answer([7])]] * 2
    arm = [[answer([5, 6]), answer([7])], [answer([5, 6]), answer([9])]]
    found = judged(base, arm)
    assert found.verdict == DIVERGENT and not found.acceptable and "prompt 1 diverges at token 0" in found.why
    assert found.counts == {IDENTICAL: 1, NEAR_TIE: 0, DIVERGENT: 1, UNTESTABLE: 0}


def test_a_base_that_does_not_repeat_itself_makes_the_prompt_untestable():
    base = [[answer([5]), answer([7])], [answer([5]), answer([8])]]
    found = judged(base, [[answer([5]), answer([9])]])
    assert found.verdict == IDENTICAL and found.counts[UNTESTABLE] == 1
    found = judged([[answer([7])], [answer([8])]], [[answer([7])]])
    assert found.verdict == UNTESTABLE and not found.acceptable


def test_one_boot_of_the_base_cannot_show_that_it_repeats():
    assert judged([[answer([5])]], [[answer([5])]]).verdict == UNTESTABLE
    assert judged([], [[answer([5])]]).verdict == UNTESTABLE


def test_bitwise_must_keep_the_log_probabilities_where_the_base_repeats_them():
    base = [[answer([5, 6])], [answer([5, 6])]]
    shifted = answer([5, 6])
    shifted["top"][0]["5"] += 1e-6
    found = judged(base, [[shifted]])
    assert (
        found.verdict == IDENTICAL and not found.acceptable and "log-probabilities differ by up to 1e-06" in found.why
    )
    assert judged(base, [[shifted]], "batch").acceptable
    noisy = copy.deepcopy(base)
    noisy[1][0]["top"][1]["6"] -= 1e-7  # the base does not repeat bitwise either
    assert judged(noisy, [[shifted]]).acceptable


@pytest.mark.parametrize(("kind", "accepted"), [("bitwise", False), ("batch", False), ("rounding", True)])
def test_a_near_tie_is_accepted_only_from_the_class_that_allows_it(kind, accepted):
    one = answer((5, 6, 7, 8))
    one["top"][2] = {"7": -0.70, "1007": -0.72}
    found = judged([[one], [one]], [[flipped(2, 0.03)]], kind)
    assert found.verdict == NEAR_TIE and found.acceptable is accepted


def test_batch_allows_a_near_tie_where_the_padded_size_differs():
    one = answer((5, 6, 7, 8))
    one["top"][2] = {"7": -0.70, "1007": -0.72}
    assert judged([[one], [one]], [[flipped(2, 0.03)]], "batch", same_size=[False]).acceptable
    assert not judged([[one], [one]], [[flipped(2, 0.5)]], "batch", same_size=[False]).acceptable


def test_padded_size_is_the_smallest_capture_size_that_holds_the_step():
    assert [exactness.padded(n, [1, 2, 4, 8]) for n in (1, 3, 8, 9)] == [1, 4, 8, 9]
    assert exactness.padded(5, []) == 5


def test_the_quality_figure_is_paired_by_text():
    def boot(values):
        return [{"context": str(i), "mean_logprob": value} for i, value in enumerate(values)]

    found = exactness.quality_change([boot([-1, -5, -3])], [boot([-1.01, -5.01, -3.01])], 0.95)
    assert found.mean == pytest.approx(-0.01) and found.low == pytest.approx(-0.01) and found.number == 3
    with pytest.raises(ValueError, match="different texts"):
        exactness.quality_change([boot([-1, -2])], [boot([-1])], 0.95)


COMPLETION = {
    "choices": [
        {
            "finish_reason": "length",
            "token_ids": [5, 6],
            "logprobs": {
                "tokens": ["token_id:5", "token_id:6"],
                "token_logprobs": [-0.1, -0.2],
                "top_logprobs": [{"token_id:5": -0.1, "token_id:9": -2.0}, {"token_id:6": -0.2}],
            },
        }
    ],
    "usage": {"prompt_tokens": 3},
}


def test_a_completion_is_read_by_ids():
    found = answers.read_answer(COMPLETION, logprobs=True)
    assert found["tokens"] == [5, 6] and found["top"][0] == {"5": -0.1, "9": -2.0} and found["prompt_tokens"] == 3
    old = copy.deepcopy(COMPLETION)
    del old["choices"][0]["token_ids"]  # a build that does not know return_token_ids
    assert answers.read_answer(old, logprobs=True)["tokens"] == [5, 6]
    with pytest.raises(CallError, match="returns no token ids"):
        answers.read_answer(old, logprobs=False)


def test_a_completion_that_lacks_something_says_what():
    for path, message in (("logprobs", "logprobs"), ("usage", "usage")):
        broken = copy.deepcopy(COMPLETION)
        (broken["choices"][0] if path == "logprobs" else broken).pop(path)
        with pytest.raises(CallError, match=message):
            answers.read_answer(broken, logprobs=True)
    text = copy.deepcopy(COMPLETION)
    text["choices"][0]["logprobs"]["tokens"][0] = " hello"
    with pytest.raises(CallError, match="by its text and not by its id"):
        answers.read_answer(text, logprobs=True)


def test_shipped_prompts_and_texts_are_there_and_distinct(tmp_path):
    assert len(set(answers.prompts(Exactness(count=16)))) == 16
    found = answers.texts()
    assert len({item["context"] for item in found}) == len(found) >= 20
    file = tmp_path / "p.yaml"
    file.write_text("- 1")
    with pytest.raises(SpecError, match="expected a list of texts"):
        answers.prompts(Exactness(prompts=str(file)))


def test_the_engines_own_settings_are_read_from_its_log():
    from ab_runs.sample import engine_settings

    log = (
        "INFO (EngineCore pid=1) x\nINFO core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='a, b', "
        "dtype=torch.bfloat16, load=F(x='1, 2', y=[1, 2]), download_dir='RUN/x', "
        "compilation_config={'mode': 0, 'cudagraph_capture_sizes': [1, 2, 4], 'dir': '/folder/cache'}\nmore\n"
    )
    found = engine_settings(log, "/folder")
    assert (
        found["model"] == "'a, b'" and found["load"] == "F(x='1, 2', y=[1, 2])" and found["capture_sizes"] == [1, 2, 4]
    )
    assert "RUN/cache" in found["compilation_config"]
    assert engine_settings("nothing of the kind") == {}
