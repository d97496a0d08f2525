// A PyTorch backend of another package: the device "brook", in PyTorch's slot PrivateUse1.
//
// A stream is a thread with a queue. Copies between host and device are jobs of the current stream;
// from and to page-locked memory they are asynchronous. Operators compute on the calling thread,
// after the jobs of the current stream (PyTorch's fallback to the CPU). So an operator that is not
// made to wait for a copy on another stream reads bytes that are not there yet.
//
// `late_block` is a kernel: a job of the current stream, which reads its weights when it runs.
// Copies, or kernels, can be late (`set_late`): each runs when somebody waits for it, after all that
// other streams may do before. Results then depend on waits alone, and not on the machine's speed.
//
// The allocator has counters, but no limit. New memory has the bytes of no earlier tensor; while
// kernels are late, it is freed memory of the same size, as on cards.

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kFirst(kDevice, 0);

std::atomic<int64_t> copy_microseconds{0}; // that each copy takes longer
std::atomic<bool> synchronous{false}; // whether copies make the host wait

// Jobs of which streams run as late as their order allows: when somebody waits for them.
enum class Late { kNothing, kCopies, kKernels };
std::atomic<Late> late{Late::kNothing};

struct Event;

// A queue of jobs, and the thread that does them.
class Queue {
 public:
  explicit Queue(bool computes) : computes_(computes) {
    std::thread([this] { work(); }).detach();
  }

  // Returns the number of jobs until this one.
  int64_t push(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_all();
    return ++pushed_;
  }

  // Lets so many jobs run, where they are late otherwise.
  void demand(int64_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    demanded_ = std::max(demanded_, count);
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.empty() && !busy_;
  }

  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    demanded_ = pushed_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return jobs_.empty() && !busy_; });
  }

  // Runs no more jobs until others wait for them, or it waits for an event that is not recorded.
  bool is_settled();
  void wait_for(Event* event, int64_t version);

 private:
  bool is_late() const { return late == (computes_ ? Late::kKernels : Late::kCopies); }
  bool has_work() const { return !jobs_.empty() && (!is_late() || done_ < demanded_); }

  void work() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return has_work(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
        busy_ = true;
      }
      job();
      std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      ++done_;
      changed_.notify_all();
    }
  }

  const bool computes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  int64_t pushed_ = 0, done_ = 0, demanded_ = 0;
  bool busy_ = false;
  Event* event_ = nullptr; // that the current job waits for
  int64_t version_ = 0;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t recorded = 0, passed = 0;
  Queue* queue = nullptr; // of the latest record
  int64_t position = 0; // of that record among its jobs
  Clock::time_point time;

  bool has_passed(int64_t version) {
    std::lock_guard<std::mutex> lock(mutex);
    return passed >= version;
  }
  void wait_for(int64_t version) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return passed >= version; });
  }
};

bool Queue::is_settled() {
  std::lock_guard<std::mutex> lock(mutex_);
  return busy_ ? event_ != nullptr && !event_->has_passed(version_) : !has_work();
}

void Queue::wait_for(Event* event, int64_t version) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    event_ = event;
    version_ = version;
  }
  event->wait_for(version);
  std::lock_guard<std::mutex> lock(mutex_);
  event_ = nullptr;
}

std::mutex streams_mutex;
std::deque<Queue*>& queues() {
  static auto* all = new std::deque<Queue*>{new Queue(true)};
  return *all;
}
thread_local int64_t current_stream = 0;

Queue& queue_of(int64_t number) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  return *queues().at(number);
}

