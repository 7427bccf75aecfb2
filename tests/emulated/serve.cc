// Runs custom calls of the CPU that come on the standard input, as XLA runs them; see tests/helpers/emulated_cpu.py.
//
// A request is words up to the end of a line. Data of operands follow theirs, results follow the answer:
//   loop NAME                      of convolutions from now on, as jsc::SetLoop has it      -> ok
//   isa                            the instruction set in use, and its many_registers       -> ok NAME 0|1
//   call TARGET OPERANDS ATTRIBUTES RESULTS                                                 -> ok | error SENTENCE
//     operand    DTYPE RANK SIZE...      and its data behind the line, in the order of operands
//     attribute  NAME COUNT VALUE...     int64, -1 for one that is no array
//     result     DTYPE RANK SIZE...      and its data behind the answer
// Every buffer ends where memory does that may not be touched, results are NaN before, and floating-point modes are
// those in which XLA runs its threads: subnormals are zeros.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cpu/ffi/handlers.h"
#include "cpu/ffi/host.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

namespace ffi = xla::ffi;

void FlushSubnormals() {
#if defined(__SSE2__)
  _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
  uint64_t modes;
  asm volatile("mrs %0, fpcr" : "=r"(modes));
  asm volatile("msr fpcr, %0" : : "r"(modes | uint64_t{1} << 24));
#endif
}

// --- what XLA gives to handlers ---

class Pool {
 public:
  static constexpr int64_t kThreads = 3;

  Pool() {
    for (int64_t i = 0; i < kThreads; ++i) {
      std::thread([this] { Work(); }).detach();
    }
  }

  // Every third task on the caller's thread, as Eigen's pool does where its queue has no place.
  void Schedule(XLA_FFI_Task* task, void* data) {
    if (++scheduled_ % 3 == 0) return task(data);
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back({task, data});
    ready_.notify_one();
  }

 private:
  struct Task {
    XLA_FFI_Task* run;
    void* data;
  };

  [[noreturn]] void Work() {
    FlushSubnormals();
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      const Task task = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      task.run(task.data);
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> tasks_;
  std::atomic<int64_t> scheduled_{0};
};

Pool& ThePool() {
  static Pool* const pool = new Pool;  // whose threads never end
  return *pool;
}

}  // namespace

struct XLA_FFI_Error {
  std::string message;
};

namespace {

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
  api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
    args->message = args->error->message.c_str();
  };
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
    ThePool().Schedule(args->task, args->data);
    return nullptr;
  };
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
    *args->num_threads = Pool::kThreads;
    return nullptr;
  };
  return api;
}

// --- buffers ---

// Memory whose end is followed by a page that may not be touched.
class Guarded {
 public:
  explicit Guarded(size_t size) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), whole = (size + page - 1) / page * page;
    mapped_ = whole + page;
    base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + whole, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = base_ + whole - size;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  Guarded(Guarded&& other) noexcept
      : size_(other.size_), mapped_(other.mapped_), base_(other.base_), data_(other.data_) {
    other.base_ = nullptr;
  }
  ~Guarded() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }

  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  size_t size_, mapped_;
  char* base_;
  char* data_;
};

struct Described {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> sizes;

  size_t bytes() const {
    size_t all = ffi::ByteWidth(static_cast<ffi::DataType>(dtype));
    for (const int64_t size : sizes) all *= static_cast<size_t>(size);
    return all;
  }
};

struct Attribute {
  std::string name;
  std::vector<int64_t> values;
  bool is_scalar;
};

struct Call {
  std::string target;
  std::vector<Described> operands, results;
  std::vector<Attribute> attributes;
};

int64_t ReadInt() {
  int64_t value = 0;
  std::cin >> value;
  return value;
}

std::vector<int64_t> ReadInts(int64_t count) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(ReadInt());
  return values;
}

std::vector<Described> ReadDescribed() {
  std::vector<Described> all;
  for (int64_t left = ReadInt(); left > 0; --left) {
    const auto dtype = static_cast<XLA_FFI_DataType>(ReadInt());
    const int64_t rank = ReadInt();
    all.push_back({dtype, ReadInts(rank)});
  }
  return all;
}

