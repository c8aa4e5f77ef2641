#pragma once

namespace as {

enum class SourceType { f32, f16, bf16 };  // of a checkpoint's values

}  // namespace as
