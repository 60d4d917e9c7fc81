"""Receipts and counters of every process of a run.

Counters live in one small memory-mapped file a process, so that reading them costs the server nothing. A patch
holds a ``Counters`` of its own id and calls ``hit()`` where its fast path ran and ``refuse(reason)`` where its gate sent
the call to the original. Without a run folder (a unit test) they count in memory.
"""