Call ReadCall() {
  Call call;
  std::cin >> call.target;
  call.operands = ReadDescribed();
  for (int64_t left = ReadInt(); left > 0; --left) {
    Attribute attribute{};
    std::cin >> attribute.name;
    const int64_t count = ReadInt();
    attribute.is_scalar = count < 0;
    attribute.values = ReadInts(attribute.is_scalar ? 1 : count);
    call.attributes.push_back(attribute);
  }
  call.results = ReadDescribed();
  return call;
}

XLA_FFI_Buffer BufferOf(Described& described, const Guarded& memory) {
  return {
      XLA_FFI_Buffer_STRUCT_SIZE, nullptr, described.dtype, memory.data(), static_cast<int64_t>(described.sizes.size()),
      described.sizes.data()};
}

// A call's attributes, by name, which the caller has put in order.
class Attributes {
 public:
  explicit Attributes(std::vector<Attribute>& all) {
    const size_t count = all.size();
    scalars_.resize(count);
    arrays_.resize(count);
    spans_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      Attribute& each = all[i];
      spans_[i] = {each.name.data(), each.name.size()};
      names_.push_back(&spans_[i]);
      scalars_[i] = {XLA_FFI_DataType_S64, each.values.data()};
      arrays_[i] = {XLA_FFI_DataType_S64, each.values.size(), each.values.data()};
      types_.push_back(each.is_scalar ? XLA_FFI_AttrType_SCALAR : XLA_FFI_AttrType_ARRAY);
      values_.push_back(each.is_scalar ? static_cast<void*>(&scalars_[i]) : static_cast<void*>(&arrays_[i]));
    }
  }

  XLA_FFI_Attrs Get() {
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(types_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  std::vector<XLA_FFI_Scalar> scalars_;
  std::vector<XLA_FFI_Array> arrays_;
  std::vector<XLA_FFI_ByteSpan> spans_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
};

// --- requests ---

XLA_FFI_Handler* HandlerOf(const std::string& name) {
  for (const jsc::Target& target : jsc::Targets()) {
    if (target.name == name) return target.handler;
  }
  return nullptr;
}

// The error's message, or nothing.
std::string Run(Call& call, std::vector<Guarded>& operands, std::vector<Guarded>& results) {
  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_Handler* handler = HandlerOf(call.target);
  if (handler == nullptr) return "no target " + call.target;
  std::vector<XLA_FFI_Buffer> buffers;
  buffers.reserve(operands.size() + results.size());
  std::vector<void*> in, out;
  for (size_t i = 0; i < operands.size(); ++i) {
    buffers.push_back(BufferOf(call.operands[i], operands[i]));
    in.push_back(&buffers.back());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    buffers.push_back(BufferOf(call.results[i], results[i]));
    out.push_back(&buffers.back());
  }
  std::vector<XLA_FFI_ArgType> in_types(in.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> out_types(out.size(), XLA_FFI_RetType_BUFFER);
  Attributes attributes(call.attributes);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(in.size()), in_types.data(), in.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(out.size()), out_types.data(), out.data()};
  frame.attrs = attributes.Get();
  XLA_FFI_Error* error = handler(&frame);
  const std::string message = error == nullptr ? "" : error->message.empty() ? "error" : error->message;
  delete error;
  return message;
}

void Answer(const std::string& message) { std::cout << (message.empty() ? "ok" : "error " + message) << '\n'; }

void Serve(Call call) {
  std::vector<Guarded> operands, results;
  for (const Described& operand : call.operands) {
    operands.emplace_back(operand.bytes());
    std::cin.read(operands.back().data(), static_cast<std::streamsize>(operand.bytes()));
  }
  for (const Described& result : call.results) {
    results.emplace_back(result.bytes());
    std::memset(results.back().data(), 0xff, result.bytes());
  }
  const std::string message = Run(call, operands, results);
  Answer(message);
  for (const Guarded& result : results) {
    if (message.empty()) std::cout.write(result.data(), static_cast<std::streamsize>(result.size()));
  }
}

}  // namespace

int main() {
  std::ios::sync_with_stdio(false);
  FlushSubnormals();
  for (std::string request; std::cin >> request;) {
    if (request == "loop") {
      std::string name;
      std::cin >> name;
      Answer(jsc::SetLoop(name) ? "" : "no loop " + name);
    } else if (request == "isa") {
      std::cout << "ok " << jsc::CurrentIsa().name << ' ' << jsc::CurrentIsa().many_registers << '\n';
    } else {
      Call call = ReadCall();
      std::cin.get();  // the end of the line
      Serve(std::move(call));
    }
    std::cout.flush();
  }
  return 0;
}
