"""CMAKE_ARGS for a llama.cpp that is a fair rival on this CPU: what the CPU has, named one by one.

    CMAKE_ARGS="$(python benchmarks/native_flags.py)" pip install --no-binary llama-cpp-python llama-cpp-python

Its own GGML_NATIVE=ON asks the compiler, which goes by the CPU's model; on a virtual machine that hides a part of the
CPU (AMX, mostly) the code then dies of an illegal instruction. AMX is never asked for here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# GGML's option -> the flags of /proc/cpuinfo that must all be there.
OPTIONS = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
    "GGML_AVX512_BF16": ("avx512_bf16",),
    "GGML_AVX_VNNI": ("avx_vnni",),
}


def cmake_args(cpuinfo: str) -> str:
    """The arguments for a CPU that /proc/cpuinfo describes so; one without x86 flags is left to GGML_NATIVE."""
    listed = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    if listed is None:
        return "-DGGML_OPENMP=ON"
    has = set(listed[1].split())
    chosen = {option: all(flag in has for flag in flags) for option, flags in OPTIONS.items()}
    words = ["-DGGML_NATIVE=OFF", *(f"-D{option}={'ON' if on else 'OFF'}" for option, on in chosen.items())]
    return " ".join([*words, "-DGGML_OPENMP=ON"])


def main() -> None:
    source = Path("/proc/cpuinfo")
    if not source.exists():
        sys.exit("/proc/cpuinfo expected, found none: build with llama.cpp's defaults")
    print(cmake_args(source.read_text()))


if __name__ == "__main__":
    main()
