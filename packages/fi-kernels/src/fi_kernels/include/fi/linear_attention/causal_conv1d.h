// Parameters of causal_conv1d, shared by launcher, CPU kernel and device code.
#pragma once
#include "fi/divisor.h"
#include "fi/tables.h"

namespace fi {

// For each token t of a sequence and each channel c, with the last width - 1 inputs before the call as x[c, < 0]:
//   out[c, t] = act(bias[c] + sum_k weight[c, k] x[c, t - width + 1 + k]), sums from k = 0 on
// A state holds inputs of a channel, the oldest first. Strides are in elements; each sequence has a row of the tables.
struct CausalConv1dParams {
  void* out;                             // [sequences, tokens, dim], or [total_tokens, dim] with offsets
  const void* x;                         // as out
  const void* weight;                    // [dim, width]
  const void* bias;                      // [dim], or null
  void* states;                          // [slots, dim, length]
  int64_t x_strides[3], out_strides[3];  // sequence, token, channel
  int64_t weight_strides[2], bias_stride;
  int64_t state_strides[3];  // slot, channel, input
  IndexTable offsets;        // [sequences + 1], or absent
  IndexTable slots;          // [sequences] or [sequences, blocks]; absent: the slot of sequence i is i
  IndexTable from_column;    // [sequences]: of the slot that holds the inputs before; absent: 0
  IndexTable to_column;      // [sequences]: of the slot that takes the last inputs; absent: the one read
  IndexTable first_column;   // [sequences]: of the slot that takes the inputs at the first multiple of block_tokens
  IndexTable computed;       // [sequences]: tokens before those of the call
  IndexTable accepted;       // [sequences], or absent: the inputs before are those from number accepted - 1 on
  const uint8_t* has_state;  // [sequences]: whether there are inputs before, else zeros; null: everywhere
  int64_t has_stride;
  int64_t pad_slot, null_slot;  // these and negative slots are padding
  int64_t block_tokens;         // 0, or the tokens of a block, at whose end the state is stored, too
  int32_t sequences, tokens, dim;
  int32_t tile_tokens;    // of a CTA; 0: all tokens of a sequence
  Divisor channel_tiles;  // CTAs that share the channels
  bool reads_states, silu, state_vectors;

  // The tokens of the call that sequence n has, and the first of them in the packed ones.
  FI_HOST_DEVICE int64_t begin_of(int64_t n) const { return offsets.data ? offsets.at(n) : 0; }
  FI_HOST_DEVICE int64_t length_of(int64_t n) const {
    return offsets.data ? offsets.at(n + 1) - offsets.at(n) : tokens;
  }
  FI_HOST_DEVICE int64_t slot_in(int64_t n, const IndexTable& column) const {
    return slots.or_row(n, column.data ? column.at(n) : 0);
  }
  FI_HOST_DEVICE bool is_padding(int64_t slot) const {
    return slots.data && (slot < 0 || slot == pad_slot || slot == null_slot);
  }
  FI_HOST_DEVICE bool has_history(int64_t n) const { return reads_states && (!has_state || has_state[n * has_stride]); }
  FI_HOST_DEVICE int64_t first_input(int64_t n) const { return accepted.data ? accepted.at(n) - 1 : 0; }

  // The states that sequence n stores: number 0 is the last, number i > 0 that at the end of the i-th block.
  FI_HOST_DEVICE int64_t stored_states(int64_t n) const {
    return block_tokens ? 1 + to_column.at(n) - first_column.at(n) : 1;
  }
  // How many tokens of the call a stored state has seen.
  FI_HOST_DEVICE int64_t stored_after(int64_t n, int64_t length, int64_t i) const {
    return i == 0 ? length : i * block_tokens - (computed.data ? computed.at(n) % block_tokens : 0);
  }
  FI_HOST_DEVICE int64_t stored_slot(int64_t n, int64_t from, int64_t i) const {
    if (i > 0) return slots.at(n, first_column.at(n) + i - 1);
    return to_column.data ? slot_in(n, to_column) : from;
  }
};

}  // namespace fi
