// process_logits, which trtspec/ops/logits.py defines. It does one row at a time, so no row depends on another.
//
// Top-k, top-p and min-p all keep the logits at or above some value. Each only has to find that value among a few
// candidates; one pass then removes the rest. Top-p's mass or min-p's ratio may miss its bound by no more than rounding
// (about 1e-6). There the reference may decide differently, because it adds up and rounds in another order.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "vec.h"

namespace trtspec::TRTSPEC_ISA {

constexpr float REMOVED = -std::numeric_limits<float>::infinity();

// Load the elements at `from`, of which `left` exist (maybe more than LANES). Lanes after them are `fill`.
INLINE Vec load_some(const float* from, int64_t left, float fill) {
  if (left >= LANES) return load(from);
  Vec x = splat(fill);
  std::memcpy(&x, from, left * sizeof(float));
  return x;
}

INLINE void store_some(float* to, Vec x, int64_t left) {
  if (left >= LANES)
    store(to, x);
  else
    std::memcpy(to, &x, left * sizeof(float));
}

// e^x for x <= 0, to about one ulp. Below -87 it stays at e^-87, which is negligible next to the 1 of the likeliest
// token.
INLINE Vec exp_lanes(Vec x) {
  constexpr float POLY[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,  // Cephes expf
                            4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  x = max(x, splat(-87.0f));
  const Vec shifted = fma(x, splat(1.44269504f), splat(0x1.8p23f));  // its low bits are round(x / log(2))
  const Vec n = shifted - 0x1.8p23f;
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Vec y = splat(POLY[0]);
  for (int i = 1; i < 6; ++i) y = fma(y, r, splat(POLY[i]));
  y = fma(y, r * r, r) + 1.0f;
  return (Vec)((UVec)y + ((UVec)shifted << 23));
}

// -- edits of single tokens, in place --------------------------------------------------------------------------------

// Apply the penalties. counts [V] is zero before and after. In between, a seen token has SEEN set, together with the
// number of times that it was output.
inline void penalise(float* row, const int32_t* history, int64_t L, int64_t prompt_len, const float* penalties,
                     int32_t* counts) {
  constexpr int32_t SEEN = 1 << 30;
  const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
  for (int64_t i = 0; i < L; ++i)
    if (history[i] >= 0) counts[history[i]] = (counts[history[i]] | SEEN) + (i >= prompt_len);
  for (int64_t i = 0; i < L; ++i) {
    if (history[i] < 0 || counts[history[i]] == 0) continue;
    float& logit = row[history[i]];
    const int32_t output = counts[history[i]] & ~SEEN;
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (output > 0) logit = (logit - float(output) * frequency) - presence;
    counts[history[i]] = 0;
  }
}

inline void add_bias(float* row, const int32_t* ids, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] >= 0) row[ids[i]] += values[i];
}

inline void ban(float* row, const int32_t* ids, const int64_t* until, int64_t n, int64_t position) {
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] >= 0 && position < until[i]) row[ids[i]] = REMOVED;
}

inline void allow(float* row, int64_t V, const int32_t* mask) {
  IVec lane;
  for (int i = 0; i < LANES; ++i) lane[i] = 1 << i;
  for (int64_t v = 0; v < V; v += LANES) {
    const IVec word = IVec{} + int32_t(uint32_t(mask[v / 32]) >> v % 32);
    const Vec x = load_some(row + v, V - v, REMOVED);
    store_some(row + v, (word & lane) != 0 ? x : splat(REMOVED), V - v);
  }
}

// -- passes over a row -----------------------------------------------------------------------------------------------

struct Summary {
  float top;     // the highest number
  int64_t nans;  // number of NaNs
};

// to = from / temperature. Both may be the same row.
inline Summary divide(const float* from, float* to, int64_t V, float temperature) {
  Vec top = splat(REMOVED);
  IVec nans = {};
  for (int64_t v = 0; v < V; v += LANES) {
    const Vec x = load_some(from + v, V - v, REMOVED) / temperature;
    top = max(x, top);
    nans -= x != x;
    store_some(to + v, x, V - v);
  }
  int64_t count = 0;
  for (int i = 0; i < LANES; ++i) count += nans[i];
  return {highest(top), count};
}

