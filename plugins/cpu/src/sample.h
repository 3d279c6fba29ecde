// spec_sample, which trtspec/ops/sample.py defines. The bits are the same on every instruction set. Each step of the
// noise is one integer operation or one correctly rounded IEEE operation, and none of these is contracted.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr int64_t NO_TOKEN = std::numeric_limits<int64_t>::max();
constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();

// Bounds of the noise over all 2^23 values of u, as computed: -2.81154 and 16.63553. test_cpu_sample.py checks all
// values.
constexpr float LEAST_NOISE = -2.8125f, MOST_NOISE = 16.636f;

// -- Philox4x32-10 in the low halves of 64-bit lanes; no code reads the high halves ----------------------------------

typedef uint64_t LVec __attribute__((vector_size(4 * LANES)));
constexpr int BLOCKS = LANES / 2;  // counters at once; each yields four words

// Products of the low halves.
INLINE LVec multiply(LVec a, uint64_t b) {
#if defined(__AVX512F__)
  return (LVec)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (LVec)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (LVec)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffff) * b;
#endif
}

struct Words { LVec at[4]; };

INLINE Words philox(uint64_t key, uint64_t position, LVec quad) {
  LVec c0 = quad, c1 = LVec{} + position, c2 = LVec{} + (position >> 32), c3 = {};
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const LVec p0 = multiply(c0, 0xD2511F53), p1 = multiply(c2, 0xCD9E8D57);
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c1 = p1;
    c3 = p0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// Return the word of each id: one of the four words of the id's counter.
INLINE LVec word_of(LVec ids, uint64_t key, uint64_t position) {
  const Words words = philox(key, position, ids >> 2);
  const LVec odd = -(ids & 1), high = -((ids >> 1) & 1);  // all ones where true
  const LVec front = (words.at[1] & odd) | (words.at[0] & ~odd), back = (words.at[3] & odd) | (words.at[2] & ~odd);
  return (back & high) | (front & ~high);
}

// -- reordering the low halves of 64-bit lanes -----------------------------------------------------------------------

// a0 b0 a1 b1 ...
INLINE LVec zip(LVec a, LVec b) { return (a & 0xffffffff) | (b << 32); }

// a0 a1 ... b0 b1 ...
INLINE UVec narrow(LVec a, LVec b) {
  typedef uint32_t Half __attribute__((vector_size(2 * LANES)));
  const Half halves[2] = {__builtin_convertvector(a, Half), __builtin_convertvector(b, Half)};
  return load_as<UVec>(halves);
}

// Alternate whole lanes, even ones (from = 0) or odd ones (from = 1): a0 b0 a2 b2 ... or a1 b1 a3 b3 ...
template <int from> INLINE UVec pairs(LVec a, LVec b) {
#if defined(__clang__)
#define SHUFFLE(...) (UVec) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(...) (UVec) __builtin_shuffle(a, b, LVec{__VA_ARGS__})
#endif
#if defined(__AVX512F__)
  return SHUFFLE(from, 8 + from, 2 + from, 10 + from, 4 + from, 12 + from, 6 + from, 14 + from);
#elif defined(__AVX2__)
  return SHUFFLE(from, 4 + from, 2 + from, 6 + from);
#else
  return SHUFFLE(from, 2 + from);
#endif
#undef SHUFFLE
}

// -- the noise -------------------------------------------------------------------------------------------------------

constexpr float LOG[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f, 1.4249322787e-1f,
                         -1.6668057665e-1f, 2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};

// The contract's `_log`.
INLINE Vec log_lanes(Vec x) {
  const IVec bits = (IVec)x;
  const Vec mantissa = (Vec)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const IVec small = mantissa < 0.70710678f;                      // -1 where true
  const Vec exponent = __builtin_convertvector((bits >> 23) - 126 + small, Vec);
  const Vec f = (small ? mantissa + mantissa : mantissa) - 1.0f;
  const Vec square = f * f;
  Vec poly = splat(LOG[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 9; ++i) poly = poly * f + LOG[i];
  Vec y = poly * f * square;
  y = y + exponent * -2.12194440e-4f;
  y = y - square * 0.5f;
  return (f + y) + exponent * 0.693359375f;
}

INLINE Vec gumbel(UVec x) {
  const Vec u = (__builtin_convertvector((IVec)(x >> 9), Vec) + 0.5f) * 0x1p-23f;
  return -log_lanes(-log_lanes(u));
}

// Upper bound of gumbel(x), for a tenth of its work. It uses that -log(u) >= 1 - u. It also uses that y's bits are a
// line between powers of two, which log2(y) never falls below. The last digit of 103.974 = 150 log(2) + 0.002 covers
// rounding; test_cpu_sample.py checks all words.
INLINE Vec gumbel_at_most(UVec x) {
  const Vec y = __builtin_convertvector((IVec)(~x >> 9), Vec) + 0.5f;  // (1 - u) * 2^23, exactly
  return 103.974f - __builtin_convertvector((IVec)y, Vec) * 8.2629582e-8f;  // log(2) * 2^-23
}

// -- the draw --------------------------------------------------------------------------------------------------------

// The best candidate so far. Among equal values the lowest id wins, in whatever order they are offered.
struct Best {
  float value;
  int64_t id = NO_TOKEN;

  template <class IdOf> INLINE void offer(Vec scores, IdOf id_of) {
    if (!any(scores >= value)) return;
    for (int i = 0; i < LANES; ++i)
      if (scores[i] > value || (scores[i] == value && id_of(i) < id)) {
        value = scores[i];
        id = id_of(i);
      }
  }

  template <class IdOf> INLINE void offer_noisy(Vec logits, UVec x, IdOf id_of) {
    if (any(logits + gumbel_at_most(x) >= value)) offer(logits + gumbel(x), id_of);
  }

  // Return whether noise could lift one of these to the best value or above it. Rounding is monotonic, and the
  // noise G is at most MOST_NOISE, so fl(logit + G) <= fl(logit + MOST_NOISE). Where that is below `value`, the column
  // can neither win nor tie. The same holds for gumbel_at_most in offer_noisy.
  INLINE bool in_reach(Vec logits) const { return any(logits + MOST_NOISE >= value); }
};

// A function object that returns n elements at `from`. If fewer are left, it copies these and appends `fill`.
template <int n, class T> struct Padded {
  T copy[n];
  INLINE const T* operator()(const T* from, int64_t left, T fill) {
    if (left >= n) return from;
    for (int i = 0; i < n; ++i) copy[i] = i < left ? from[i] : fill;
    return copy;
  }
};

// Return the highest logit; NaN if one is NaN.
inline float top_of(const float* row, int64_t V) {
  Padded<4 * LANES, float> padded;
  Vec top[4] = {splat(MINUS_INF), splat(MINUS_INF), splat(MINUS_INF), splat(MINUS_INF)};
  IVec nan = {};
  for (int64_t v = 0; v < V; v += 4 * LANES) {
    const float* from = padded(row + v, V - v, MINUS_INF);
    for (int i = 0; i < 4; ++i) {
      const Vec x = load(from + i * LANES);
      top[i] = max(x, top[i]);
      nan |= x != x;
    }
  }
  if (any(nan)) return std::numeric_limits<float>::quiet_NaN();
  return highest(max(max(top[0], top[1]), max(top[2], top[3])));
}

inline void offer_plain(Best& best, const float* row, const int64_t* ids, int64_t V) {
  Padded<LANES, float> padded;
  for (int64_t v = 0; v < V; v += LANES)
    best.offer(load(padded(row + v, V - v, MINUS_INF)), [=](int i) { return ids ? ids[v + i] : v + i; });
}

// Offer noisy logits whose ids are the columns, so that the four words of a counter serve four adjacent columns.
inline void offer_dense(Best& best, const float* row, int64_t V, uint64_t key, uint64_t position) {
  Padded<2 * LANES, float> padded;
  LVec quad;  // even lanes count from 0, odd ones from BLOCKS / 2, so that the pairs below are in the order of the ids
  for (int i = 0; i < BLOCKS; ++i) quad[i] = i / 2 + (i % 2) * (BLOCKS / 2);
  for (int64_t v = 0; v < V; v += 2 * LANES) {
    const float* from = padded(row + v, V - v, MINUS_INF);
    const Vec low = load(from), high = load(from + LANES);
    if (!best.in_reach(max(low, high))) continue;
    const Words words = philox(key, position, quad + v / 4);
    const LVec front = zip(words.at[0], words.at[1]), back = zip(words.at[2], words.at[3]);
    best.offer_noisy(low, pairs<0>(front, back), [=](int i) { return v + i; });
    best.offer_noisy(high, pairs<1>(front, back), [=](int i) { return v + LANES + i; });
  }
}

// Offer noisy logits with ids. Each id has a counter of its own, whatever its neighbours are.
inline void offer_own(Best& best, const float* row, const int64_t* ids, int64_t V, uint64_t key, uint64_t position) {
  Padded<LANES, float> padded;
  Padded<LANES, int64_t> padded_ids;
  for (int64_t v = 0; v < V; v += LANES) {
    const Vec logits = load(padded(row + v, V - v, MINUS_INF));
    if (!best.in_reach(logits)) continue;
    const int64_t* id = padded_ids(ids + v, V - v, 0);
    const LVec front = load_as<LVec>(id), back = load_as<LVec>(id + BLOCKS);
    const UVec x = narrow(word_of(front, key, position), word_of(back, key, position));
    best.offer_noisy(logits, x, [=](int i) { return id[i]; });
  }
}

inline int64_t draw(const float* row, const int64_t* ids, int64_t V, bool noisy, int64_t seed, int64_t position) {
  const float top = top_of(row, V);
  if (!(top > MINUS_INF)) return NO_TOKEN;  // NaN, or every token is removed
  // The top column's own score is never below fl(top + LEAST_NOISE), again because rounding is monotonic. So the best
  // value may start there. It has no id yet: that column, or a better one, will bring its own.
  Best best{noisy ? top + LEAST_NOISE : top};
  if (!noisy)
    offer_plain(best, row, ids, V);
  else if (ids)
    offer_own(best, row, ids, V, seed, position);
  else
    offer_dense(best, row, V, seed, position);
  return best.id;
}

void spec_sample(const SampleArgs& args, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const bool noisy = args.seeds != nullptr && !args.greedy[r];
    args.tokens[r] = draw(args.logits + r * args.V, args.vocab_ids, args.V, noisy, noisy ? args.seeds[r] : 0,
                          args.positions[r]);
  }
}

}  // namespace trtspec::TRTSPEC_ISA
