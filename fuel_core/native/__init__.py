"""Kernels of our own for the products that a decode step waits for, where a C++ compiler and AVX2 are at hand.

``kernels.cpp`` is built once per machine (about two seconds) and kept in the code cache; without it, torch's own ops
do the same work. Which of the two a process uses is decided once, when it first decodes or loads a model, so that a
step never changes its rounding while it is held. ``FUEL_NATIVE=0`` turns the kernels off.
"""

from fuel_core.native import build
from fuel_core.native.build import prepare, status
from fuel_core.native.ops import Matrix, Scattered, attend_one, c_shims, is_active, product, product_width

__all__ = [
    "Matrix",
    "Scattered",
    "attend_one",
    "build",
    "c_shims",
    "is_active",
    "prepare",
    "product",
    "product_width",
    "status",
]
