// SPDX-License-Identifier: Apache-2.0
#include "artifact.h"

#include <tvm/ffi/c_api.h>

#include <cstring>
#include <fstream>

#include "failure.h"
#include "machine.h"
#include "seal.h"

namespace convgrad {
namespace {

std::string Release(const std::string& version) {
  const std::size_t first = version.find('.');
  return version.substr(0, version.find('.', first == std::string::npos ? first : first + 1));
}

void CheckMachine(const Artifact& artifact, const Json& manifest) {
  const Json target = Json::Parse(manifest.At("target").Text(), artifact.path + ": " + kArtifact.noun);
  if (target.At("kind").Text() != "llvm") {
    throw Failure(artifact.path + ": compiled for " + target.At("kind").Text() + ", and this library runs on CPUs.");
  }
  char header[20] = "";
  std::ifstream(artifact.path, std::ios::binary).read(header, sizeof(header));
  const int machine = static_cast<unsigned char>(header[18]) | static_cast<unsigned char>(header[19]) << 8;
  if (std::memcmp(header, "\x7f" "ELF", 4) != 0 || machine != kElfMachine) {
    throw Failure(artifact.path + ": its code is not a shared library for " + kArchitecture +
                  "; build the step for this machine, see `convgrad build --target`.");
  }
  std::string missing;
  for (const Json& feature : manifest.At("cpu_features").Items()) {
    if (CpuFeatures().count(feature.Text()) == 0) missing += (missing.empty() ? "" : ", ") + feature.Text();
  }
  if (!missing.empty()) {
    throw Failure(artifact.path + ": compiled for a CPU with " + missing +
                  ", which this one lacks; build it for this machine, see `convgrad build --target`.");
  }
}

void CheckVersions(const Artifact& artifact, const Json& manifest) {
  TVMFFIVersion version;
  TVMFFIGetVersion(&version);
  const std::string here = std::to_string(version.major) + "." + std::to_string(version.minor);
  const std::string made = manifest.At("versions").At("tvm_ffi").Text();
  if (Release(made) != here) {
    throw Failure(artifact.path + ": compiled with apache-tvm-ffi " + made + ", and " + here +
                  " is loaded; their libraries do not fit together, so build the step again.");
  }
#ifdef CONVGRAD_TVM_VERSION  // that of the libtvm_runtime which this library was linked with
  const std::string tvm = manifest.At("versions").At("tvm").Text();
  if (Release(tvm) != Release(CONVGRAD_TVM_VERSION)) {
    throw Failure(artifact.path + ": compiled with Apache TVM " + tvm + ", and this library is for " +
                  CONVGRAD_TVM_VERSION + "; their libraries do not fit together, so build the step again.");
  }
#endif
}

// Class numbers of the predictions [batch, classes, ...], of libraries that were built before targets had ranges.
void SetClasses(Artifact* artifact, const Json& options) {
  Spec& target = *artifact->target;
  const std::vector<std::int64_t>& shape = artifact->prediction.shape;
  if (target.range || target.type.code != kDLInt || shape.size() < 2 || shape[1] == kFree) return;
  if (options.Has("loss") && options.At("loss").Text() == "model") return;  // nobody knows what its target means
  Range range;
  range.high = shape[1] - 1, range.kind = "classes";
  if (options.Has("ignore_index") && !options.At("ignore_index").IsNull()) {
    const std::int64_t ignored = options.At("ignore_index").Integer();
    if (ignored < 0 || ignored >= shape[1]) range.others.push_back(ignored);
  }
  target.range = range;
}

}  // namespace

Artifact Artifact::Read(const std::string& path) {
  const Sealed sealed = Unseal(kArtifact, path);
  Artifact artifact;
  artifact.path = path, artifact.id = sealed.id, artifact.manifest = sealed.manifest;
  const Json manifest = Json::Parse(sealed.manifest, path + ": " + kArtifact.noun);
  CheckVersions(artifact, manifest);
  CheckMachine(artifact, manifest);
  const Json schema = manifest.At("schema"), options = manifest.At("options");
  for (const Json& entry : schema.At("inputs").Items()) artifact.inputs.push_back(Spec::Of(entry));
  for (const Json& entry : schema.At("state").Items()) {
    artifact.state.push_back(Spec::Of(entry));
    for (std::int64_t extent : artifact.state.back().shape) {
      if (extent == kFree) entry.At("shape").Refuse("has a free extent");
    }
  }
  if (artifact.inputs.empty()) schema.At("inputs").Refuse("has none");
  artifact.prediction = Spec::Of(schema.At("prediction"));
  if (schema.Has("target")) {
    artifact.target = Spec::Of(schema.At("target"));
    artifact.rate = options.At("lr").Number();
  }
  artifact.split = schema.Has("flat");
  if (manifest.Has("step")) artifact.step = manifest.At("step").Text();
  if (artifact.target) SetClasses(&artifact, options);
  return artifact;
}

}  // namespace convgrad
