// SPDX-License-Identifier: Apache-2.0
// A custom call of XLA that writes zeros.

#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Write(ffi::RemainingArgs, ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    std::memset((*result)->untyped_data(), 0, (*result)->size_bytes());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(convgrad_zeros, Write, ffi::Ffi::Bind().RemainingArgs().RemainingRets());
