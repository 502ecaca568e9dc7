// 16 tokens through a whole decoder, in fp32: one of each of 16 rows, or parts of prompts.

#pragma once

#include <vector>

#include "attention.h"

namespace {

// 16 tokens are side by side: activations are [features][16], so that every operation but
// attention is the same arithmetic on whole vectors of tokens. A sum over features runs in order,
// whatever the number of tokens.
constexpr int kLanes = 16, kOutputs = 4;

// Layout shared with compiled_decoder.py: fields of 8 bytes each.
struct Linear {
  const float *weight, *bias;  // [out, in]; null without a bias
  int64_t in, out;
};
struct Norm {
  const float *weight, *bias;
  double eps;
  int64_t rms;
};
struct Layer {
  Norm input_norm, query_norm, key_norm, mlp_norm;  // heads: weight null where not normalised
  Linear query, key, value, output, gate, up, down;  // gate: weight null where there is none
  int64_t activation, heads, kv_heads, size;
  double scale;
  int64_t window;
  float *keys, *values;
  int64_t key_slot, key_head, value_slot, value_head;
};
struct Decoder {
  const float *embedding, *positions;  // positions: null where they are not learned
  int64_t features, vocabulary, offset;
  Norm norm;
  Linear head;
};
struct Scratch {
  std::vector<float> x, y, delta, query, key, value, mixed, gate, up, row, out, logits;
};

float* room(std::vector<float>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

void apply(const Linear& m, const float* x, float* out) {
  for (int64_t o = 0; o < m.out; o += kOutputs) {
    const float* row[kOutputs];
    for (int j = 0; j < kOutputs; ++j) row[j] = m.weight + std::min(o + j, m.out - 1) * m.in;
    float sums[kOutputs][kLanes] = {{0.0f}};
    for (int64_t i = 0; i < m.in; ++i)
      for (int j = 0; j < kOutputs; ++j) {
        const float factor = row[j][i];
#pragma omp simd
        for (int t = 0; t < kLanes; ++t) sums[j][t] += factor * x[i * kLanes + t];
      }
    for (int64_t j = 0; j < std::min<int64_t>(kOutputs, m.out - o); ++j) {
      const float bias = m.bias ? m.bias[o + j] : 0.0f;
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) out[(o + j) * kLanes + t] = sums[j][t] + bias;
    }
  }
}

void apply(const Norm& norm, const float* x, float* out, int64_t size) {
  float mean[kLanes] = {0.0f}, squares[kLanes] = {0.0f};
  if (!norm.rms) {
    for (int64_t e = 0; e < size; ++e)
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) mean[t] += x[e * kLanes + t];
    for (int t = 0; t < kLanes; ++t) mean[t] /= size;
  }
  for (int64_t e = 0; e < size; ++e)
#pragma omp simd
    for (int t = 0; t < kLanes; ++t) {
      const float centred = x[e * kLanes + t] - mean[t];
      squares[t] += centred * centred;
    }
  const float eps = static_cast<float>(norm.eps);
  for (int t = 0; t < kLanes; ++t) squares[t] = 1.0f / std::sqrt(squares[t] / size + eps);
  for (int64_t e = 0; e < size; ++e) {
    const float weight = norm.weight[e], bias = norm.bias ? norm.bias[e] : 0.0f;
#pragma omp simd
    for (int t = 0; t < kLanes; ++t)
      out[e * kLanes + t] = (x[e * kLanes + t] - mean[t]) * squares[t] * weight + bias;
  }
}

void activate(float* x, int64_t count, int64_t kind) {
  if (kind == 0) {  // relu
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
  } else if (kind == 1) {  // silu
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + exp_(-x[i]));
  } else if (kind == 2) {  // gelu
    for (int64_t i = 0; i < count; ++i)
      x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  } else {  // gelu_new
    for (int64_t i = 0; i < count; ++i)
      x[i] = 0.5f * x[i] *
             (1.0f + std::tanh(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
  }
}

// Heads [count * size][16] in halves; cos and sin [size][16].
void rotate(float* heads, const float* cos, const float* sin, int64_t count, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t h = 0; h < count; ++h)
    for (int64_t d = 0; d < half; ++d) {
      float* first = heads + (h * size + d) * kLanes;
      float* second = first + half * kLanes;
      const int64_t a = d * kLanes, b = (half + d) * kLanes;
#pragma omp simd
      for (int t = 0; t < kLanes; ++t) {
        const float x = first[t], y = second[t];
        first[t] = x * cos[a + t] - y * sin[a + t];
        second[t] = y * cos[b + t] + x * sin[b + t];
      }
    }
}

