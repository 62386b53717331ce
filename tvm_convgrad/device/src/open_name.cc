// SPDX-License-Identifier: Apache-2.0
#include "open_name.h"

#include <map>
#include <mutex>

#include "failure.h"

namespace convgrad {
namespace {

struct Held {
  std::string digest;
  int sessions = 0;
};

std::mutex& Lock() {
  static std::mutex* lock = new std::mutex;  // sessions may outlive static objects
  return *lock;
}

std::map<std::string, Held>& Names() {
  static auto* names = new std::map<std::string, Held>;
  return *names;
}

}  // namespace

// dlopen looks a name without a slash up elsewhere.
OpenName::OpenName(const std::string& path, const std::string& digest)
    : text_(path.find('/') == std::string::npos ? "./" + path : path) {
  const std::lock_guard<std::mutex> guard(Lock());
  Held& held = Names()[text_];
  if (held.sessions > 0 && held.digest != digest) {
    throw Failure(path + ": another build of this file is open; close its sessions first, or give it another name.");
  }
  held.digest = digest;
  ++held.sessions;
}

OpenName::~OpenName() {
  const std::lock_guard<std::mutex> guard(Lock());
  if (--Names()[text_].sessions == 0) Names().erase(text_);
}

}  // namespace convgrad
