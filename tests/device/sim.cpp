// "sim": an accelerator whose memory is the host's and whose kernels are the CPU's.
//
// Everything runs at once, on the thread that calls: streams and events are names, and an order that
// only the watcher (order.py) looks at. It is told of each operation with the memory that it reads
// and writes, of each event, each wait, each block of memory. So the numbers are those of the CPU,
// bit by bit, and an error of order is found whether or not a race would be lost.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <mutex>

namespace sim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kCount = 2;

// ---- The watcher: a Python object, or none -------------------------------------------------------

static std::atomic<bool> watched{false};
static py::handle watcher;
static thread_local bool telling = false;
void tell_of_freed();

struct Telling {
  bool before = std::exchange(telling, true);
  ~Telling() { telling = before; }
};

template <class T>
decltype(auto) told(const T& x) {
  if constexpr (std::is_same_v<T, Stream>) return py::make_tuple(int(x.device_index()), x.id());
  else return (x);
}

template <class... Args>
void tell(const char* what, const Args&... args) {
  if (!watched) return;
  py::gil_scoped_acquire gil;
  tell_of_freed();
  Telling now;
  if (watcher) watcher(what, told(args)...);
}

// ---- Memory: blocks of the device, and pinned blocks of the host ---------------------------------

struct Block {
  int64_t id;
  size_t size;
  DeviceIndex index;  // -1: pinned memory of the host
};
static std::mutex mutex;
static std::map<uintptr_t, Block> blocks;  // those that are alive, by address
static std::vector<std::pair<void*, int64_t>> freed;  // whose bytes are there until the watcher knows
static int64_t last_block = 0;
static c10::CachingDeviceAllocator::DeviceStats stats[kCount];

std::optional<std::pair<uintptr_t, Block>> block_at(const void* p) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (after == blocks.begin()) return std::nullopt;
  auto found = *std::prev(after);
  if (reinterpret_cast<uintptr_t>(p) >= found.first + found.second.size) return std::nullopt;
  return found;
}

void count(const Block& block, bool more) {
  if (block.index < 0) return;
  auto& now = stats[block.index];
  for (auto* of : {&now.allocated_bytes, &now.requested_bytes, &now.active_bytes, &now.reserved_bytes})
    more ? (*of)[0].increase(block.size) : (*of)[0].decrease(block.size);
  for (auto* of : {&now.allocation, &now.active})
    more ? (*of)[0].increase(1) : (*of)[0].decrease(1);
}

// Before anything else is told, and never in the midst of a telling, which may be looking at the
// bytes: a collection frees memory wherever Python makes an object.
void tell_of_freed() {
  while (!telling) {
    std::pair<void*, int64_t> one;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (freed.empty()) return;
      one = freed.back();
      freed.pop_back();
    }
    py::error_scope kept;  // of an exception that is under way
    try {
      Telling now;
      if (watcher) watcher("freed", one.second);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("sim: a block is freed");
    }
    std::free(one.first);
  }
}

void free_block(void* p) {
  bool known = watched;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto block = blocks.at(reinterpret_cast<uintptr_t>(p));
    blocks.erase(reinterpret_cast<uintptr_t>(p));
    count(block, false);
    if (known) freed.emplace_back(p, block.id);
  }
  if (!known) return std::free(p);
  if (telling) return;
  py::gil_scoped_acquire gil;
  tell_of_freed();
}

