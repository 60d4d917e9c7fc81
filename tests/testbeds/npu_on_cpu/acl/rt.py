"""CANN's runtime calls: none on a CPU."""

from torch_npu._synthetic import missing_getattr

__getattr__ = missing_getattr("acl.rt")
memcpy = __getattr__("memcpy")
