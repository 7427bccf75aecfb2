# The planners: host code that needs no CUDA, part of both the CUDA extension and the binding that Python asks.
set(JSC_PLANNER_SOURCES
    cuda/chain/call.cc
    cuda/chain/limits.cc
    cuda/chain/pair_plan.cc
    cuda/chain/plans.cc
    cuda/core/model.cc
    cuda/dense_conv/plan/choice.cc
    cuda/dense_conv/plan/few_channels_plan.cc
    cuda/dense_conv/plan/grouped_plan.cc
    cuda/dense_conv/plan/mma_plan.cc
    cuda/dense_conv/plan/splitk_channels_plan.cc
    cuda/dense_conv/plan/wgmma_model.cc
    cuda/dense_conv/plan/wgmma_plan.cc
    cuda/densenet/limits.cc
    cuda/sparse/coo/plan.cc
    cuda/sparse/ecr/plan.cc
    cuda/training/kernel_gradient_plan.cc)
set(JSC_CUDA_SOURCES
    cuda/chain/chain.cu
    cuda/chain/pair_buffers.cc
    cuda/core/device_info.cu
    cuda/core/tensor_map.cc
    cuda/dense_conv/dense_conv.cu
    cuda/dense_conv/splitk_channels/maps.cc
    cuda/dense_conv/wgmma/maps.cc
    cuda/densenet/block.cu
    cuda/densenet/block_call.cc
    cuda/densenet/layers_plan.cc
    cuda/ffi/coo_handlers.cc
    cuda/ffi/ffi.cc
    cuda/sparse/adaptive.cc
    cuda/sparse/coo/coo.cu
    cuda/sparse/coo/coo_star.cu
    cuda/sparse/coo/stored.cu
    cuda/sparse/ecr/ecr.cu
    cuda/sparse/ecr/kernel_map.cc
    cuda/sparse/ecr/pecr.cu
    cuda/sparse/ecr/plan_cache.cc
    cuda/sparse/matvec/row.cu
    cuda/sparse/matvec/rows.cu
    cuda/sparse/per_output.cu
    cuda/training/kernel_gradient_call.cc)
# Hopper's warpgroup products (wgmma): compiled for sm_90a alone.
set(JSC_WGMMA_SOURCES
    cuda/chain/pair.cu
    cuda/dense_conv/wgmma/highest.cu
    cuda/densenet/layers.cu
    cuda/training/kernel_gradient.cu)

# A translation unit for each engine of the dense convolution and each element type, so that they compile in parallel.
# `operand` is what the engine's launch function takes between plan and stream.
function(jsc_instantiate sources engine header operand)
  foreach(type IN LISTS ARGN)
    get_filename_component(folder "${header}" DIRECTORY)
    set(unit "${CMAKE_CURRENT_BINARY_DIR}/instantiate/${folder}_${type}.cu")
    configure_file(cuda/instantiate.cu.in "${unit}" @ONLY)
    list(APPEND ${sources} "${unit}")
  endforeach()
  set(${sources} "${${sources}}" PARENT_SCOPE)
endfunction()
set(JSC_ELEMENT_TYPES float __nv_bfloat16 __half)
jsc_instantiate(JSC_CUDA_SOURCES FewChannels few_channels/kernel.cuh "" ${JSC_ELEMENT_TYPES})
jsc_instantiate(JSC_CUDA_SOURCES Grouped grouped/kernel.cuh "" ${JSC_ELEMENT_TYPES})
jsc_instantiate(JSC_CUDA_SOURCES Mma mma/launch.cuh "void*, " ${JSC_ELEMENT_TYPES})
jsc_instantiate(JSC_CUDA_SOURCES SplitKChannels splitk_channels/kernel.cuh "const SplitKChannelsMaps&, " float)
jsc_instantiate(JSC_WGMMA_SOURCES Wgmma wgmma/kernel.cuh "const Tf32x3Maps&, " ${JSC_ELEMENT_TYPES})
