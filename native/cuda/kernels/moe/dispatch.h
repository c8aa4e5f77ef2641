// The exchange with ranks of experts, which compute on the host's CPUs (comm/expert_exchange.h).
#pragma once
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {

constexpr int kMostExpertRanks = 16;

// What the GPU knows of its messages.
struct MessageState {
  uint32_t messages = 0, rows = 0;      // so far; of the latest one
  uint32_t ended = 0, given_up = 0;     // CTAs that have written their part; whether a rank has missed the time limit
  uint64_t sent_at = 0, waited_ns = 0;  // when the latest one was sent, 0: it is answered; until all answers were there
};

// Host memory that is mapped for the GPU: what it sends, what it receives, and flags.
struct ExpertMemory {
  float* rows = nullptr;                            // [rows, width]
  int* chosen = nullptr;                            // [rows, top]
  float* shares = nullptr;                          // [rows, top]
  uint32_t* sent = nullptr;                         // messages so far
  int* latest = nullptr;                            // its layer, rows, outputs, and whether it asks for entries
  int ranks = 0;                                    // of experts
  const float* sums[kMostExpertRanks] = {};         // [rows, width] of each rank
  const uint32_t* returned[kMostExpertRanks] = {};  // messages that it has answered
  MessageState* local = nullptr;                    // in the GPU's memory
  // In host memory: 0, or 1 + the rank of experts that has missed the time limit; waited_ns.
  int* failed = nullptr;
  uint64_t* waited = nullptr;
  uint64_t limit = 0;  // ns
};

// The layer of a message. Padding rows, which are the last ones, are not sent.
struct SentLayer {
  int number = 0;
  bool of_outputs = false;      // its rows are those with outputs, not all
  const int* counts = nullptr;  // of the step without padding: rows, and rows with outputs
};

// Of a layer: which experts the GPU computes itself, and how often rows have chosen each; in its memory.
struct HotExpertsOfLayer {
  const int* hot = nullptr;            // [experts]: not 0: the GPU has it; null: ranks of experts compute all
  uint32_t* uses = nullptr;            // [experts]
  unsigned long long* hits = nullptr;  // entries of hot experts, of all layers
};
// Some of a layer's experts.
struct ExpertSet {
  uint32_t words[kMaxExperts / 32] = {};

  AS_BOTH bool has(int expert) const { return words[expert / 32] >> (expert % 32) & 1; }
  void add(int expert) { words[expert / 32] |= 1u << (expert % 32); }
};

// The entries of a layer where they meet: some on the GPU, the others in messages.
struct MetEntries {
  int top = 0;
  const int* hot = nullptr;       // as above
  const int* chosen = nullptr;    // [rows, top]
  const float* shares = nullptr;  // [rows, top]
  ExpertSet by_ranks;             // their entries, unless they are hot, are in messages; the others on the GPU
  struct Rank {
    int begin = 0, end = 0;          // its experts
    const int* entry_of = nullptr;   // [rows, top]
    const float* entries = nullptr;  // [entries, width]
  } ranks[kMostExpertRanks];
};

// Chooses each row's experts from its logits, as route() does: into routing.entry_of and routing.shares.
void choose_experts(const float* logits, const Router& router, const Routing& routing, const int* where, int rows,
                    const Queue& queue);
// Sends rows x [rows, width] and their choices, -1 for hot experts.
void dispatch_rows(const ExpertMemory& memory, const float* x, int width, const Routing& routing,
                   const HotExpertsOfLayer& hot, const SentLayer& layer, int rows, const Queue& queue);
// The same of a step in which the GPU computes experts, too: rows of which ranks compute no entries are not written.
// The message asks for entries.
void dispatch_part(const ExpertMemory& memory, const float* x, int width, const MetEntries& met, const SentLayer& layer,
                   int rows, const Queue& queue);
// Waits for the ranks' answers by few polls, while the host's memory is copied; what follows finds them.
void await_ranks(const ExpertMemory& memory, const Queue& queue);
// uses[expert] += its entries. chosen: [entries]; negative ones are not counted.
void count_uses(const int* chosen, int entries, uint32_t* uses, const Queue& queue);
// y [rows, width] = the sums of all ranks, added in rank order: ((0 + 1) + 2) + ...; zeros for padding rows.
void returned_sums(const ExpertMemory& memory, float* y, int width, int rows, const Queue& queue);
// The same of ranks that return entries [rows, top, width]: each rank's sum is of its experts in ascending order, as
// combine_experts() has it.
void returned_entries(const ExpertMemory& memory, const MetEntries& met, float* y, int width, int rows,
                      const Queue& queue);

}  // namespace as::cuda
