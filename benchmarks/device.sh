#!/bin/sh
# Everything that only a GPU can show, in less than ten minutes: correctness first, then times.
#   benchmarks/device.sh FOLDER        from the repository's root, in an environment with a CUDA build of torch; nvcc on PATH
set -eu
OUT=${1:?a folder for the results}
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv > "$OUT/gpu.csv"
timeout 240 python -m pytest -q -m "slow or not slow" tests/kernels/test_cuda.py tests/kernels/test_triton_attention.py \
    tests/kernels/test_triton_verify.py tests/kernels/test_triton_truncation.py tests/kernels/test_gated_delta.py 2>&1 | tee "$OUT/tests.txt"
if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 1 python -m pytest -q tests/kernels/test_cuda.py \
            -k "gpu and 77" > "$OUT/$tool.txt" 2>&1
    done
fi
timeout 240 python benchmarks/kernels.py --json "$OUT/kernels.json" | tee "$OUT/kernels.txt"
