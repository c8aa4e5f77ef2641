// Masks over the vocabulary that are written while the step runs that needs them: whoever knows a grammar writes them
// when the last step's tokens are known, and the sampling op, which comes last in a step, waits for them.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace as {

// Rows of bits, one for each id of the vocabulary: id i is bit i % 32 of word i / 32, and 1 allows it. A plan names the
// rows that its draws need (batch/plan.h); each is for one step, from clear() to the end of that step.
class Masks {
 public:
  Masks(int rows, int vocab_size);

  int rows() const { return (int)ready_.size(); }
  int words() const { return words_; }  // of a row
  // Not to be written between publish() and the end of the step that needs it.
  uint32_t* row(int index) { return bits_.data() + (size_t)index * words_; }
  // The row is written: whoever waits for it goes on. Throws std::out_of_range for a row that there is not.
  void publish(int index);
  // The row is to be written anew.
  void clear(int index);
  // The row, once it is published. Throws std::runtime_error if it is not within `timeout` seconds, or fail() was
  // called.
  const uint32_t* wait(int index, double timeout);
  // Ends all waits, also later ones, with this message.
  void fail(const std::string& message);

 private:
  void check(int index) const;

  const int words_;
  std::vector<uint32_t> bits_;
  std::mutex mutex_;
  std::condition_variable published_;
  std::vector<char> ready_;
  std::string failure_;
};

}  // namespace as
