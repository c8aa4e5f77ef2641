#include "comm/expert_panels.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace as {
namespace {

constexpr char kMagic[8] = "as-panl";
constexpr const char* kPurpose = "experts' weights";
static_assert(std::is_trivially_copyable_v<ExpertLayer> && alignof(ExpertLayer) <= 8, "shared between processes");

}  // namespace

struct ExpertPanels::Address {
  char magic[8];
  uint64_t layer_bytes;  // of this build
  SharedBlock::Name matrices, description;
  uint64_t matrices_bytes, used_bytes, description_bytes;
};

std::string ExpertPanels::address(const SharedBlock& matrices, size_t bytes, const SharedBlock& description) {
  Address own{};
  std::memcpy(own.magic, kMagic, sizeof kMagic);
  own.layer_bytes = sizeof(ExpertLayer), own.matrices = matrices.name(), own.description = description.name();
  own.matrices_bytes = matrices.size(), own.used_bytes = bytes, own.description_bytes = description.size();
  return std::string(reinterpret_cast<const char*>(&own), sizeof own);
}

ExpertPanels::ExpertPanels(const std::vector<std::string>& addresses) {
  if (addresses.empty()) throw std::invalid_argument("there are no ranks of experts");
  for (const std::string& address : addresses) {
    Address other;
    if (address.size() != sizeof other) throw std::invalid_argument("the address of a rank's experts is incomplete");
    std::memcpy(&other, address.data(), sizeof other);
    if (std::memcmp(other.magic, kMagic, sizeof kMagic) || other.layer_bytes != sizeof(ExpertLayer) ||
        other.used_bytes > other.matrices_bytes)
      throw std::invalid_argument("the address of a rank's experts is of another build");
    ranks_.push_back({SharedBlock(other.matrices, other.matrices_bytes, kPurpose),
                      SharedBlock(other.description, other.description_bytes, kPurpose), other.used_bytes});
    check((int)ranks_.size() - 1);
  }
}

// Checks that what a rank describes lies in its memory, and is what the first rank has.
void ExpertPanels::check(int rank) const {
  const Rank& r = ranks_[rank];
  const auto fits = [](uint64_t first, uint64_t bytes, uint64_t all) { return first <= all && bytes <= all - first; };
  const auto refuse = [&] {
    throw std::invalid_argument("rank " + std::to_string(1 + rank) + " describes experts that it does not have");
  };
  const uint64_t described = r.description.size();
  if (described < sizeof(ExpertDescription)) refuse();
  const int64_t count = description(rank).layers;
  if (count < 1 || count != layers() || (uint64_t)count > (described - sizeof(ExpertDescription)) / sizeof(ExpertLayer))
    refuse();
  for (int i = 0; i < count; i++) {
    const ExpertLayer& own = layer(rank, i);
    if (own.begin < 0 || own.end <= own.begin) refuse();
    for (const ExpertStack* stack : {&own.gate_up, &own.down}) {
      const Packed& m = stack->layout;
      if (!fits(stack->panels, (uint64_t)own.experts() * stack->bytes(), r.bytes) ||
          (stack->bias && !fits(stack->bias, sizeof(float) * (uint64_t)own.experts() * m.n, described)) ||
          (stack->order && !fits(stack->order, sizeof(int) * (uint64_t)m.k, described)))
        refuse();
    }
  }
}

}  // namespace as
