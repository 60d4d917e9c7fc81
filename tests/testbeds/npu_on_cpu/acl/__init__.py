"""CANN's pyACL, of which only the camem allocator imports anything. Nothing of it can be called."""

from torch_npu._synthetic import missing_getattr

__getattr__ = missing_getattr("acl")
