// A device of PyTorch's own kind ("privateuseone") whose memory is the host's, poisoned when it is made and when it is
// given up. Operators run on the CPU, through copies: what a test sees of them in memory has been put there.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xA5;

std::mutex lock;
std::unordered_map<void *, size_t> blocks;
std::vector<void *> held;
bool holding = false;

void give_up(void *pointer)
{
    if (!pointer)
        return;
    std::lock_guard<std::mutex> guard(lock);
    if (holding) {
        held.push_back(pointer);
        return;
    }
    auto found = blocks.find(pointer);
    std::memset(pointer, POISON, found->second);
    blocks.erase(found);
    std::free(pointer);
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override
    {
        c10::Device device(TYPE, 0);
        void *pointer = nullptr;
        if (nbytes) {
            pointer = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
            std::memset(pointer, POISON, nbytes);
            std::lock_guard<std::mutex> guard(lock);
            blocks[pointer] = nbytes;
        }
        return {pointer, pointer, &give_up, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &give_up; }
    void copy_data(void *to, const void *from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

Allocator allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return TYPE; }
    c10::Device exchangeDevice(c10::Device) const override { return {TYPE, 0}; }
    c10::Device getDevice() const override { return {TYPE, 0}; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    // whatever is asked of the device has been done when the call returns
    void record(void **, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    void destroyEvent(void *, const c10::DeviceIndex) const noexcept override {}
    bool queryStream(const c10::Stream &) const override { return true; }
    void synchronizeStream(const c10::Stream &) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::Device getDeviceFromPtr(void *) const override { return {TYPE, 0}; }
    c10::Allocator *getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
    bool isPinnedPtr(const void *) const override { return false; }
};

const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, keys,
                                     dtype.value_or(at::ScalarType::Float), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>)
{
    c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             &allocator, keys, dtype.value_or(at::ScalarType::Float));
}

// A CPU tensor on the same memory.
at::Tensor on_host(const at::Tensor &tensor)
{
    if (tensor.device().type() == at::kCPU)
        return tensor;
    auto *first = static_cast<char *>(tensor.storage().mutable_data());
    auto flat = at::from_blob(first, {int64_t(tensor.storage().nbytes() / tensor.element_size())},
                              at::TensorOptions().dtype(tensor.dtype()));
    return flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor copy_from(const at::Tensor &self, const at::Tensor &dst, bool)
{
    auto source = on_host(self);
    if (self.is_conj())
        source = source.conj();
    if (self.is_neg())
        source = source._neg_view();
    on_host(dst).copy_(source);
    return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &dst)
{
    if (dst.sizes() != self.sizes())
        dst.resize_(self.sizes());
    return copy_from(self, dst, false);
}

const at::Tensor &resize(const at::Tensor &self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>)
{
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    int64_t count = 1;
    for (auto one : sizes)
        count *= one;
    size_t nbytes = (self.storage_offset() + count) * self.element_size();
    auto *storage = self.storage().unsafeGetStorageImpl();
    if (nbytes > storage->nbytes()) {
        auto fresh = allocator.allocate(nbytes);
        if (storage->nbytes())
            std::memcpy(fresh.get(), storage->data(), storage->nbytes());
        storage->set_data_ptr(std::move(fresh));
        storage->set_nbytes(nbytes);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    return self;
}

at::Tensor as_strided(const at::Tensor &self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset)
{
    std::optional<int64_t> begin;
    if (offset.has_value())
        begin = offset->guard_int(__FILE__, __LINE__);
    return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), begin);
}

at::Tensor view(const at::Tensor &self, c10::SymIntArrayRef size)
{
    return at::cpu::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor &self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride)
{
    return at::cpu::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor &set_storage(at::Tensor &self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride)
{
    return at::cpu::set_(self, source, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size),
                         C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar local_scalar(const at::Tensor &self) { return at::_local_scalar_dense(on_host(self)); }

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

// Address and bytes of what is allocated, in pairs; returns how many there are.
extern "C" long torch_device_blocks(uint64_t *pairs, long most)
{
    std::lock_guard<std::mutex> guard(lock);
    long count = 0;
    for (auto &block : blocks) {
        if (count < most) {
            pairs[2 * count] = reinterpret_cast<uint64_t>(block.first);
            pairs[2 * count + 1] = block.second;
        }
        count++;
    }
    return count;
}

// Whether memory that is given up stays what it is; when it does no longer, all of it goes.
extern "C" void torch_device_hold(long hold)
{
    std::vector<void *> late;
    {
        std::lock_guard<std::mutex> guard(lock);
        holding = hold != 0;
        if (!holding)
            late.swap(held);
    }
    for (auto *pointer : late)
        give_up(pointer);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("resize_", &resize);
    m.impl("as_strided", &as_strided);
    m.impl("view", &view);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("_local_scalar_dense", &local_scalar);
}
