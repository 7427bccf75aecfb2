set(JSC_CPU_SOURCES cpu/ffi.cc)
