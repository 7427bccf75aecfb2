set(JSC_CUDA_SOURCES cuda/conv_plan.cc cuda/dense.cu cuda/device_info.cu cuda/direct.cu cuda/ecr.cu cuda/ffi.cc cuda/kernel_map.cc cuda/pecr.cu)
