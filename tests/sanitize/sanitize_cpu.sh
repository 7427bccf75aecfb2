#!/usr/bin/env bash
# AddressSanitizer and UndefinedBehaviorSanitizer over our CPU kernels: every case, with each instruction
# set that this machine has, then the files of tests that run them in other ways; needs GCC and the build tools of the [dev] extra.
# Arguments: passed on to pytest; DTYPES: element types of the cases, by default all.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(command -v "${PYTHON:-python3}")
flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
cmake -S . -B "$work/build" -G Ninja -DJSC_CUDA=OFF -DPython_EXECUTABLE="$python" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS="$flags" > "$work/log"
cmake --build "$work/build" >> "$work/log" || { tail -50 "$work/log"; exit 1; }
cp -r jax_sparse_conv tests pyproject.toml "$work"
rm -f "$work"/jax_sparse_conv/_*.so
cp "$work"/build/_cpu*.so "$work"/build/_planner*.so "$work/build/_build_info.py" "$work/jax_sparse_conv"
cd "$work"
# The finder of an editable install would bring its own build.
cat > sitecustomize.py << 'END'
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
END
# Python and XLA are not instrumented: their leaks are not ours to find.
sanitized() {
  LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so):$(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 JAX_PLATFORMS=cpu PYTHONPATH="$work:$work/tests/helpers:$work/tests/sanitize" \
    "$python" "$@"
}
sanitized -c "
import sys
import sanitizer_cover
from jax_sparse_conv._src import _native
assert _native._modules['cpu'].__file__.startswith('$work'), _native._modules['cpu'].__file__
for isa in _native.cpu_isas():
    _native.set_cpu_isa(isa)
    print(isa, end=': ')
    sanitizer_cover.main(sys.argv[1:])" ${DTYPES:-}
sanitized -m pytest -q -p no:cacheprovider tests/primitive/test_kernels.py tests/primitive/test_instruction_sets.py \
  tests/gradients/test_cpu_gradient.py tests/gradients/test_max_pool.py tests/gradients/test_channels.py \
  tests/gradients/test_joined.py \
  tests/gradients/test_gradient.py tests/cuda/test_direct.py \
  tests/primitive/test_packing.py tests/primitive/test_packed_kernels.py tests/primitive/test_pairs.py \
  tests/primitive/test_winograd.py tests/primitive/test_dots.py \
  tests/layers/test_packed_params.py tests/formats \
  tests/primitive/test_adaptive.py tests/primitive/test_counting.py tests/fusion/test_rewrite.py \
  tests/fusion/test_cpu_dense_blocks.py "$@"
