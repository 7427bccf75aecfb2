# Target jsc_model: the constants of jax_sparse_conv/_src/dispatch/model.json as the C++ header model_constants.h, in
# the folder JSC_GENERATED of the build. `python` runs the script, `root` is the repository's.
function(jsc_model_header python root)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/generated")
  set(model "${root}/jax_sparse_conv/_src/dispatch/model.json")
  set(script "${root}/cmake/model_header.py")
  file(MAKE_DIRECTORY "${folder}")
  add_custom_command(OUTPUT "${folder}/model_constants.h"
                     COMMAND "${python}" "${script}" "${model}" "${folder}/model_constants.h"
                     DEPENDS "${model}" "${script}")
  add_custom_target(jsc_model DEPENDS "${folder}/model_constants.h")
  set(JSC_GENERATED "${folder}" PARENT_SCOPE)
endfunction()
