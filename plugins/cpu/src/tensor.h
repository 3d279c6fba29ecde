// The ops' tensor class, made of torch's stable C functions alone. So one library serves every torch that has them.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace trtspec {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;

template <class... Parts> [[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());  // a RuntimeError in Python
}

#define OP_REQUIRES(condition, ...)                              \
  do {                                                           \
    if (!(condition)) [[unlikely]] ::trtspec::fail(__VA_ARGS__); \
  } while (false)

// Throw torch's own message if a call of torch failed.
inline void check(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) [[unlikely]] fail(torch_exception_get_what_without_backtrace());
}

// ScalarType of each of torch's dtype codes, by code. torch alone decides its codes, so they are asked for here.
inline const std::array<ScalarType, 128> SCALAR_TYPES = [] {
  std::array<ScalarType, 128> types;
  types.fill(ScalarType::Undefined);
  for (const ScalarType type :
       {ScalarType::Byte, ScalarType::Char, ScalarType::Short, ScalarType::Int, ScalarType::Long, ScalarType::Half,
        ScalarType::Float, ScalarType::Double, ScalarType::ComplexHalf, ScalarType::ComplexFloat,
        ScalarType::ComplexDouble, ScalarType::Bool, ScalarType::BFloat16, ScalarType::Float8_e5m2,
        ScalarType::Float8_e4m3fn, ScalarType::Float8_e5m2fnuz, ScalarType::Float8_e4m3fnuz, ScalarType::UInt16,
        ScalarType::UInt32, ScalarType::UInt64})
    types.at(torch::stable::detail::from(type)) = type;
  return types;
}();

// A view of sizes or strides: of a tensor, or of a list such as {R, V}. Their memory belongs to the tensor or the list.
class Sizes {
 public:
  Sizes(const int64_t* data, int64_t count) : data_(data), count_(count) {}
  Sizes(const std::initializer_list<int64_t>& list) : data_(std::data(list)), count_(int64_t(list.size())) {}
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + count_; }
  int64_t count() const { return count_; }
  int64_t operator[](int64_t i) const { return data_[i]; }
  friend bool operator==(const Sizes& a, const Sizes& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }
  friend std::ostream& operator<<(std::ostream& out, const Sizes& sizes) {
    const char* between = "[";
    for (const int64_t size : sizes) out << std::exchange(between, ", ") << size;
    return out << (sizes.count() ? "]" : "[]");
  }

 private:
  const int64_t* data_;
  int64_t count_;
};

template <class T> constexpr ScalarType SCALAR_TYPE = c10::CppTypeToScalarType<T>::value;

// A torch tensor by its handle. It owns the handle, or borrows it for the duration of an op: graph_calls.cpp borrows
// the arguments of ops.
class Tensor {
 public:
  Tensor() = default;  // undefined
  static Tensor owned(AtenTensorHandle handle) { return Tensor(handle, true); }
  static Tensor borrowed(AtenTensorHandle handle) { return Tensor(handle, false); }
  Tensor(const Tensor& other) : Tensor(other.owned_ ? other.another() : other.handle_, other.owned_) {}
  Tensor(Tensor&& other) noexcept : handle_(other.handle_), owned_(std::exchange(other.owned_, false)) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~Tensor() {
    if (owned_) aoti_torch_delete_tensor_object(handle_);
  }

  bool defined() const { return handle_ != nullptr; }
  AtenTensorHandle handle() const { return handle_; }
  // Return a further handle of the same tensor. The caller owns it.
  AtenTensorHandle another() const {
    AtenTensorHandle handle;
    check(aoti_torch_new_tensor_handle(handle_, &handle));
    return handle;
  }
  // Return the handle. From now on the caller owns it.
  AtenTensorHandle release() && { return std::exchange(owned_, false) ? handle_ : another(); }

  int64_t dim() const { return get<int64_t>(aoti_torch_get_dim); }
  int64_t numel() const { return get<int64_t>(aoti_torch_get_numel); }
  Sizes sizes() const { return {get<int64_t*>(aoti_torch_get_sizes), dim()}; }
  Sizes strides() const { return {get<int64_t*>(aoti_torch_get_strides), dim()}; }
  int64_t size(int64_t dim) const { return get<int64_t>(aoti_torch_get_size, dim); }
  int64_t stride(int64_t dim) const { return get<int64_t>(aoti_torch_get_stride, dim); }
  bool is_contiguous() const { return get<bool>(aoti_torch_is_contiguous); }
  ScalarType scalar_type() const { return SCALAR_TYPES.at(get<int32_t>(aoti_torch_get_dtype)); }
  int64_t element_size() const { return int64_t(aoti_torch_dtype_element_size(get<int32_t>(aoti_torch_get_dtype))); }
  int64_t nbytes() const { return numel() * element_size(); }

