"""greedy-native-dtype: the tokens are the original's, in every supported release."""


def test_greedy_tokens_equal_the_originals(in_release, release):
    in_release(release, "sampler:greedy_tokens_equal_the_originals")


def test_without_the_kernel_pytorchs_argmax_gives_the_tokens(in_release, release):
    in_release(release, "sampler:without_the_kernel_pytorchs_argmax_gives_the_tokens")


def test_speculation_accepts_the_originals_tokens(in_release, release):
    in_release(release, "sampler:speculation_accepts_the_originals_tokens")


def test_each_gate_condition_takes_the_original(in_release, release):
    in_release(release, "sampler:each_gate_condition_takes_the_original")


def test_speculation_refuses_what_it_cannot_prove(in_release, release):
    in_release(release, "sampler:speculation_refuses_what_it_cannot_prove")
