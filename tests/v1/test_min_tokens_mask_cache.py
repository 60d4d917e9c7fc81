"""min-tokens-mask-cache: the masked logits are the original's, in every supported release."""


def test_masked_logits_equal_the_originals_over_random_batches(in_release, release):
    in_release(release, "min_tokens:masked_logits_equal_the_originals_over_random_batches")


def test_structured_outputs_and_rows_outside_the_batch_go_to_the_original(in_release, release):
    in_release(release, "min_tokens:structured_outputs_and_rows_outside_the_batch_go_to_the_original")


def test_the_key_is_the_content_and_the_cache_is_bounded(in_release, release):
    in_release(release, "min_tokens:the_key_is_the_content_and_the_cache_is_bounded")
