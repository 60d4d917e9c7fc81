"""Requests under real grammars: on V1 they get what the stock twin gives them."""

from tests.v1.checks.structured_output import RELEASES  # noqa: F401 - the releases of this module's tests


def test_requests_under_grammars_get_what_the_stock_twin_gives_them(in_release, release):
    found = in_release(release, "structured_output:requests_under_grammars_get_what_the_stock_twin_gives_them")
    assert found["masked"] and found["deferred"]
