CUDA_BUILT = False
CUDA_REASON = "temporary development stub"
CUDA_ARCHITECTURES = ""
CUDA_COMPILER = ""
CXX_COMPILER = ""
BUILD_TYPE = ""
