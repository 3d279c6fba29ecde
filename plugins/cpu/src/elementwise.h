// rms_norm, silu_mul and rotate_heads: what a layer does between its linears and attention. A row's bits depend on the
// row alone.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

// Round to T, as memory would.
template <class T> INLINE Vec rounded(Vec v) {
  if constexpr (std::is_same_v<T, float>) return v;
  T kept[LANES];
  store(kept, v);
  return load(kept);
}

// Call body(i, n) for elements [i, i + n) of [0, count). n is LANES, a constant, except for the last elements.
template <class Body> INLINE void for_vectors(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) body(i, std::integral_constant<int, LANES>());
  if (i < count) body(i, int(count - i));
}

template <class T> INLINE Vec load_some(const T* from, std::integral_constant<int, LANES>) { return load(from); }
template <class T> INLINE Vec load_some(const T* from, int n) { return load(from, n); }
template <class T> INLINE void store_some(T* to, Vec v, std::integral_constant<int, LANES>) { store(to, v); }
template <class T> INLINE void store_some(T* to, Vec v, int n) { store(to, v, n); }

template <class T> INLINE void norm_row(const NormArgs& args, const T* x, T* out) {
  constexpr int CHAINS = 4;  // independent sums, as an addition takes some cycles
  Vec sums[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= args.size; i += CHAINS * LANES)
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS; ++c) {
      const Vec v = load(x + i + c * LANES);
      sums[c] = fma(v, v, sums[c]);
    }
  for_vectors(args.size - i, [&](int64_t j, auto n) __attribute__((always_inline)) {
    const Vec v = load_some(x + i + j, n);
    sums[0] = fma(v, v, sums[0]);
  });
  const float mean = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(args.size);
  const Vec scale = splat(1.0f / std::sqrt(mean + args.eps));
  const T* weight = static_cast<const T*>(args.weight);
  for_vectors(args.size, [&](int64_t j, auto n) __attribute__((always_inline)) {
    store_some(out + j, load_some(weight + j, n) * rounded<T>(load_some(x + j, n) * scale), n);
  });
}

template <class T> void norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(args.out) + begin * args.heads * args.size;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t head = 0; head < args.heads; ++head, out += args.size)
      norm_row(args, static_cast<const T*>(args.x.data) + row * args.x.row_step + head * args.x.head_step, out);
}

// silu(gate) * up. silu is rounded to T before it is multiplied.
template <class T> INLINE Vec gated(Vec gate, Vec up) { return rounded<T>(gate / (exp(-gate) + 1.0f)) * up; }

template <class T> void silu_mul_rows(const SiluMulArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.x) + row * args.x_step;
    const T* up = gate + args.size;
    T* out = static_cast<T*>(args.out) + row * args.size;
    for_vectors(args.size, [&](int64_t i, auto n) __attribute__((always_inline)) {
      store_some(out + i, gated<T>(load_some(gate + i, n), load_some(up + i, n)), n);
    });
  }
}

template <class T> INLINE void rotate_row(const T* x, const T* cos, const T* sin, int64_t half, T* out) {
  for_vectors(half, [&](int64_t i, auto n) __attribute__((always_inline)) {
    const Vec first = load_some(x + i, n), second = load_some(x + half + i, n);
    const auto product = [&](Vec of, const T* by) __attribute__((always_inline)) {
      return rounded<T>(of * load_some(by + i, n));
    };
    store_some(out + i, product(first, cos) - product(second, sin), n);
    store_some(out + half + i, product(second, cos + half) + product(first, sin + half), n);
  });
}

template <class T> void rotate_rows(const RotateArgs& args, int64_t begin, int64_t end) {
  const int64_t half = args.size / 2;
  T* out = static_cast<T*>(args.out) + begin * args.heads * args.size;
  for (int64_t row = begin; row < end; ++row) {
    const T* cos = static_cast<const T*>(args.cos) + row * args.cos_step;
    const T* sin = static_cast<const T*>(args.sin) + row * args.sin_step;
    const T* x = static_cast<const T*>(args.x.data) + row * args.x.row_step;
    for (int64_t head = 0; head < args.heads; ++head, x += args.x.head_step, out += args.size)
      rotate_row(x, cos, sin, half, out);
  }
}

// -- entries of the kernel table --------------------------------------------------------------------------------------

#define BY_ELEMENT(function, args)                                                 \
  ((args).element == Element::fp32   ? &function<float>                            \
   : (args).element == Element::bf16 ? &function<BFloat16> : &function<Half>)

void rms_norm(const NormArgs& args, int64_t begin, int64_t end) { BY_ELEMENT(norm_rows, args)(args, begin, end); }
void silu_mul(const SiluMulArgs& args, int64_t begin, int64_t end) {
  BY_ELEMENT(silu_mul_rows, args)(args, begin, end);
}
void rotate_heads(const RotateArgs& args, int64_t begin, int64_t end) { BY_ELEMENT(rotate_rows, args)(args, begin, end); }

#undef BY_ELEMENT

}  // namespace trtspec::TRTSPEC_ISA
