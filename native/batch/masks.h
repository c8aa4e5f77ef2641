// Token masks for constrained decoding. They are computed in parallel with the forward pass, once the previous tokens
// are known. The sampling op, which is the last op of a step, waits for them.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace as {

// Rows with one bit for each id of the vocabulary: id i is bit i % 32 of word i / 32; 1 allows it. A plan names the row
// that each item samples under (batch/plan.h). A row serves one step, from clear() to the step's end.
class Masks {
 public:
  Masks(int rows, int vocab_size);

  int rows() const { return (int)ready_.size(); }
  int words() const { return words_; }  // per row
  // The row must not be written between publish() and the end of the step that uses it.
  uint32_t* row(int index) { return bits_.data() + (size_t)index * words_; }
  // Marks rows as written and wakes their waiters. Throws std::out_of_range for an index out of range.
  void publish(const std::vector<int>& rows);
  // Marks rows as not written.
  void clear(const std::vector<int>& rows);
  // Waits until the row is published. Throws std::runtime_error after `timeout` seconds or after fail().
  const uint32_t* wait(int index, double timeout);
  // Ends all present and future waits with this message.
  void fail(const std::string& message);

 private:
  void check(int index) const;
  void mark(const std::vector<int>& rows, bool ready);

  const int words_;
  std::vector<uint32_t> bits_;
  std::mutex mutex_;
  std::condition_variable published_;
  std::vector<char> ready_;
  std::string failure_;
};

}  // namespace as
