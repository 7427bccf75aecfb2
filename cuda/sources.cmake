set(JSC_CUDA_SOURCES cuda/ffi.cc)
