// What Python calls. Plain C++ without any library: it builds in seconds, and the result does not
// depend on the version of torch.

#include "forward.h"

extern "C" {

// Stores each row's new key and value at its length and attends over the row.
//   query [B, H, D], new_key and new_value [B, K, D]: strides of B and of heads are given.
//   keys, values [S, K, L, D]: strides of S and K are given, positions adjoin.
//   out [B, H, D] contiguous.
//   window: keys that a query sees, 0 for all.  softcap: 0 for none.  biases [H, L] or null.
// Returns the first row whose length is beyond the workspace, before anything is written; or -1.
int64_t decode_attention(const float* query, int64_t query_row, int64_t query_head,
                         const float* new_key, int64_t key_row, int64_t key_head,
                         const float* new_value, int64_t value_row, int64_t value_head,
                         float* keys, float* values, int64_t slot_stride, int64_t head_stride,
                         int64_t value_slot_stride, int64_t value_head_stride,
                         const int64_t* slots, const int64_t* lengths, float* out, int64_t rows,
                         int64_t heads, int64_t kv_heads, int64_t positions, int64_t size,
                         float scale, int64_t window, float softcap, const float* biases,
                         int64_t bias_stride) {
  int64_t longest = 0;
  for (int64_t b = 0; b < rows; ++b) {
    if (lengths[b] < 0 || lengths[b] >= positions) return b;
    longest = std::max(longest, lengths[b]);
  }
  const int64_t group = heads / kv_heads;
  std::vector<float> logits(group * (longest + 1));
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t length = lengths[b];
    const int64_t start = window > 0 ? std::max<int64_t>(0, length + 1 - window) : 0;
    for (int64_t k = 0; k < kv_heads; ++k) {
      float* own_keys = keys + slots[b] * slot_stride + k * head_stride;
      float* own_values = values + slots[b] * value_slot_stride + k * value_head_stride;
      const float* key = new_key + b * key_row + k * key_head;
      const float* value = new_value + b * value_row + k * value_head;
      std::copy(key, key + size, own_keys + length * size);
      std::copy(value, value + size, own_values + length * size);
      const float* own_query = query + b * query_row + k * group * query_head;
      const float* own_biases = biases ? biases + k * group * bias_stride : nullptr;
      float* own_out = out + (b * heads + k * group) * size;
      attend_any(own_query, query_head, group, own_keys, own_values, start, length, size, scale,
                 softcap, own_biases, bias_stride, logits.data(), own_out);
    }
  }
  return -1;
}

// Tokens through a whole decoder, from ids to logits: one of each row, or the prompts of rows.
//   tokens, at, slots [N]: id of each token, its position, and its row's slot. The tokens of a
//     row follow each other: each sees those before it.
//   rows [N]: which row of the logits a token's go to, -1 for none.
//   cos, sin [positions, head size]: rotation of each position; null where there is none.
//   logits [B, V] contiguous.
// Returns the first token whose id or position is out of range, before anything is written; or -1.
int64_t forward(const Decoder* decoder, const Layer* layers, int64_t layer_count,
                const int64_t* tokens, const int64_t* at, const int64_t* slots,
                const int64_t* rows, const float* cos, const float* sin, int64_t count,
                int64_t positions, float* logits) {
  for (int64_t n = 0; n < count; ++n) {
    const bool known = tokens[n] >= 0 && tokens[n] < decoder->vocabulary;
    if (!known || at[n] < 0 || at[n] >= positions) return n;
  }
  Scratch scratch;
  for (int64_t n = 0; n < count; n += kLanes)
    forward_block(*decoder, layers, layer_count, tokens + n, at + n, slots + n, rows + n, cos,
                  sin, std::min<int64_t>(kLanes, count - n), logits, scratch);
  return -1;
}

}  // extern "C"