  const void* const_data_ptr() const { return get<const void*>(torch_get_const_data_ptr); }
  void* mutable_data_ptr() const { return get<void*>(torch_get_mutable_data_ptr); }
  template <class T> const T* const_data_ptr() const { return static_cast<const T*>(checked<T>().const_data_ptr()); }
  template <class T> T* mutable_data_ptr() const { return static_cast<T*>(checked<T>().mutable_data_ptr()); }

  // These two return the tensor itself if it is contiguous, or of this type, already.
  Tensor contiguous() const;
  Tensor to(ScalarType type) const;
  // Return a contiguous copy.
  Tensor clone() const;

 private:
  Tensor(AtenTensorHandle handle, bool owned) : handle_(handle), owned_(owned) {}

  template <class T, class Function, class... Args> T get(Function function, Args... args) const {
    T value;
    check(function(handle_, args..., &value));
    return value;
  }

  template <class T> const Tensor& checked() const {
    const ScalarType type = scalar_type();
    OP_REQUIRES(type == SCALAR_TYPE<T>, "expected scalar type ", SCALAR_TYPE<T>, " but found ", type);
    return *this;
  }

  AtenTensorHandle handle_ = nullptr;
  bool owned_ = false;
};

// Return a new tensor on the CPU.
inline Tensor empty_strided(const Sizes& sizes, const Sizes& strides, ScalarType type) {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle handle;
  check(aoti_torch_empty_strided(sizes.count(), sizes.begin(), strides.begin(),
                                 int32_t(torch::stable::detail::from(type)), cpu, 0, &handle));
  return Tensor::owned(handle);
}

// Return a new contiguous tensor on the CPU.
inline Tensor empty(const Sizes& sizes, ScalarType type) {
  constexpr int64_t MOST = 8;
  OP_REQUIRES(sizes.count() <= MOST, "empty: ", sizes, " has more than ", MOST, " dimensions");
  int64_t strides[MOST], step = 1;
  for (int64_t i = sizes.count() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(sizes, {strides, sizes.count()}, type);
}

}  // namespace trtspec

// Conversions to and from torch's dispatcher. The receiver of a tensor owns its handle.
template <> struct torch::stable::detail::FromImpl<trtspec::Tensor> {
  static StableIValue call(const trtspec::Tensor& tensor, uint64_t, bool) { return detail::from(tensor.another()); }
};

template <> struct torch::stable::detail::ToImpl<trtspec::Tensor> {
  static trtspec::Tensor call(StableIValue value, uint64_t, bool) {
    return trtspec::Tensor::owned(detail::to<AtenTensorHandle>(value));
  }
};

namespace trtspec {

// Call an op of torch that returns one tensor, through torch's dispatcher. A call takes microseconds.
template <class... Args> Tensor call(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  check(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor Tensor::contiguous() const {
  return is_contiguous() ? *this : call("aten::contiguous", "", *this, MemoryFormat::Contiguous);
}

inline Tensor Tensor::to(ScalarType type) const {
  if (scalar_type() == type) return *this;
  return call("aten::to", "dtype", *this, type, false, false, std::nullopt);
}

inline Tensor Tensor::clone() const {
  return call("aten::clone", "", *this, std::optional<MemoryFormat>(MemoryFormat::Contiguous));
}

// Return a new tensor with the strides that torch.empty_like gives it. Compiled graphs rely on these strides.
inline Tensor empty_like(const Tensor& x) {
  if (x.is_contiguous()) return empty_strided(x.sizes(), x.strides(), x.scalar_type());
  const Sizes strides = x.strides();
  const bool descending = std::adjacent_find(strides.begin(), strides.end(), std::less_equal()) == strides.end();
  if (descending && *(strides.end() - 1) > 0) return empty(x.sizes(), x.scalar_type());
  return call("aten::empty_like", "", x, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
}

// A scope in which torch's ops keep no gradients.
class NoGradients {
 public:
  NoGradients() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGradients() { aoti_torch_grad_mode_set_enabled(before_); }
  NoGradients(const NoGradients&) = delete;

 private:
  const bool before_ = aoti_torch_grad_mode_is_enabled();
};

}  // namespace trtspec
