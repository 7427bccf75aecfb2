# The kernels are compiled once per instruction set (isa_*.cc) and chosen at run time; see isa.h.
set(JSC_CPU_SOURCES cpu/core/amx.cc cpu/core/caches.cc cpu/ffi/channels.cc cpu/ffi/channels_call.cc cpu/ffi/coo_star.cc cpu/ffi/dense_block.cc cpu/plan/amx_plan.cc cpu/plan/dense_conv_plan.cc cpu/ffi/ffi.cc cpu/ffi/handlers.cc cpu/ffi/host.cc cpu/ffi/joined_channels.cc cpu/ffi/kernel_gradient.cc cpu/ffi/tasks.cc cpu/ffi/turned_kernel.cc cpu/core/machine_limits.cc cpu/plan/window_plan.cc cpu/plan/plan_cache.cc cpu/plan/plan_choice.cc cpu/plan/phase_plan.cc cpu/plan/pixel_plan.cc cpu/plan/scatter_plan.cc cpu/plan/winograd_plan.cc cpu/core/isa_portable.cc)
set(JSC_PORTABLE_OPTIONS -O3 -ffp-contract=fast)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Scheduled before registers are given out, so many weights are loaded ahead that sums of inner loops go to the stack.
  list(APPEND JSC_PORTABLE_OPTIONS -fno-schedule-insns)
endif()
set_source_files_properties(cpu/core/isa_portable.cc PROPERTIES COMPILE_OPTIONS "${JSC_PORTABLE_OPTIONS}")
# The one loop that all instruction sets share.
set_source_files_properties(cpu/ffi/turned_kernel.cc PROPERTIES COMPILE_OPTIONS -O3)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND JSC_CPU_SOURCES cpu/core/isa_avx2.cc cpu/core/isa_avx512.cc)
  set_source_files_properties(cpu/core/isa_avx2.cc PROPERTIES COMPILE_OPTIONS
                              "-O3;-ffp-contract=fast;-mavx2;-mfma;-mf16c;-mbmi;-mbmi2;-mpopcnt;-mtune=haswell")
  # Aligned: where the linker happens to put its loops is worth up to 8 % of a 1x1 layer.
  set_source_files_properties(
    cpu/core/isa_avx512.cc
    PROPERTIES COMPILE_OPTIONS
               "-O3;-ffp-contract=fast;-march=skylake-avx512;-mprefer-vector-width=512;-falign-functions=64;-falign-loops=64;-Wno-maybe-uninitialized")
  set_source_files_properties(cpu/ffi/ffi.cc cpu/ffi/host.cc cpu/core/machine_limits.cc cpu/core/isa_avx2.cc cpu/core/isa_avx512.cc PROPERTIES COMPILE_DEFINITIONS JSC_X86)
endif()
