"""Comparing two patch sets of the same server: ``python -m ab_runs``.

The samples are boots. Every arm is started afresh several times, interleaved, loaded by the installed build's own
``vllm bench serve``, and stopped. ``judge`` then decides, from the files alone and in this order: is the comparison
valid, are the answers the same, and is the arm faster, slower, no different, or undecided.

The way through the package: ``spec`` -> ``schedule`` -> ``plans`` -> ``runner`` (``server``, ``load``, ``answers``) ->
``judge`` (``validity``, ``exactness``, ``stats``) -> ``report`` and ``records``.

Dependencies: running needs only what vLLM brings (pydantic, PyYAML, numpy, httpx). Judging needs scipy for the
intervals; without it a run still finishes, and ``judge`` says what to install. The HTML page needs jinja2 and
matplotlib; without them ``report.md`` is written alone, and says so.
"""
