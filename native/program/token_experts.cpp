#include "program/token_experts.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace as {

void check_token_experts(const float* table, size_t values, int top, int experts) {
  for (size_t token = 0; token < values / top; token++)
    for (int i = 0; i < top; i++) {
      const float* own = table + token * top;
      const bool is_expert = own[i] >= 0 && own[i] < (float)experts && own[i] == std::floor(own[i]);
      if (is_expert && std::find(own, own + i, own[i]) == own + i) continue;
      throw std::invalid_argument("op router: the table's experts of token " + std::to_string(token) + " must be " +
                                  std::to_string(top) + " different numbers from 0 to " + std::to_string(experts - 1));
    }
}

}  // namespace as
