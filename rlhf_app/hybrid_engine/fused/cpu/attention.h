// Attention of one token over the keys and values of its row, in fp32.
//
// Strides count floats; the last dimension of everything has stride 1.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// e**x to 2 units in the last place, in a form that compilers vectorise: 2**n * e**r with
// |r| <= ln(2) / 2. Below -87 it gives the smallest normal number's neighbourhood, not 0.
inline float exp_(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = std::rint(x * 1.44269504f);
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float dot(const float* a, const float* b, int64_t size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

// Keys that are transposed at a time where heads are small: there the sum over a head's
// features is shorter than a vector register, and the keys make the vector instead.
constexpr int kTile = 16;
constexpr int kSmallHead = 16;

template <int SIZE>
inline void logits_of(const float* query, int64_t query_stride, int64_t group, const float* keys,
                      int64_t count, int64_t size, float scale, float* logits, int64_t room) {
  const int64_t d_end = SIZE ? SIZE : size;
  int64_t first = 0;
  if (d_end <= kSmallHead) {
    float tile[kSmallHead][kTile];
    for (; first + kTile <= count; first += kTile) {
      for (int64_t t = 0; t < kTile; ++t)
        for (int64_t d = 0; d < d_end; ++d) tile[d][t] = keys[(first + t) * d_end + d];
      for (int64_t g = 0; g < group; ++g) {
        float sums[kTile] = {0.0f};
        for (int64_t d = 0; d < d_end; ++d) {
          const float q = query[g * query_stride + d] * scale;
#pragma omp simd
          for (int t = 0; t < kTile; ++t) sums[t] += q * tile[d][t];
        }
        for (int t = 0; t < kTile; ++t) logits[g * room + first + t] = sums[t];
      }
    }
  }
  for (int64_t l = first; l < count; ++l)
    for (int64_t g = 0; g < group; ++g)
      logits[g * room + l] = scale * dot(query + g * query_stride, keys + l * d_end, d_end);
}

template <int SIZE>
inline void weighted_sum(const float* weights, const float* values, int64_t count, int64_t size,
                         float factor, float* out) {
  const int64_t d_end = SIZE ? SIZE : size;
  if (SIZE) {
    // Two sums at a time: one alone waits for its own additions.
    float even[SIZE ? SIZE : 1] = {0.0f}, odd[SIZE ? SIZE : 1] = {0.0f};
    int64_t l = 0;
    for (; l + 2 <= count; l += 2) {
#pragma omp simd
      for (int d = 0; d < SIZE; ++d) even[d] += weights[l] * values[l * SIZE + d];
#pragma omp simd
      for (int d = 0; d < SIZE; ++d) odd[d] += weights[l + 1] * values[(l + 1) * SIZE + d];
    }
    if (l < count)
      for (int d = 0; d < SIZE; ++d) even[d] += weights[l] * values[l * SIZE + d];
    for (int d = 0; d < SIZE; ++d) out[d] = (even[d] + odd[d]) * factor;
    return;
  }
  std::fill(out, out + d_end, 0.0f);
  for (int64_t l = 0; l < count; ++l)
#pragma omp simd
    for (int64_t d = 0; d < d_end; ++d) out[d] += weights[l] * values[l * d_end + d];
  for (int64_t d = 0; d < d_end; ++d) out[d] *= factor;
}

// One row and kv head: its `group` query heads over positions start..length, inclusive.
template <int SIZE>
void attend(const float* query, int64_t query_stride, int64_t group, const float* keys,
            const float* values, int64_t start, int64_t length, int64_t size, float scale,
            float softcap, const float* biases, int64_t bias_stride, float* logits, float* out) {
  const int64_t d_end = SIZE ? SIZE : size;
  const int64_t count = length + 1 - start;
  logits_of<SIZE>(query, query_stride, group, keys + start * d_end, count, size, scale, logits,
                  count);
  for (int64_t g = 0; g < group; ++g) {
    float* row = logits + g * count;
    if (softcap > 0.0f)
      for (int64_t l = 0; l < count; ++l) row[l] = softcap * std::tanh(row[l] / softcap);
    if (biases)
      for (int64_t l = 0; l < count; ++l) row[l] += biases[g * bias_stride + start + l];
    float most = row[0];
#pragma omp simd reduction(max : most)
    for (int64_t l = 0; l < count; ++l) most = std::max(most, row[l]);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t l = 0; l < count; ++l) {
      row[l] = exp_(row[l] - most);
      sum += row[l];
    }
    weighted_sum<SIZE>(row, values + start * d_end, count, size, 1.0f / sum, out + g * d_end);
  }
}

void attend_any(const float* query, int64_t query_stride, int64_t group, const float* keys,
                const float* values, int64_t start, int64_t length, int64_t size, float scale,
                float softcap, const float* biases, int64_t bias_stride, float* logits,
                float* out) {
#define ATTEND(SIZE)                                                                         \
  attend<SIZE>(query, query_stride, group, keys, values, start, length, size, scale, softcap, \
               biases, bias_stride, logits, out)
  switch (size) {
    case 8: ATTEND(8); break;
    case 16: ATTEND(16); break;
    case 24: ATTEND(24); break;
    case 32: ATTEND(32); break;
    case 64: ATTEND(64); break;
    case 128: ATTEND(128); break;
    default: ATTEND(0);
  }
#undef ATTEND
}

}  // namespace
