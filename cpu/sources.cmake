# The kernels are compiled once per instruction set (isa_*.cc) and chosen at run time; see isa.h.
set(JSC_CPU_SOURCES cpu/coo_star.cc cpu/direct_plan.cc cpu/ffi.cc cpu/host.cc cpu/machine_limits.cc cpu/plan.cc cpu/plan_cache.cc cpu/plan_choice.cc cpu/pixel_plan.cc cpu/scatter_plan.cc cpu/isa_portable.cc)
set_source_files_properties(cpu/isa_portable.cc PROPERTIES COMPILE_OPTIONS "-O3;-ffp-contract=fast")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND JSC_CPU_SOURCES cpu/isa_avx2.cc cpu/isa_avx512.cc)
  set_source_files_properties(cpu/isa_avx2.cc PROPERTIES COMPILE_OPTIONS
                              "-O3;-ffp-contract=fast;-mavx2;-mfma;-mf16c;-mbmi;-mbmi2;-mpopcnt;-mtune=haswell")
  # Aligned: where the linker happens to put its loops is worth up to 8 % of a 1x1 layer.
  set_source_files_properties(
    cpu/isa_avx512.cc
    PROPERTIES COMPILE_OPTIONS
               "-O3;-ffp-contract=fast;-march=skylake-avx512;-mprefer-vector-width=512;-falign-functions=64;-falign-loops=64;-Wno-maybe-uninitialized")
  set_source_files_properties(cpu/ffi.cc cpu/host.cc cpu/machine_limits.cc cpu/isa_avx2.cc cpu/isa_avx512.cc PROPERTIES COMPILE_DEFINITIONS JSC_X86)
endif()