c10::DataPtr new_block(size_t size, Device where) {
  if (size == 0) return {nullptr, where};
  void* p = nullptr;
  TORCH_CHECK(posix_memalign(&p, 64, size) == 0, "sim: no memory for ", size, " bytes");
  Block block{0, size, where.type() == kSim ? where.index() : DeviceIndex(-1)};
  {
    std::lock_guard<std::mutex> lock(mutex);
    block.id = ++last_block;
    blocks[reinterpret_cast<uintptr_t>(p)] = block;
    count(block, true);
  }
  if (watched) {
    std::memset(p, 0xff, size);  // NaN: who reads what was never written sees it
    auto impl = c10::impl::getDeviceGuardImpl(kSim);
    auto stream = impl->getStream(Device(kSim, block.index < 0 ? impl->getDevice().index() : block.index));
    tell("allocated", block.id, int(block.index), stream, reinterpret_cast<uintptr_t>(p), size);
  }
  return {p, p, &free_block, where};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    return new_block(size, c10::impl::getDeviceGuardImpl(kSim)->getDevice());
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (auto found = block_at(data.get())) tell("stream_recorded", found->second.id, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override { return stats[i]; }
  void resetAccumulatedStats(DeviceIndex i) override { each(i, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(DeviceIndex i) override { each(i, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    size_t all = size_t(1) << 36, used = stats[i].allocated_bytes[0].current;
    return {all - used, all};
  }
  template <class F>
  void each(DeviceIndex i, F f) {
    auto& now = stats[i];
    for (auto* of : {&now.allocated_bytes, &now.requested_bytes, &now.active_bytes,
                     &now.reserved_bytes, &now.allocation, &now.active})
      f((*of)[0]);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return new_block(size, Device(c10::kCPU)); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};

static Allocator allocator;
static PinnedAllocator pinned;
REGISTER_ALLOCATOR(kSim, &allocator)

// ---- Devices, streams and events -----------------------------------------------------------------

static thread_local DeviceIndex current = 0;
static thread_local int64_t current_stream[kCount] = {0, 0};
static std::atomic<int64_t> last_stream{0}, last_event{0};

struct Event {
  int64_t id;
  std::chrono::steady_clock::time_point when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return {kSim, current}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kCount, "sim: there is no device ", d, ", only ", int(kCount));
    if (d.index() >= 0) current = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  DeviceIndex at(Device d) const { return d.index() < 0 ? current : d.index(); }

  Stream getStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(kSim, at(d)), current_stream[at(d)]);
  }
  Stream getDefaultStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(kSim, at(d)), 0);
  }
  Stream getNewStream(Device d, int) const override {
    return Stream(Stream::UNSAFE, Device(kSim, at(d)), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const Stream& s) const override { return tell("stream_synchronized", s, true), true; }
  void synchronizeStream(const Stream& s) const override { tell("stream_synchronized", s, false); }
  void synchronizeDevice(DeviceIndex i) const override {
    tell("device_synchronized", int(i < 0 ? current : i));
  }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event{++last_event, {}};
    auto* e = static_cast<Event*>(*event);
    e->when = std::chrono::steady_clock::now();
    tell("event_recorded", e->id, s);
  }
  void block(void* event, const Stream& s) const override {
    if (event) tell("event_awaited", static_cast<Event*>(event)->id, s);
  }
  bool queryEvent(void* event) const override {
    if (event) tell("event_synchronized", static_cast<Event*>(event)->id, true);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) tell("event_synchronized", static_cast<Event*>(event)->id, false);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    auto between = static_cast<Event*>(b)->when - static_cast<Event*>(a)->when;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    allocator.recordStream(data, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Random numbers: a generator of the CPU for each device --------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();
  explicit Generator(DeviceIndex i) : GeneratorImpl({kSim, i}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t o) override { cpu.set_offset(o); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kSim; }
  Generator* clone_impl() const override {
    auto* other = new Generator(device().index());
    other->cpu = cpu.clone();
    return other;
  }
};

const at::Generator& default_generator(DeviceIndex i) {
  static std::vector<at::Generator> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(i < 0 ? current : i);
}

at::Generator& cpu_of(const at::Generator& g) { return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kCount; }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice({kSim, i}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return Guard().exchangeDevice({kSim, i}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  bool isPinnedPtr(const void* p) const override {
    auto found = block_at(p);
    return found && found->second.index < 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  Device getDeviceFromPtr(void* p) const override {
    auto found = block_at(p);
    TORCH_CHECK(found && found->second.index >= 0, "sim: this memory is not on the device");
    return {kSim, found->second.index};
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t size) const override {
    c10::DeviceGuard guard(s.device());
    at::native::resize_bytes_cpu(s.unsafeGetStorageImpl(), size);
  }
};

// ---- What an operation reads and writes ----------------------------------------------------------

struct Accesses {
  py::list all;
  void add(const Tensor& t, bool write, bool only_pinned = false) {
    if (!t.defined() || t.numel() == 0 || !t.has_storage()) return;
    auto found = block_at(t.storage().data());
    if (!found || (only_pinned && found->second.index >= 0)) return;  // pageable memory of the host
    auto first = reinterpret_cast<uintptr_t>(t.storage().data()) - found->first;
    auto item = int64_t(t.element_size());
    all.append(py::make_tuple(found->second.id, int64_t(first) + t.storage_offset() * item, item,
                              py::tuple(py::cast(t.sizes().vec())), py::tuple(py::cast(t.strides().vec())), write));
  }
};

void note(const std::string& name, Device where, const std::vector<std::pair<Tensor, bool>>& used) {
  if (!watched) return;
  py::gil_scoped_acquire gil;
  Accesses accesses;
  for (auto& [t, write] : used) accesses.add(t, write);
  tell("ran", name, Guard().getStream(where), accesses.all);
}

void host_waits(const std::string& name, Device where) {
  tell("host_waited", name, Guard().getStream(where));
}

// ---- Kernels: those of the CPU, on the memory of the device --------------------------------------

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// The tensor as one of the CPU, of the same memory, which it keeps alive.
Tensor host(const Tensor& t) {
  if (!is_sim(t)) return t;
  auto* owner = new c10::Storage(t.storage());
  c10::DataPtr data(const_cast<void*>(owner->data()), owner,
                    [](void* p) { delete static_cast<c10::Storage*>(p); }, Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  out._set_conj(t.is_conj());
  out._set_neg(t.is_neg());
  return out;
}

// What a kernel made, as a tensor of the device.
Tensor moved(const Tensor& made, Device where) {
  if (!made.defined()) return made;
  auto out = at::empty_strided(made.sizes(), made.strides(), made.options().device(where).pinned_memory(false));
  host(out).copy_(made);
  return out;
}

// A view of `base`, as a kernel made it of the memory of the host.
Tensor like_view(const Tensor& base, const Tensor& made) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), made.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
  out._set_conj(made.is_conj());
  out._set_neg(made.is_neg());
  return out;
}

// What the host must know the result of, or the shape of it.
bool waits(const std::string& name, const std::vector<std::pair<Tensor, bool>>& used) {
  static const std::set<std::string> names{
      "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::_linalg_check_errors"};
  if (names.count(name.substr(0, name.find(".out")))) return true;
  if (name.rfind("aten::_index_put_impl_", 0) == 0 && used.back().first.numel() > 1)  // by a mask: as many as are true
    for (size_t i = 1; i + 1 < used.size(); ++i)
      if (used[i].first.scalar_type() == at::kBool) return true;
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const size_t n = schema.arguments().size(), first = stack->size() - n;
  const std::vector<c10::IValue> args(stack->begin() + first, stack->end());

  // Where it runs, and whether all tensors are there.
  std::optional<Device> where;
  std::vector<std::pair<Tensor, bool>> used;
  auto each = [&](auto f) {
    for (size_t i = 0; i < n; ++i) {
      auto* alias = schema.arguments()[i].alias_info();
      bool write = alias && alias->isWrite();
      if (args[i].isTensor() && args[i].toTensor().defined()) f(args[i].toTensor(), write);
      if (args[i].isList())
        for (const c10::IValue& v : args[i].toListRef())
          if (v.isTensor() && v.toTensor().defined()) f(v.toTensor(), write);
    }
  };
  each([&](const Tensor& t, bool write) {
    used.emplace_back(t, write);
    if (is_sim(t) && !where) where = t.device();
  });
  for (auto& v : args)
    if (v.isDevice() && v.toDevice().type() == kSim && !where) where = v.toDevice();
  if (!where) where = Device(kSim, current);
  if (where->index() < 0) where->set_index(current);
  bool by_index = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put_impl_", 0) == 0;
  for (auto& [t, write] : used) {
    bool number = t.is_cpu() && t.dim() == 0 && !write && name.rfind("aten::_fused", 0) != 0;
    bool moves = by_index && t.is_cpu() && !write;
    TORCH_CHECK(t.device() == *where || number || moves, "Expected all tensors to be on the same device, but ",
                name, " got one on ", *where, " and one on ", t.device(), " of shape ", t.sizes());
    if (moves && !number) host_waits(name + " with an index of the host", *where);
  }
  c10::DeviceGuard guard(*where);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  bool waited = waits(name, used);

  // The same arguments on the host.
  std::vector<std::pair<Tensor, Tensor>> written;  // of the device, of the host
  bool takes_generator = false;
  auto lower = [&](const Tensor& t, bool write) {
    auto out = host(t);
    if (write) written.emplace_back(t, out);
    return out;
  };
  stack->erase(stack->begin() + first, stack->end());
  for (size_t i = 0; i < n; ++i) {
    const auto& v = args[i];
    auto* alias = schema.arguments()[i].alias_info();
    bool write = alias && alias->isWrite();
    if (v.isTensor()) {
      stack->emplace_back(v.toTensor().defined() ? c10::IValue(lower(v.toTensor(), write)) : v);
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(lower(t, write));
      stack->emplace_back(std::move(list));
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
        list.push_back(t && t->defined() ? std::optional<Tensor>(host(*t)) : t);
      stack->emplace_back(std::move(list));
    } else if (v.isDevice() && v.toDevice().type() == kSim) {
      stack->emplace_back(Device(c10::kCPU));
    } else if (schema.arguments()[i].name() == "generator") {
      takes_generator = true;
      stack->emplace_back(cpu_of(v.isNone() ? default_generator(where->index()) : v.toGenerator()));
    } else {
      stack->emplace_back(v);
    }
  }

  // A kernel that draws from the CPU's generator without being given one draws from the device's.
  std::optional<Tensor> saved;
  auto usual = at::detail::getDefaultCPUGenerator();
  auto ours = cpu_of(default_generator(where->index()));
  if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
    saved = usual.get_state();
    usual.set_state(ours.get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (saved) {
    ours.set_state(usual.get_state());
    usual.set_state(*saved);
  }
  for (auto& [of_device, of_host] : written)  // `out=` of another shape
    if (is_sim(of_device) && of_host.storage().data() != of_device.storage().data()) {
      of_device.resize_(of_host.sizes());
      host(of_device).copy_(of_host);
    }

  // The results: what was written in place is the argument, a view is one, all else is new.
  const size_t m = schema.returns().size(), begin = stack->size() - m;
  for (size_t j = 0; j < m; ++j) {
    c10::IValue& v = (*stack)[begin + j];
    auto* alias = schema.returns()[j].alias_info();
    const c10::IValue* source = nullptr;
    for (size_t i = 0; alias && i < n && !source; ++i) {
      auto* given = schema.arguments()[i].alias_info();
      if (given && given->beforeSets() == alias->beforeSets()) source = &args[i];
    }
    auto raise_one = [&](const Tensor& t) {
      if (source && source->isTensor() && alias && !alias->isWrite()) return like_view(source->toTensor(), t);
      auto out = moved(t, *where);
      used.emplace_back(out, true);
      return out;
    };
    if (source && alias->isWrite()) {
      v = *source;
    } else if (v.isTensor()) {
      v = raise_one(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(raise_one(t));
      v = std::move(list);
    }
  }
  bool is_view = m && schema.returns()[0].alias_info() && !schema.returns()[0].alias_info()->isWrite();
  if (!is_view) note(name, *where, used);
  if (waited) host_waits(name, *where);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_of_storage(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, stride.empty() && !size.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(stride));
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t n = int64_t(source.nbytes() / self.itemsize());
  return set_of_storage(self, source, 0, {n}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_of_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_of_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {1});
}

at::Scalar local_scalar_dense(const Tensor& self) {
  note("aten::_local_scalar_dense", self.device(), {{self, false}});
  host_waits("item", self.device());
  return at::_local_scalar_dense(host(self));
}

void wait_between(const Stream& waits, const Stream& first) {
  void* event = nullptr;
  Guard().record(&event, first, -1, c10::EventFlag::PYTORCH_DEFAULT);
  Guard().block(event, waits);
  Guard().destroyEvent(event, -1);
}

// As CUDA copies: between devices on the stream of the source, with waits at both ends; from and to
// the host on the stream of the device, and unless told otherwise the host waits for it.
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  for (auto* t : {&self, &dst})
    if (auto found = block_at(t->storage().data()); found && found->second.index < 0) tell("used_by_copy", found->second.id, t == &dst);
  auto where = is_sim(self) ? self.device() : dst.device();
  bool to_other = is_sim(self) && is_sim(dst) && self.device() != dst.device();
  if (to_other) wait_between(Guard().getStream(where), Guard().getStream(dst.device()));
  {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    host(dst).copy_(host(self));
  }
  note("aten::copy_", where, {{self, false}, {dst, true}});
  if (to_other) wait_between(Guard().getStream(dst.device()), Guard().getStream(where));
  if (is_sim(self) != is_sim(dst)) {
    const Tensor& of_host = is_sim(self) ? dst : self;
    if (!non_blocking) {
      host_waits(is_sim(self) ? "copy to the host" : "copy from the host", where);
    } else if (watched) {
      py::gil_scoped_acquire gil;
      // Of another dtype or layout, it goes through memory that is not pinned.
      bool direct = self.dtype() == dst.dtype() && (self.is_contiguous() || self.strides() == dst.strides());
      Accesses accesses;
      accesses.add(of_host, is_sim(self));
      tell("copied", is_sim(self), direct && of_host.is_pinned(), Guard().getStream(where), reinterpret_cast<uintptr_t>(of_host.data_ptr()), accesses.all);
    }
  }
  return dst;
}

void record_stream(Tensor& self, Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

// As the CPU has it: elsewhere torch takes native_dropout, which rounds otherwise.
Tensor dropout(const Tensor& input, double p, bool train) {
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros_like(input));
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

// Of recurrent cells torch asks all devices but the CPU for one kernel: here the CPU's operators.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& x, const Tensor& h, const Tensor& c, const std::optional<Tensor>& b, const std::optional<Tensor>& d) {
  auto gates = ((b ? x + *b : x) + (d ? h + *d : h)).chunk(4, 1);
  auto cy = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * cy.tanh(), cy, at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& x, const Tensor& h, const Tensor& hx, const std::optional<Tensor>& b, const std::optional<Tensor>& d) {
  auto of_x = (b ? x + *b : x).chunk(3, 1), of_h = (d ? h + *d : h).chunk(3, 1);
  auto fresh = (of_x[2] + (of_x[0] + of_h[0]).sigmoid() * of_h[2]).tanh();
  return {(hx - fresh) * (of_x[1] + of_h[1]).sigmoid() + fresh, at::empty({0}, x.options())};
}

// The CPU has it for floats alone, and models ask other devices for it of whole numbers.
Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  auto own = host(x);
  auto floats = at::isIntegralType(own.scalar_type(), true) ? own.to(at::kDouble) : own;
  auto out = moved(at::histc(floats, bins, low, high).to(x.scalar_type()), x.device());
  note("aten::histc", x.device(), {{x, false}, {out, true}});
  return out;
}

Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, c10::IntArrayRef stride, c10::IntArrayRef padding,
                   c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto out = moved(at::convolution(host(x), host(w), b ? host(*b) : Tensor(), stride, padding, dilation, transposed, output_padding, groups), x.device());
  note("aten::convolution", x.device(), {{x, false}, {w, false}, {b.value_or(Tensor()), false}, {out, true}});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& dy, const Tensor& x, const Tensor& w, c10::IntArrayRef stride,
                                                        c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  int64_t channels = dy.size(1);
  auto [a, b, c] = at::convolution_backward(host(dy), host(x), host(w), at::OptionalIntArrayRef(c10::IntArrayRef(channels)), stride, padding, dilation, transposed, output_padding, groups, mask);
  auto out = std::make_tuple(moved(a, x.device()), moved(b, x.device()), moved(c, x.device()));
  note("aten::convolution_backward", x.device(), {{dy, false}, {x, false}, {w, false}, {std::get<0>(out), true}, {std::get<1>(out), true}, {std::get<2>(out), true}});
  return out;
}

int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double p, bool causal,
                         std::optional<double> scale, bool grouped) {
  std::optional<Tensor> of_host;
  if (mask) of_host = host(*mask).requires_grad_(mask->requires_grad());
  auto same = [](const Tensor& t) { return host(t).requires_grad_(t.requires_grad()); };
  return at::_fused_sdp_choice(same(q), same(k), same(v), of_host, p, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_of_storage);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", record_stream);
  // These have a kernel of the CPU, and another of small operators for all other devices.
  for (auto* name : {"addr", "addr.out", "native_group_norm", "native_layer_norm", "linalg__powsum", "mish_backward", "silu_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("dropout", dropout);
  m.impl("histc", histc);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", dropout);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}

// ---- Autocast: the lists of PyTorch for accelerators, boxed --------------------------------------

namespace sim {
enum class Cast { lower, fp32, dtype, widest };

template <Cast cast>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  auto to = cast == Cast::fp32 ? at::kFloat : at::autocast::get_autocast_dtype(kSim);
  auto each = [&](auto f) {
    for (size_t i = first; i < stack->size(); ++i) {
      c10::IValue& v = (*stack)[i];
      if (v.isTensor()) v = f(v.toTensor());
      else if (v.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& t : v.toTensorVector()) list.push_back(f(t));
        v = std::move(list);
      }
    }
  };
  if (cast == Cast::dtype) {  // where the caller chose none, of what is cast elsewhere
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone() && at::autocast::is_eligible((*stack)[first].toTensor(), kSim))
        (*stack)[first + i] = at::kFloat;
  } else {
    if (cast == Cast::widest)
      each([&](const Tensor& t) {
        if (at::autocast::is_eligible(t, kSim) && t.scalar_type() == at::kFloat) to = at::kFloat;
        return t;
      });
    each([&](const Tensor& t) { return at::autocast::cached_cast(to, t, kSim); });
  }
  op.callBoxed(stack);
}

std::string dotted(std::string name) {
  auto comma = name.find(',');
  return comma == name.npos ? name : name.substr(0, comma) + "." + name.substr(name.find_first_not_of(" ", comma + 1));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_CAST(kind, ...) m.impl(dotted(#__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kind>>());
#define SIM_LOWER(...) SIM_CAST(lower, __VA_ARGS__)
#define SIM_FP32(...) SIM_CAST(fp32, __VA_ARGS__)
#define SIM_DTYPE(...) SIM_CAST(dtype, __VA_ARGS__)
#define SIM_WIDEST(...) SIM_CAST(widest, __VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_DTYPE)
  AT_FORALL_PROMOTE(SIM_WIDEST)
}
}  // namespace sim

// ---- c10d: a backend and works whose methods are Python's (backend.py) ---------------------------

namespace sim {
using namespace c10d;
using Works = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;

struct PyWork final : Work {
  py::object inner;
  explicit PyWork(py::object o) : inner(std::move(o)) {}
  ~PyWork() override {
    py::gil_scoped_acquire gil;
    inner = py::object();
  }
  bool wait(std::chrono::milliseconds) override {
    py::gil_scoped_acquire gil;
    inner.attr("wait")();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override {
    py::gil_scoped_acquire gil;
    return inner.attr("is_completed")().cast<bool>();
  }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override {
    py::gil_scoped_acquire gil;
    return inner.attr("outputs").cast<Tensors>();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<Device> devices{{kSim, 0}, {kSim, 1}};
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(result()));
    return future;
  }
};

struct PyBackend final : Backend {
  py::object inner;
  PyBackend(int rank, int size, py::object o) : Backend(rank, size), inner(std::move(o)) {}
  ~PyBackend() override {
    py::gil_scoped_acquire gil;
    inner = py::object();
  }
  template <class... Args>
  Works run(const char* name, Args&&... args) {
    py::gil_scoped_acquire gil;
    return c10::make_intrusive<PyWork>(inner.attr(name)(std::forward<Args>(args)...));
  }
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {
    py::gil_scoped_acquire gil;
    inner.attr("start_coalescing")();
  }
  Works endCoalescing() override { return run("end_coalescing"); }
  void shutdown() override {
    py::gil_scoped_acquire gil;
    inner.attr("shutdown")();
  }
  void abort() override { shutdown(); }
  void setTimeout(std::chrono::milliseconds) override {}
  Works broadcast(Tensors& t, const BroadcastOptions& o) override { return run("broadcast", t, o); }
  Works allreduce(Tensors& t, const AllreduceOptions& o) override { return run("allreduce", t, o); }
  Works allreduce_coalesced(Tensors& t, const AllreduceCoalescedOptions& o) override { return run("allreduce", t, AllreduceOptions(o)); }
  Works reduce(Tensors& t, const ReduceOptions& o) override { return run("reduce", t, o); }
  Works allgather(std::vector<Tensors>& out, Tensors& in, const AllgatherOptions& o) override { return run("allgather", out, in, o); }
  Works _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& o) override { return run("gather_single", Tensors{out}, Tensors{in}, o); }
  Works allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& o) override { return run("gather_single", out, in, o); }
  Works reduce_scatter(Tensors& out, std::vector<Tensors>& in, const ReduceScatterOptions& o) override { return run("reduce_scatter", out, in, o); }
  Works _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& o) override { return run("scatter_single", Tensors{out}, Tensors{in}, o); }
  Works reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& o) override { return run("scatter_single", out, in, o); }
  Works alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from, const AllToAllOptions& o) override { return run("alltoall_base", out, in, to, from, o); }
  Works alltoall(Tensors& out, Tensors& in, const AllToAllOptions& o) override { return run("alltoall", out, in, o); }
  Works gather(std::vector<Tensors>& out, Tensors& in, const GatherOptions& o) override { return run("gather", out, in, o); }
  Works scatter(Tensors& out, std::vector<Tensors>& in, const ScatterOptions& o) override { return run("scatter", out, in, o); }
  Works send(Tensors& t, int to, int tag) override { return run("send", t, to, tag); }
  Works recv(Tensors& t, int from, int tag) override { return run("recv", t, from, tag); }
  Works barrier(const BarrierOptions&) override { return run("barrier"); }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("watch", [](py::object o) {
    tell("close");
    watched = !o.is_none();
    watcher.dec_ref();
    watcher = o.is_none() ? py::handle() : o.release();
  });
  m.def("host", &host);
  m.def("default_generator", [](int i) { return default_generator(DeviceIndex(i)); });
  m.def("block", [](const Tensor& t) {
    auto found = block_at(t.has_storage() ? t.storage().data() : nullptr);
    return found ? found->second.id : int64_t(0);
  });
  m.def("ran", [](const std::string& name, const Tensors& read, const Tensors& written) {  // on the current stream
    std::vector<std::pair<Tensor, bool>> used;
    for (auto& t : read) used.emplace_back(t, false);
    for (auto& t : written) used.emplace_back(t, true);
    if (!used.empty()) note(name, used[0].first.device(), used);
  });
  m.def("host_ran", [](const std::string& name, const Tensors& read, const Tensors& written) {
    if (!watched) return;
    Accesses accesses;
    for (auto& t : read) accesses.add(t, false, true);
    for (auto& t : written) accesses.add(t, true, true);
    if (accesses.all.size()) tell("ran", name, py::make_tuple(-1, -1), accesses.all);  // HOST of order.py
  });
  m.def("backend", [](int rank, int size, py::object o) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<PyBackend>(rank, size, std::move(o));
  });
}
}  // namespace sim
