// Prompt lookup: drafts from the sequence itself (Saxena, "Prompt lookup decoding", 2023).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace as {

// An index of the pairs of ids in one history. Updates cost a few nanoseconds per id.
class Lookup {
 public:
  // Resets the index for another history.
  void clear();
  // Appends up to `most` ids to the history: the ids that followed an earlier occurrence of its last ids. Among the
  // latest kTried occurrences of the last two ids, the longest match wins; the latest one wins ties. The result depends
  // on the history alone, so all ranks agree.
  void draft(std::vector<int32_t>& history, int most);

 private:
  void extend(const std::vector<int32_t>& history);
  size_t bucket(int32_t first, int32_t second) const;

  std::vector<int32_t> heads_;  // of each bucket: the latest place, or -1; a place is the index of a pair's second id
  std::vector<int32_t> previous_;  // of each place: the previous one in its bucket
};

}  // namespace as