// Sum of e^(x - top) over the row. Long rows are added up in parts, to keep the rounding errors of fp32 small.
inline double mass_of(const float* row, int64_t V, float top) {
  constexpr int64_t PART = 64 * LANES;
  double mass = 0;
  for (int64_t start = 0; start < V; start += PART) {
    const int64_t end = V < start + PART ? V : start + PART;
    Vec part = {};
    for (int64_t v = start; v < end; v += LANES) part += exp_lanes(load_some(row + v, end - v, REMOVED) - top);
    mass += sum(part);
  }
  return mass;
}

// Copy the elements with x - base >= least, in order, and return their number. `to` needs room for LANES more.
inline int64_t collect(const float* row, int64_t V, float base, float least, float* to) {
  int64_t n = 0;
  for (int64_t v = 0; v < V; v += LANES) {
    const Vec x = load_some(row + v, V - v, REMOVED);
    const IVec wanted = x - base >= least;
    if (!any(wanted)) continue;
#if defined(__AVX512F__)
    const __mmask16 mask = _mm512_test_epi32_mask((__m512i)wanted, (__m512i)wanted);
    store(to + n, (Vec)_mm512_maskz_compress_ps(mask, (__m512)x));
    n += __builtin_popcount(mask);
#else
    for (int i = 0; i < LANES; ++i) {
      to[n] = x[i];
      n -= wanted[i];
    }
#endif
  }
  return n;
}

// Remove elements with x < least or x - top < gap.
inline void cut(float* row, int64_t V, float least, float top, float gap) {
  for (int64_t v = 0; v < V; v += LANES) {
    const Vec x = load_some(row + v, V - v, REMOVED);
    store_some(row + v, ((x < least) | (x - top < gap)) != 0 ? splat(REMOVED) : x, V - v);
  }
}

// -- selection -------------------------------------------------------------------------------------------------------

// Map numbers to unsigned integers of the same order, and back.
INLINE UVec key_of(Vec x) { return (UVec)x ^ ((UVec)((IVec)x >> 31) | 0x80000000); }

INLINE float number_of(uint32_t key) {
  const uint32_t bits = key & 0x80000000 ? key ^ 0x80000000 : ~key;
  return load_as<float>(&bits);
}

// Return the highest value v such that the values >= v weigh at least `need`. If all weigh less, return the lowest of
// the n > 0 values.
//
// Each round sorts the keys into at most 256 buckets by their distance from the highest key. It finds the bucket in
// which the weight is reached, and continues with that bucket alone. The lowest and the highest key never share a
// bucket, so every round narrows the range.
inline float select(uint32_t* keys, float* weights, int64_t n, double need) {
  double above = 0;  // weight of the keys above those that are left
  for (;;) {
    uint32_t low = keys[0], high = keys[0];
    for (int64_t i = 1; i < n; ++i) {
      low = keys[i] < low ? keys[i] : low;
      high = keys[i] > high ? keys[i] : high;
    }
    if (low == high) return number_of(high);
    const int width = 32 - __builtin_clz(high - low), shift = width > 8 ? width - 8 : 0;
    const uint32_t last = (high - low) >> shift;
    double bucket[256] = {};
    for (int64_t i = 0; i < n; ++i) bucket[(high - keys[i]) >> shift] += weights[i];
    uint32_t chosen = 0;
    while (chosen < last && above + bucket[chosen] < need) above += bucket[chosen++];
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      if ((high - keys[i]) >> shift != chosen) continue;
      keys[kept] = keys[i];
      weights[kept++] = weights[i];
    }
    n = kept;
  }
}

// Turn the n numbers of scratch.values into keys, and replace the numbers by their weights.
template <class Weigh> INLINE void weigh(const LogitsScratch& scratch, int64_t n, Weigh weight_of) {
  for (int64_t i = 0; i < n; i += LANES) {
    const Vec x = load(scratch.values + i);
    const UVec key = key_of(x);
    std::memcpy(scratch.keys + i, &key, sizeof key);
    store(scratch.values + i, weight_of(x));
  }
}

// Return the k-th highest of the n numbers in scratch.values.
inline float select_kth(const LogitsScratch& scratch, int64_t n, int64_t k) {
  weigh(scratch, n, [](Vec) { return splat(1.0f); });
  return select(scratch.keys, scratch.values, n, double(k));
}

