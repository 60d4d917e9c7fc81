"""Named workloads: the loads that published measurements of these optimisations used.

Figures measured under another load than theirs cannot be set beside them, so that their loads have names.
"""

from __future__ import annotations

from typing import Any

# name -> (what it is, settings of ``Workload``). Numbers of requests keep one load near a minute on the device that
# each was published for; a spec may override any of them beside ``preset``.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {}


def _add(name: str, what: str, **settings: Any) -> None:
    PRESETS[name] = (what, settings)


# Five shapes of a dense 0.6B to 4B model on one device (the fourth article).
for _input, _output, _concurrency, _requests in (
    (512, 128, 1, 32),
    (256, 128, 8, 128),
    (256, 128, 16, 256),
    (2048, 128, 1, 32),
    (8192, 64, 1, 16),
):
    _add(
        f"{_input}-{_output}-c{_concurrency}",
        f"{_input} tokens in, {_output} out, concurrency {_concurrency}",
        input_len=_input,
        output_len=_output,
        concurrency=_concurrency,
        requests=_requests,
    )

# Three bands of long inputs, one request at a time (the first and second articles: 10 requests a band).
for _low, _high in ((4, 8), (8, 16), (16, 32)):
    _add(
        f"{_low}k-{_high}k-c1",
        f"{_low}K to {_high}K tokens in, 256 out, concurrency 1",
        input_range=[_low * 1024, _high * 1024],
        output_len=256,
        concurrency=1,
        requests=10,
    )

# One shape at three concurrencies (the third article).
for _concurrency, _requests in ((1, 8), (4, 32), (8, 64)):
    _add(
        f"1024-512-c{_concurrency}",
        f"1024 tokens in, 512 out, concurrency {_concurrency}",
        input_len=1024,
        output_len=512,
        concurrency=_concurrency,
        requests=_requests,
    )