c10::Stream stream_numbered(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kFirst, number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kFirst; }
  c10::Device getDevice() const override { return kFirst; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_numbered(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_numbered(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    queues().push_back(new Queue(false));
    return stream_numbered(static_cast<int64_t>(queues().size()) - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto previous = stream_numbered(current_stream);
    current_stream = stream.id();
    return previous;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream.id()).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    py_free([&] { queue_of(stream.id()).synchronize(); });
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (size_t number = 0; number < queues().size(); ++number) {
      queue_of(static_cast<int64_t>(number)).synchronize();
    }
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* own = static_cast<Event*>(*event);
    auto& queue = queue_of(stream.id());
    std::lock_guard<std::mutex> lock(own->mutex);
    const int64_t version = ++own->recorded;
    own->queue = &queue;
    own->position = queue.push([own, version] {
      std::lock_guard<std::mutex> lock(own->mutex);
      own->passed = version;
      own->time = Clock::now();
      own->changed.notify_all();
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    auto* own = static_cast<Event*>(event);
    auto& queue = queue_of(stream.id());
    std::lock_guard<std::mutex> lock(own->mutex);
    queue.push([own, &queue, version = own->recorded, source = own->queue,
                position = own->position] {
      if (source != nullptr) {
        source->demand(position);
        queue.wait_for(own, version);
      }
    });
  }
  bool queryEvent(void* event) const override {
    auto* own = static_cast<Event*>(event);
    if (own == nullptr) {
      return true;
    }
    std::lock_guard<std::mutex> lock(own->mutex);
    return own->passed == own->recorded;
  }
  void synchronizeEvent(void* event) const override {
    auto* own = static_cast<Event*>(event);
    if (own != nullptr && own->queue != nullptr) {
      own->queue->demand(own->position);
      own->wait_for(own->recorded);
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    return std::chrono::duration<double, std::milli>(to->time - from->time).count();
  }
  // Events are never freed: a queue may still have them.
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

  template <typename Function>
  static void py_free(Function wait) {
    wait();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Device memory is memory of the host, counted.
struct Memory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t nbytes) override;
  at::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto* sums : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      for (auto& sum : *sums) {
        sum.reset_peak();
      }
    }
  }

  void count(int64_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto* sums : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      auto& sum = (*sums)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      nbytes > 0 ? sum.increase(nbytes) : sum.decrease(-nbytes);
    }
  }

  std::mutex mutex;
  std::map<void*, size_t> sizes;
  std::multimap<size_t, void*> cache; // while kernels are late: free memory by its size
  c10::CachingDeviceAllocator::DeviceStats stats;
};

Memory& memory() {
  static auto* allocator = new Memory();
  return *allocator;
}

void free_memory(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  size_t nbytes;
  {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto entry = memory().sizes.find(pointer);
    nbytes = entry->second;
    memory().sizes.erase(entry);
    if (late == Late::kKernels) {
      memory().cache.emplace(nbytes, pointer);
      pointer = nullptr;
    }
  }
  memory().count(-static_cast<int64_t>(nbytes));
  std::free(pointer);
}

at::DataPtr Memory::allocate(size_t nbytes) {
  void* pointer = nullptr;
  if (nbytes > 0) {
    std::unique_lock<std::mutex> lock(mutex);
    if (auto entry = cache.find(nbytes); entry != cache.end()) {
      pointer = entry->second;
      cache.erase(entry);
    } else {
      pointer = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
      TORCH_CHECK(pointer, "brook is out of memory: ", nbytes, " bytes");
    }
    sizes[pointer] = nbytes;
    lock.unlock();
    count(static_cast<int64_t>(nbytes));
    if (late != Late::kKernels) { // no job still reads the memory
      std::memset(pointer, 0x5a, nbytes);
    }
  }
  return {pointer, pointer, &free_memory, kFirst};
}

at::DeleterFnPtr Memory::raw_deleter() const {
  return &free_memory;
}

std::mutex pinned_mutex;
std::map<const char*, size_t>& pinned_ranges() {
  static auto* ranges = new std::map<const char*, size_t>();
  return *ranges;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto* begin = static_cast<const char*>(pointer);
  auto entry = pinned_ranges().upper_bound(begin);
  if (entry == pinned_ranges().begin()) {
    return false;
  }
  --entry;
  return begin < entry->first + entry->second;
}

void free_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges().erase(static_cast<const char*>(pointer));
  }
  std::free(pointer);
}