// Return a number that at least k elements of the row reach, close to the k-th highest. It is the k-th highest of about
// 8 k maxima of disjoint groups.
inline float below_kth(const float* row, int64_t V, int64_t k, const LogitsScratch& scratch) {
  const int64_t vectors = V / LANES;
  const int64_t wanted = V / (8 * k), group = wanted < vectors ? wanted : vectors;  // each lane of these is a group
  if (group < 2) return REMOVED;
  const int64_t groups = vectors / group;  // groups * LANES >= k: k <= LANES, or there are nearly 8 k maxima
  for (int64_t g = 0; g < groups; ++g) {
    Vec top = splat(REMOVED);
    for (int64_t i = 0; i < group; ++i) top = max(load(row + (g * group + i) * LANES), top);
    store(scratch.values + g * LANES, top);
  }
  return select_kth(scratch, groups * LANES, k);
}

// Return the k-th highest number, or REMOVED if fewer are left.
inline float kth_of(const float* row, int64_t V, int64_t k, const LogitsScratch& scratch) {
  const float least = below_kth(row, V, k, scratch);
  const int64_t n = collect(row, V, 0.0f, least > REMOVED ? least : -FLT_MAX, scratch.values);
  return n < k ? REMOVED : select_kth(scratch, n, k);
}

// Return the lowest number that top-p keeps among those >= least (REMOVED: among all).
//
// The contract drops a value if all values up to it hold no more than 1 - p of the mass. So it keeps the highest values
// until they hold p. Numbers whose own share is below (1 - p) / 2V can be ignored: together they hold less than half of
// the mass that may be dropped. That half is far more than rounding.
inline float nucleus_of(const float* row, int64_t V, float p, float top, float least, const LogitsScratch& scratch) {
  if (!(p > 0)) return top;
  const double tail = 1.0f - p;
  const bool few = least > REMOVED;
  double mass = few ? 0 : mass_of(row, V, top);
  const int64_t n = few ? collect(row, V, 0.0f, least, scratch.values)
                        : collect(row, V, top, float(std::log(tail * mass / double(2 * V))), scratch.values);
  weigh(scratch, n, [=](Vec x) { return exp_lanes(x - top); });
  for (int64_t i = 0; few && i < n; ++i) mass += scratch.values[i];
  return select(scratch.keys, scratch.values, n, (1 - tail) * mass);
}

// -- all steps of the contract ---------------------------------------------------------------------------------------

inline void filter(float* row, int64_t V, Summary summary, int64_t k, float p, float min_p,
                   const LogitsScratch& scratch) {
  float least = REMOVED, gap = REMOVED;
  // NaN counts as higher than every number. A row with NaN will be refused. Top-p and min-p leave it alone, because
  // they would compare with a mass of NaN. They also leave a row alone if its top is infinite.
  if (k > summary.nans && k < V) least = kth_of(row, V, k - summary.nans, scratch);
  if (summary.nans == 0 && std::fabs(summary.top) <= FLT_MAX) {
    if (p < 1) least = nucleus_of(row, V, p, summary.top, least, scratch);
    if (min_p > 0) gap = float(std::log(double(min_p)));
  }
  if (least > REMOVED || gap > REMOVED) cut(row, V, least, summary.top, gap);
}

inline void process_row(const LogitsArgs& args, const LogitsScratch& scratch, int64_t r) {
  const int64_t V = args.V, L = args.history_len;
  const float* from = args.logits + r * V;
  float* row = args.out + r * V;
  if (args.penalties || args.bias_ids || args.ban_ids || args.allow_mask) {
    std::memcpy(row, from, V * sizeof(float));
    from = row;
  }
  if (args.bias_ids) {
    const int64_t n = args.num_biases;
    add_bias(row, args.bias_ids + r * n, args.bias_values + r * n, n);
  }
  if (args.penalties)
    penalise(row, args.history + r * L, L, args.prompt_lens[r], args.penalties + r * 3, scratch.counts);
  if (args.ban_ids) {
    const int64_t n = args.num_bans;
    ban(row, args.ban_ids + r * n, args.ban_until + r * n, n, args.positions[r]);
  }
  if (args.allow_mask) allow(row, V, args.allow_mask + r * ((V + 31) / 32));
  const float temperature = args.temperatures ? args.temperatures[r] : 0;
  const Summary summary = divide(from, row, V, temperature > 0 ? temperature : 1);
  filter(row, V, summary, args.top_ks ? args.top_ks[r] : 0, args.top_ps ? args.top_ps[r] : 1,
         args.min_ps ? args.min_ps[r] : 0, scratch);
}

void process_logits(const LogitsArgs& args, const LogitsScratch& scratch, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) process_row(args, scratch, r);
}

}  // namespace trtspec::TRTSPEC_ISA
