// Tables of the experts of each token: a router's weight, as floats [tokens, experts for a row].
#pragma once
#include <cstddef>

namespace as {

// Throws std::invalid_argument unless each of the tokens has `top` different numbers below `experts`: a checkpoint may
// hold anything. values: of the table.
void check_token_experts(const float* table, size_t values, int top, int experts);

}  // namespace as
