// SPDX-License-Identifier: Apache-2.0
#include "checkpoint.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <cstring>

#include "failure.h"
#include "json.h"
#include "seal.h"

namespace convgrad {
namespace {

using Object = ffi::Map<ffi::Any, ffi::Any>;

constexpr char kLosses[] = "losses";
constexpr char kState[] = "state/";

ffi::String Key(const char* name) { return ffi::String(name); }

std::string Described(const std::string& path) { return path + ": " + kCheckpoint.noun; }

// One array of the payload, as the manifest has it.
ffi::Any Entry(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape,
               std::size_t offset) {
  ffi::Array<ffi::Any> extents;
  for (std::int64_t extent : shape) extents.push_back(extent);
  Object entry;
  entry.Set(Key("name"), ffi::String(name));
  entry.Set(Key("dtype"), ffi::String(dtype));
  entry.Set(Key("shape"), extents);
  entry.Set(Key("offset"), static_cast<std::int64_t>(offset));
  return entry;
}

void Append(std::vector<char>* payload, const void* data, std::size_t bytes) {
  if (bytes == 0) return;
  const std::size_t at = payload->size();
  payload->resize(at + bytes);
  std::memcpy(payload->data() + at, data, bytes);
}

std::int64_t AtLeast(const Json& fields, const char* name, std::int64_t least, std::int64_t missing) {
  if (!fields.Has(name) && missing >= least) return missing;
  const std::int64_t value = fields.At(name).Integer();
  if (value < least) fields.At(name).Refuse("is " + std::to_string(value) + ", less than " + std::to_string(least));
  return value;
}

Progress ProgressIn(const Json& manifest, const Artifact& artifact, const std::string& path) {
  const Json fields = manifest.At("progress");
  const std::string step = manifest.Has("step") ? manifest.At("step").Text() : "";
  // A build of the same step for another machine goes on, too.
  if (fields.At("artifact").Text() != artifact.id && (step.empty() || step != artifact.step)) {
    throw Failure(path + ": a checkpoint of another artifact, " + fields.At("artifact").Text().substr(0, 12) +
                  "…; load it with the library that it was made with.");
  }
  fields.At("data").Text();
  Progress progress;
  progress.fields = fields.value();
  progress.seed = AtLeast(fields, "seed", 0, -1);
  progress.epoch = AtLeast(fields, "epoch", 0, 0);
  progress.position = AtLeast(fields, "position", 0, 0);
  progress.batch = AtLeast(fields, "batch_size", 1, -1);
  progress.rate = fields.At("lr").Number();
  const std::int64_t parts = AtLeast(fields, "micro_batches", 1, 1);
  if (progress.batch % parts != 0) fields.At("batch_size").Refuse("is not a multiple of micro_batches");
  if (fields.Has("schedule")) fields.At("schedule").Text();
  if (fields.Has("monitor")) fields.At("monitor").Text();
  return progress;
}

// The bytes of an entry of the payload.
const char* Place(const Json& entry, std::size_t bytes, const std::vector<char>& payload) {
  const std::int64_t offset = entry.At("offset").Integer();
  if (offset < 0 || static_cast<std::size_t>(offset) > payload.size() || bytes > payload.size() - offset) {
    entry.At("offset").Refuse("is outside of the file");
  }
  return payload.data() + offset;
}

}  // namespace

void SaveCheckpoint(const Session& session, const std::string& path) {
  const Artifact& artifact = session.artifact();
  if (!artifact.target) throw Failure(artifact.path + ": an inference library, which has no state to save.");
  const Progress& progress = session.progress;
  std::vector<char> payload;
  ffi::Array<ffi::Any> arrays;
  arrays.push_back(Entry(kLosses, "float64", {static_cast<std::int64_t>(progress.losses.size())}, 0));
  Append(&payload, progress.losses.data(), progress.losses.size() * sizeof(double));
  for (std::size_t i = 0; i < session.state().size(); ++i) {
    const ffi::Tensor& tensor = session.state()[i];
    arrays.push_back(Entry(kState + artifact.state[i].name, artifact.state[i].dtype, ShapeOf(tensor), payload.size()));
    Append(&payload, tensor.data_ptr(), BytesOf(tensor));
  }
  // What this library does not know, such as the best validation, stays.
  Object fields;
  if (const auto kept = progress.fields.as<Object>()) {
    for (const auto& [name, value] : *kept) fields.Set(name, value);
  }
  const std::int64_t fixed = artifact.inputs[0].shape.empty() ? kFree : artifact.inputs[0].shape[0];
  fields.Set(Key("artifact"), ffi::String(artifact.id));
  // "" means data that are known to this program only.
  if (progress.trained || fields.count(Key("data")) == 0) fields.Set(Key("data"), ffi::String(""));
  fields.Set(Key("seed"), progress.seed);
  fields.Set(Key("epoch"), progress.epoch);
  fields.Set(Key("position"), progress.position);
  fields.Set(Key("lr"), progress.rate);
  if (fields.count(Key("batch_size")) == 0) {
    fields.Set(Key("batch_size"), fixed > 0 ? fixed : std::max<std::int64_t>(progress.batch, 1));
  }
  Object manifest;
  manifest.Set(Key("progress"), fields);
  manifest.Set(Key("arrays"), arrays);
  if (!artifact.step.empty()) manifest.Set(Key("step"), ffi::String(artifact.step));
  WriteSealed(kCheckpoint, path, payload, Written(manifest));
}

void LoadCheckpoint(Session* session, const std::string& path) {
  const Artifact& artifact = session->artifact();
  if (!artifact.target) throw Failure(artifact.path + ": an inference library, which takes no checkpoint.");
  std::vector<char> payload;
  const Sealed sealed = Unseal(kCheckpoint, path, &payload);
  const Json manifest = Json::Parse(sealed.manifest, Described(path));
  Progress progress = ProgressIn(manifest, artifact, path);
  std::map<std::string, Json> arrays;
  for (const Json& entry : manifest.At("arrays").Items()) {
    if (!arrays.emplace(entry.At("name").Text(), entry).second) entry.At("name").Refuse("is there twice");
  }
  if (arrays.size() != artifact.state.size() + 1) manifest.At("arrays").Refuse("has another number of arrays");
  std::vector<ffi::Tensor> state;
  for (const Spec& spec : artifact.state) {
    const auto found = arrays.find(kState + spec.name);
    if (found == arrays.end()) manifest.At("arrays").Refuse("has no " + spec.name);
    const Spec stored = Spec::Of(found->second);
    if (stored.shape != spec.shape || stored.dtype != spec.dtype) {
      found->second.Refuse("is " + stored.Shown() + ", and " + spec.name + " of the step is " + spec.Shown());
    }
    const std::size_t bytes = BytesFor(spec.shape, spec.type);
    const char* from = Place(found->second, bytes, payload);
    state.push_back(NewTensor(spec.shape, spec.type));
    if (bytes > 0) std::memcpy(state.back().data_ptr(), from, bytes);
  }
  const auto losses = arrays.find(kLosses);
  if (losses == arrays.end()) manifest.At("arrays").Refuse("has no losses");
  const Spec stored = Spec::Of(losses->second);
  if (stored.dtype != "float64" || stored.shape.size() != 1 || stored.shape[0] == kFree) {
    losses->second.Refuse("is not a vector of float64");
  }
  const std::size_t bytes = BytesFor(stored.shape, stored.type);
  const char* from = Place(losses->second, bytes, payload);
  progress.losses.resize(static_cast<std::size_t>(stored.shape[0]));
  if (bytes > 0) std::memcpy(progress.losses.data(), from, bytes);
  session->Restore(std::move(state), std::move(progress));
}

}  // namespace convgrad
