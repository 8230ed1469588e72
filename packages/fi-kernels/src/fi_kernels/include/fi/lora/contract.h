// What the host entries of adapters check alike.
#pragma once
#include "fi/host/contents.h"
#include "fi/host/op.h"
#include "fi/tables.h"

namespace fi {

// A table of int32 or int64 numbers for `rows`, which it binds or must agree with.
inline IndexTable lora_table(const Tensor& t, const Tensor& other, Dim& rows) {
  t.is({kI32, kI64}).on(other).shape(rows);
  return {t.data(), t.stride(0), 0, t.dtype().bits == 64};
}

}  // namespace fi
