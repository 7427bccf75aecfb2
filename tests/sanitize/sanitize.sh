#!/usr/bin/env bash
# Memory errors, races and uninitialised reads of our CUDA kernels, over every case; needs a GPU and compute-sanitizer.
# Arguments: tools, by default all three; DTYPES: element types, CHECKS: of sanitizer_cover.py, by default all.
set -euo pipefail
cd "$(dirname "$0")"
export PYTHONPATH="$PWD/../helpers${PYTHONPATH:+:$PYTHONPATH}"
# One allocation per buffer, so that a read beyond its end is a read beyond an allocation.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
# racecheck takes long over large layers; small ones have the same kernels. It sees what the copy engine writes, but not
# what blocks of a cluster send each other (st.async) nor what products read (wgmma). initcheck sees neither the copy
# engine's writes nor those of XLA's kernels.
small="runs small dense coo_star stored stacks non_finite adaptive chains pairs blocks"
for tool in "${@:-memcheck racecheck initcheck}"; do
  for name in $tool; do
    checks=${CHECKS:-} options=
    if [[ $name == racecheck ]]; then checks=${CHECKS:-$small}; fi
    if [[ $name == initcheck ]]; then options="--check-api-memory-access no"; fi
    echo "== $name"
    compute-sanitizer --tool "$name" $options --kernel-name kernel_substring=jsc --error-exitcode 9 \
      "${PYTHON:-python3}" sanitizer_cover.py ${DTYPES:-} $checks
  done
done