// `mixed` [heads * size][16]: attention of `width` tokens, each after its keys and values and
// those of the tokens before it are stored.
void attend_rows(const Layer& layer, const float* query, const float* key, const float* value,
                 const int64_t* at, const int64_t* slots, int64_t width, float* mixed,
                 Scratch& scratch) {
  const int64_t size = layer.size, group = layer.heads / layer.kv_heads;
  float* row = room(scratch.row, layer.heads * size);
  float* out = room(scratch.out, layer.heads * size);
  for (int64_t t = 0; t < width; ++t) {
    const int64_t start = layer.window > 0 ? std::max<int64_t>(0, at[t] + 1 - layer.window) : 0;
    float* logits = room(scratch.logits, group * (at[t] + 1));
    for (int64_t i = 0; i < layer.heads * size; ++i) row[i] = query[i * kLanes + t];
    for (int64_t k = 0; k < layer.kv_heads; ++k) {
      float* keys = layer.keys + slots[t] * layer.key_slot + k * layer.key_head;
      float* values = layer.values + slots[t] * layer.value_slot + k * layer.value_head;
      for (int64_t d = 0; d < size; ++d) {
        keys[at[t] * size + d] = key[(k * size + d) * kLanes + t];
        values[at[t] * size + d] = value[(k * size + d) * kLanes + t];
      }
      attend_any(row + k * group * size, size, group, keys, values, start, at[t], size,
                 static_cast<float>(layer.scale), 0.0f, nullptr, 0, logits,
                 out + k * group * size);
    }
    for (int64_t i = 0; i < layer.heads * size; ++i) mixed[i * kLanes + t] = out[i];
  }
}

void forward_block(const Decoder& decoder, const Layer* layers, int64_t layer_count,
                   const int64_t* tokens, const int64_t* at, const int64_t* slots,
                   const int64_t* rows, const float* cos, const float* sin, int64_t width,
                   float* logits, Scratch& scratch) {
  const int64_t features = decoder.features;
  float* x = room(scratch.x, features * kLanes);
  float* y = room(scratch.y, features * kLanes);
  float* delta = room(scratch.delta, features * kLanes);
  std::fill(x, x + features * kLanes, 0.0f);
  for (int64_t t = 0; t < width; ++t)
    for (int64_t e = 0; e < features; ++e) {
      x[e * kLanes + t] = decoder.embedding[tokens[t] * features + e];
      if (decoder.positions)
        x[e * kLanes + t] += decoder.positions[(at[t] + decoder.offset) * features + e];
    }
  std::vector<float> angles;
  if (cos) {
    const int64_t size = layers[0].size;
    angles.resize(2 * size * kLanes);
    for (int64_t t = 0; t < width; ++t)
      for (int64_t d = 0; d < size; ++d) {
        angles[d * kLanes + t] = cos[at[t] * size + d];
        angles[(size + d) * kLanes + t] = sin[at[t] * size + d];
      }
  }
  for (int64_t l = 0; l < layer_count; ++l) {
    const Layer& layer = layers[l];
    float* query = room(scratch.query, layer.query.out * kLanes);
    float* key = room(scratch.key, layer.key.out * kLanes);
    float* value = room(scratch.value, layer.value.out * kLanes);
    float* mixed = room(scratch.mixed, layer.query.out * kLanes);
    float* up = room(scratch.up, layer.up.out * kLanes);
    apply(layer.input_norm, x, y, features);
    apply(layer.query, y, query);
    apply(layer.key, y, key);
    apply(layer.value, y, value);
    if (layer.query_norm.weight)
      for (int64_t h = 0; h < layer.heads; ++h) {
        float* head = query + h * layer.size * kLanes;
        apply(layer.query_norm, head, head, layer.size);
      }
    if (layer.key_norm.weight)
      for (int64_t h = 0; h < layer.kv_heads; ++h) {
        float* head = key + h * layer.size * kLanes;
        apply(layer.key_norm, head, head, layer.size);
      }
    if (cos) {
      rotate(query, angles.data(), angles.data() + layer.size * kLanes, layer.heads, layer.size);
      rotate(key, angles.data(), angles.data() + layer.size * kLanes, layer.kv_heads, layer.size);
    }
    attend_rows(layer, query, key, value, at, slots, width, mixed, scratch);
    apply(layer.output, mixed, delta);
    for (int64_t i = 0; i < features * kLanes; ++i) x[i] += delta[i];
    apply(layer.mlp_norm, x, y, features);
    apply(layer.up, y, up);
    if (layer.gate.weight) {
      float* gate = room(scratch.gate, layer.gate.out * kLanes);
      apply(layer.gate, y, gate);
      activate(gate, layer.gate.out * kLanes, layer.activation);
      for (int64_t i = 0; i < layer.up.out * kLanes; ++i) up[i] *= gate[i];
    } else {
      activate(up, layer.up.out * kLanes, layer.activation);
    }
    apply(layer.down, up, delta);
    for (int64_t i = 0; i < features * kLanes; ++i) x[i] += delta[i];
  }
  if (std::all_of(rows, rows + width, [](int64_t row) { return row < 0; })) return;
  apply(decoder.norm, x, y, features);
  float* turned = room(scratch.gate, decoder.head.out * kLanes);
  apply(decoder.head, y, turned);
  for (int64_t t = 0; t < width; ++t)
    for (int64_t v = 0; rows[t] >= 0 && v < decoder.head.out; ++v)
      logits[rows[t] * decoder.head.out + v] = turned[v * kLanes + t];
}

}  // namespace
