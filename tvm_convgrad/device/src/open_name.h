// SPDX-License-Identifier: Apache-2.0
// The names under which libraries are loaded in this process.
#ifndef CONVGRAD_SRC_OPEN_NAME_H_
#define CONVGRAD_SRC_OPEN_NAME_H_

#include <string>

namespace convgrad {

// A name for dlopen, held while a session has its library. dlopen answers a name that it knows with the library that it
// has, even if another build has replaced the file: such a file is refused while the name is held for another digest.
class OpenName {
 public:
  OpenName(const std::string& path, const std::string& digest);
  ~OpenName();
  OpenName(const OpenName&) = delete;
  OpenName& operator=(const OpenName&) = delete;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace convgrad

#endif  // CONVGRAD_SRC_OPEN_NAME_H_
