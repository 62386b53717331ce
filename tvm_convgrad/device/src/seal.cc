// SPDX-License-Identifier: Apache-2.0
#include "seal.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "failure.h"
#include "sha256.h"

namespace convgrad {

const Kind kArtifact{"CVGSTEP\x01", "a compiled training step", "convgrad build"};
const Kind kCheckpoint{"CVGCKPT\x01", "a checkpoint", "convgrad run --checkpoint-dir"};

namespace {

constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kLengths = 24, kFooter = 64, kChunk = 1 << 20;
constexpr std::uint64_t kLargestManifest = std::uint64_t{64} << 20;

// A file descriptor that is closed.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { Close(); }
  int get() const { return descriptor_; }
  int Close() {
    const int closed = descriptor_ >= 0 ? close(descriptor_) : 0;
    descriptor_ = -1;
    return closed;
  }

 private:
  int descriptor_;
};

std::uint64_t Little(const unsigned char* bytes, int count) {
  std::uint64_t value = 0;
  for (int i = 0; i < count; ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
  return value;
}

void PutLittle(unsigned char* bytes, int count, std::uint64_t value) {
  for (int i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(value >> (8 * i));
}

void ReadAt(int file, const std::string& path, std::uint64_t offset, void* to, std::size_t bytes) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t found = pread(file, at, bytes, static_cast<off_t>(offset));
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) throw Failure(path + ": cannot be read (" + (found ? std::strerror(errno) : "it became shorter") + ").");
    at += found, offset += found, bytes -= found;
  }
}

void WriteAll(int file, const void* from, std::size_t bytes) {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = write(file, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw Failure(std::strerror(errno));
    at += done, bytes -= done;
  }
}

std::string Folder(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// A hidden name beside `path`, as the Python side has it: it removes what a killed process left under such a name.
std::string Temporary(const std::string& path) {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  for (char* c = host; *c; ++c) *c = std::isalnum(static_cast<unsigned char>(*c)) ? *c : '_';
  const std::size_t slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  return (slash == std::string::npos ? "" : path.substr(0, slash + 1)) + "." + name + "." + host + "." +
         std::to_string(getpid()) + ".tmp";
}

}  // namespace

Sealed Unseal(const Kind& kind, const std::string& path, std::vector<char>* payload) {
  const std::string noun = kind.noun, again = "make it again with `" + std::string(kind.maker) + "`.";
  File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (file.get() < 0 || fstat(file.get(), &status) != 0) {
    throw Failure(path + ": cannot be read (" + std::strerror(errno) + "); is the path right?");
  }
  if (!S_ISREG(status.st_mode)) throw Failure(path + ": this is not a file, so it is not " + noun + ".");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  unsigned char footer[kFooter];
  if (size >= kFooter) ReadAt(file.get(), path, size - kFooter, footer, kFooter);
  if (size < kFooter || std::memcmp(footer + 56, kind.magic, 8) != 0) {
    throw Failure(path + ": not " + noun + ", or a truncated one: its last bytes are not its seal; " + again);
  }
  const std::uint64_t payload_bytes = Little(footer, 8), manifest_bytes = Little(footer + 8, 8);
  const std::uint64_t version = Little(footer + 16, 4);
  if (version != kVersion) {
    throw Failure(path + ": " + noun + " of format version " + std::to_string(version) +
                  ", and this library reads version " + std::to_string(kVersion) + "; " + again);
  }
  // Subtractions, as sums of such numbers may overflow.
  if (payload_bytes > size - kFooter || manifest_bytes != size - kFooter - payload_bytes) {
    throw Failure(path + ": " + noun + " whose length is not what its seal says; it was truncated or added to, " + again);
  }
  if (manifest_bytes > kLargestManifest) {
    throw Failure(path + ": " + noun + " with a manifest of " + std::to_string(manifest_bytes) +
                  " bytes, which is not a possible size; " + again);
  }
  Sha256 digest;
  std::vector<char> chunk;
  if (payload != nullptr) {
    payload->resize(payload_bytes);
    ReadAt(file.get(), path, 0, payload->data(), payload_bytes);
    digest.Update(payload->data(), payload_bytes);
  } else {
    chunk.resize(static_cast<std::size_t>(std::min<std::uint64_t>(kChunk, payload_bytes)));
    for (std::uint64_t at = 0; at < payload_bytes; at += chunk.size()) {
      const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(chunk.size(), payload_bytes - at));
      ReadAt(file.get(), path, at, chunk.data(), bytes);
      digest.Update(chunk.data(), bytes);
    }
  }
  Sealed sealed;
  sealed.payload = payload_bytes;
  sealed.manifest.resize(manifest_bytes);
  ReadAt(file.get(), path, payload_bytes, sealed.manifest.data(), manifest_bytes);
  digest.Update(sealed.manifest.data(), manifest_bytes);
  digest.Update(footer, kLengths);
  const Digest found = digest.Finish();
  if (std::memcmp(found.data(), footer + kLengths, found.size()) != 0) {
    throw Failure(path + ": " + noun + " whose content does not match its SHA-256; it is damaged, " + again);
  }
  sealed.id = Hex(found);
  return sealed;
}

void WriteSealed(const Kind& kind, const std::string& path, const std::vector<char>& payload,
                 const std::string& manifest) {
  unsigned char footer[kFooter] = {};
  PutLittle(footer, 8, payload.size());
  PutLittle(footer + 8, 8, manifest.size());
  PutLittle(footer + 16, 4, kVersion);
  Sha256 digest;
  digest.Update(payload.data(), payload.size());
  digest.Update(manifest.data(), manifest.size());
  digest.Update(footer, kLengths);
  const Digest found = digest.Finish();
  std::memcpy(footer + kLengths, found.data(), found.size());
  std::memcpy(footer + 56, kind.magic, 8);
  const std::string temporary = Temporary(path);
  try {
    File file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (file.get() < 0) throw Failure(std::strerror(errno));
    WriteAll(file.get(), payload.data(), payload.size());
    WriteAll(file.get(), manifest.data(), manifest.size());
    WriteAll(file.get(), footer, kFooter);
    if (fsync(file.get()) != 0 || file.Close() != 0) throw Failure(std::strerror(errno));
    if (std::rename(temporary.c_str(), path.c_str()) != 0) throw Failure(std::strerror(errno));
  } catch (const Failure& reason) {
    unlink(temporary.c_str());
    throw Failure(path + ": cannot be written (" + reason.what() + "); is the folder there, and writable?");
  }
  File folder(open(Folder(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() >= 0) fsync(folder.get());  // some file systems refuse it; the file itself is written
}

}  // namespace convgrad