struct PinnedMemory final : at::HostAllocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* pointer = nbytes ? std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096) : nullptr;
    if (pointer != nullptr) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_ranges()[static_cast<const char*>(pointer)] = nbytes;
    }
    return {pointer, pointer, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory& pinned_memory() {
  static auto* allocator = new PinnedMemory();
  return *allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void*) const override { return kFirst; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto bytes = memory().allocate(nbytes);
    queue_of(current_stream).synchronize();
    std::memcpy(bytes.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(bytes));
    storage.set_nbytes(nbytes);
  }
};

// ---- Operators

// The same bytes as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& queue = queue_of(current_stream);
  const bool is_transfer = source.is_cpu() != target.is_cpu();
  const bool is_flat = source.is_contiguous() && target.is_contiguous() &&
      source.dtype() == target.dtype() && source.sizes() == target.sizes() &&
      source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg();
  if (is_transfer && is_flat) {
    const void* from = source.data_ptr();
    void* to = target.data_ptr();
    const size_t nbytes = source.nbytes();
    queue.push([from, to, nbytes] {
      if (const auto delay = copy_microseconds.load()) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      std::memcpy(to, from, nbytes);
    });
    const void* host = source.is_cpu() ? from : to;
    if (!non_blocking || synchronous || !is_pinned(host)) {
      queue.synchronize();
    }
    return target;
  }
  queue.synchronize();
  auto result = on_cpu(target);
  at::native::copy_(result, on_cpu(source), false);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                       C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Scalar item(const at::Tensor& self) {
  queue_of(current_stream).synchronize();
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  queue_of(current_stream).synchronize();
  const bool has_bias = bias.has_value() && bias->defined();
  return at::convolution_symint(on_cpu(input), on_cpu(weight),
                                has_bias ? std::optional<at::Tensor>(on_cpu(*bias)) : std::nullopt,
                                stride, padding, dilation, transposed, output_padding, groups)
      .to(kFirst);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  queue_of(current_stream).synchronize();
  at::native::cpu_fallback(op, stack);
}

// Waits until other streams have done all that their order allows.
void settle(const Queue& queue) {
  for (size_t number = 0; number < queues().size(); ++number) {
    auto& other = queue_of(static_cast<int64_t>(number));
    while (&other != &queue && !other.is_settled()) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

// x + project(relu(expand(x))) * gain, of a block of the tests' small component. As on a card, the
// job has addresses and no references: tensors are freed before it runs.
at::Tensor late_block(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const at::Tensor& projection, const at::Tensor& gain) {
  auto result = at::empty_like(x);
  auto target = on_cpu(result);
  auto& queue = queue_of(current_stream);
  queue.push([=, &queue, x = on_cpu(x), weight = on_cpu(weight), bias = on_cpu(bias),
              projection = on_cpu(projection), gain = on_cpu(gain)] {
    at::InferenceMode without_gradients;
    settle(queue);
    auto inner = at::relu(at::linear(x, weight, bias));
    target.copy_(x + at::linear(inner, projection) * gain);
  });
  if (late != Late::kKernels) {
    queue.synchronize(); // freed memory is not kept
  }
  return result;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_local_scalar_dense", item);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("unfold", at::native::unfold);
  library.impl("convolution_overrideable", convolution);
  // the CPU's kernels, whose bits other forms do not have
  for (auto name : {"scaled_dot_product_attention", "linear", "_fused_rms_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kDevice, &memory());
  at::setHostAllocator(kDevice, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("set_copy_microseconds", [](int64_t value) { copy_microseconds = value; });
  module.def("set_late", [](const std::string& jobs) {
    late = jobs == "copies" ? Late::kCopies : jobs == "kernels" ? Late::kKernels : Late::kNothing;
  });
  module.def("late_block", &late_block);
  module.def("set_synchronous", [](bool value) { synchronous = value; });
}
