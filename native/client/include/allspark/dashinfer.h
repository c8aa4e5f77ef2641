// The C++ client under the names of DashInfer's csrc/interface/allspark.h: allspark::AsEngine, AsStatus,
// GenerateConfig. Not for files that include code generated from proto/allspark.proto, whose messages have some of
// these names.
#pragma once

#include <ostream>

#include "allspark/client.h"

namespace allspark {

using namespace client;
using AsEngine = client::ClientEngine;

inline std::ostream& operator<<(std::ostream& stream, GenerateRequestStatus status) {
  return stream << ToString(status);
}

}  // namespace allspark
