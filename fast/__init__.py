"""Triton kernels for the operators, one module a family.

Importing this package imports neither torch nor triton; importing a family's module does::

    from fast.kv_rope import concat_forward, static_backward
"""
