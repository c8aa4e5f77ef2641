// Prompt lookup: drafts from the sequence itself (Saxena, "Prompt lookup decoding", 2023).
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace as {

// Where the pairs of ids of one history stand. Grows with it, a few nanoseconds an id.
class Lookup {
 public:
  // Forgets all: another history comes.
  void clear();
  // Appends up to `most` ids to the history: those that follow where its last ids stand before. Of the latest kTried
  // places with the last two ids the one with the longest match before them counts, of equal ones the latest. Depends
  // on the history alone, so all ranks find the same.
  void draft(std::vector<int32_t>& history, int most);

 private:
  void extend(const std::vector<int32_t>& history);
  size_t bucket(int32_t first, int32_t second) const;

  std::vector<int32_t> heads_;     // of each bucket: the latest place, or -1; a place is where a pair's second id is
  std::vector<int32_t> previous_;  // of each place: the one before in its bucket
};

}  // namespace as
