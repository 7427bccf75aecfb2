#!/usr/bin/env bash
# Our CPU kernels for aarch64, cross-built and run under an emulator, in the tests that compare them with float64: every
# loop and dtype. Arguments: passed on to pytest in place of those tests. FLAGS: of the compiler, such as
# -fsanitize=undefined. Needs CMake, a cross compiler and QEMU (Debian: cmake g++-aarch64-linux-gnu qemu-user).
set -euo pipefail
cd "$(dirname "$0")/../.."
compiler=${CROSS_CXX:-aarch64-linux-gnu-g++} emulator=${EMULATOR:-qemu-aarch64} processor=${PROCESSOR:-aarch64}
for tool in cmake "$compiler" "$emulator"; do
  command -v "$tool" > /dev/null || { echo "skipped: $tool is not here"; exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(command -v "${PYTHON:-python3}")
headers=$("$python" -c "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('jaxlib').origin).parent / 'include')")
cmake -S tests/emulated -B "$work" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR="$processor" \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS="${FLAGS:-}" -DCMAKE_EXE_LINKER_FLAGS=-static \
  -DXLA_FFI_INCLUDE="$headers" -DPython_EXECUTABLE="$python" > "$work/log"
cmake --build "$work" >> "$work/log" || { tail -50 "$work/log"; exit 1; }
# Without those of programs that a callback cannot stand in: exported ones, symbolic sizes, HLO (emulated_cpu.py).
if [ $# -eq 0 ]; then
  set -- tests/primitive tests/formats tests/cuda/test_direct.py tests/fusion/test_cpu_dense_blocks.py \
    -k "not (export or symbolic or compiled_program)"
fi
JSC_EMULATED="$emulator $work/serve" JAX_PLATFORMS=cpu PYTHONPATH="$PWD/tests/helpers${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m pytest -p emulated_cpu -p no:cacheprovider "$@"
