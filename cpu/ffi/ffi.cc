// The Python module that hands the custom calls of the CPU to JAX, and answers about this machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/core/caches.h"
#include "cpu/core/machine_limits.h"
#include "cpu/ffi/dense_block.h"
#include "cpu/ffi/handlers.h"
#include "cpu/ffi/host.h"
#include "cpu/plan/plan.h"
#include "native/call.h"
#include "native/layer.h"

namespace jsc {
namespace {

nanobind::dict Registrations() {
  nanobind::dict targets;
  for (const Target& target : Targets()) {
    targets[target.name] = nanobind::capsule(reinterpret_cast<void*>(target.handler));
  }
  return targets;
}

}  // namespace
}  // namespace jsc

NB_MODULE(_cpu, m) {
  m.def("registrations", &jsc::Registrations, "Custom call targets by name, for jax.ffi.register_ffi_target.");
  m.def("isa", [] { return std::string(jsc::CurrentIsa().name); }, "The instruction set in use.");
  m.def("many_registers", [] { return jsc::CurrentIsa().many_registers; }, "Whether it has 32 of vectors, not 16.");
  m.def(
      "why_no_dense_block",
      [](int64_t images, int64_t height, int64_t width, int64_t channels, int64_t layers, int64_t middle,
         int64_t growth, int64_t out_channels, bool pairs) {
        return jsc::WhyNotOnCpu({images, {height, width}, channels, layers, middle, growth, out_channels}, pairs);
      },
      "Why a dense block of x [images, height, width, channels] cannot be one call, or nothing.");
  m.def("multiplies_pairs", &jsc::MultipliesPairs,
        "Whether the processor multiplies pairs of bfloat16, and it is used.");
  m.def("multiplies_tiles", &jsc::MultipliesTiles, "Whether it multiplies tiles of them, by AMX.");
  m.def("isas", &jsc::AvailableIsas, "The instruction sets this machine can run, best first.");
  m.def("cache_bytes", &jsc::CacheBytesOfThread, nanobind::arg("level"),
        "Bytes of L1 or L2 that plans take for a thread's.");
  m.def("processors_in_list", &jsc::ProcessorsInList, nanobind::arg("list"),
        "How many processors a list of Linux names.");
  m.def(
      "measure_limits",
      [] {
        const jsc::Limits limits = jsc::MeasureLimits();
        nanobind::dict values;
        values["threads"] = limits.threads;
        values["flops"] = limits.flops;
        values["loaded_flops"] = limits.loaded_flops;
        values["cache_bytes_per_second"] = limits.cache_bytes;
        values["memory_bytes_per_second"] = limits.memory_bytes;
        return values;
      },
      "What the cores can do together at most, see machine_limits.h: for benchmarks.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (jsc::SetIsa(name)) return;
        std::string message = "isa='" + name + "' is not one of";
        for (const std::string& available : jsc::AvailableIsas()) message += " " + available;
        throw nanobind::value_error(message.c_str());
      },
      nanobind::arg("name"), "Use this instruction set from now on: for tests.");
  m.def(
      "plan",
      [](const std::vector<int64_t>& layer, const std::vector<int64_t>& pool, int64_t accumulator_bytes,
         bool may_be_dense, double density, const std::vector<int64_t>& machine, bool pairs) {
        if (machine.size() != 4) throw nanobind::value_error("machine must have 4 entries");
        jsc::ConvCall call{};
        call.args = jsc::ArgsOfLayer(layer, pool, true);
        call.kernel = &call;  // there is one
        call.may_be_dense = may_be_dense;
        const bool many_registers = machine[2] == 64;  // as AVX-512 has them
        const jsc::Machine described{machine[0], machine[1], machine[2], machine[3], many_registers, pairs};
        call.dtype = pairs ? jsc::DataType::BF16 : jsc::DataType::F32;
        const jsc::ConvPlan plan = jsc::ChoosePlan(call, described, accumulator_bytes, density);
        return nanobind::make_tuple(jsc::LoopName(plan), plan.block, plan.windows, plan.tile_rows, plan.task_blocks);
      },
      nanobind::arg("layer"), nanobind::arg("pool"), nanobind::arg("accumulator_bytes"), nanobind::arg("may_be_dense"),
      nanobind::arg("density"), nanobind::arg("machine"), nanobind::arg("pairs"),
      "(loop, block, windows, tile rows, task blocks) of a layer on a machine: bytes of L1, L2 and a vector, threads. "
      "With pairs the layer is of bfloat16, and the processor multiplies pairs of it.");
  m.def(
      "set_loop",
      [](const std::string& name) {
        if (jsc::SetLoop(name)) return;
        throw nanobind::value_error(("loop='" + name + "' is none of auto and plan/plan_choice.cc").c_str());
      },
      nanobind::arg("name"),
      "Run convolutions by this loop of plan/plan_choice.cc from now on, where it can: for tests.");
}
