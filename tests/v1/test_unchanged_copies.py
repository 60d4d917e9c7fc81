"""unchanged-copies: a copy is left out only where the device holds the same bytes, in every supported release."""


def test_copies_are_left_out_only_where_the_bytes_are_there(in_release, release):
    in_release(release, "preparation:copies_are_left_out_only_where_the_bytes_are_there")
