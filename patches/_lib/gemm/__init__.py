"""Skinny matrix products by measured tables: the kernels, the table's format and the choice at run time.

``table`` and ``summary`` are plain standard library, for the launcher. ``kernels`` and ``dispatch`` import torch and
Triton.
"""
