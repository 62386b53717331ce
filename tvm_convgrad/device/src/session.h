// SPDX-License-Identifier: Apache-2.0
// A loaded library at work: it holds the state and where the run stands.
#ifndef CONVGRAD_SRC_SESSION_H_
#define CONVGRAD_SRC_SESSION_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "artifact.h"
#include "convgrad.h"
#include "open_name.h"
#include "runtime.h"

namespace convgrad {

// Where a run stands, as checkpoints have it.
struct Progress {
  ffi::Any fields;  // the manifest's `progress`, of which this library changes the fields that it has; none in a new run
  std::int64_t seed = 0, batch = 0, epoch = 0, position = 0;
  double rate = 0;
  bool trained = false;  // since the run began or the checkpoint was loaded
  std::vector<double> losses;
};

class Session {
 public:
  explicit Session(const std::string& path);

  float TrainStep(const convgrad_batch& batch, convgrad_buffer predictions);
  float Gradients(const convgrad_batch& batch, std::int64_t number, float* flat, std::size_t size,
                  convgrad_buffer predictions);
  void Apply(const float* flat, std::size_t size);
  float EvalStep(const convgrad_batch& batch, convgrad_buffer predictions);
  void Predict(const convgrad_batch& batch, convgrad_buffer predictions);

  std::size_t FlatSize() const;
  void GetParameters(float* flat, std::size_t size) const;
  void SetParameters(const float* flat, std::size_t size);
  void GetState(const std::string& name, convgrad_buffer value) const;
  void SetState(const std::string& name, convgrad_array value);
  void Reset();

  const Artifact& artifact() const { return artifact_; }
  const std::vector<ffi::Tensor>& state() const { return state_; }
  void Restore(std::vector<ffi::Tensor> state, Progress progress);

  Progress progress;

 private:
  using Arguments = std::vector<ffi::Any>;

  ffi::Any Function(const char* name);
  ffi::Any Run(const char* name, const Arguments& arguments);
  Arguments BatchOf(const convgrad_batch& batch, bool target, bool trains = false);
  void RequireTraining() const;
  void RequireSplit() const;
  std::size_t Number(const std::string& name) const;
  std::vector<std::pair<std::size_t, std::size_t>> Places() const;  // of each parameter: its number, its offset
  void CheckFlat(const void* flat, std::size_t size, bool parameters) const;
  void CheckBuffer(convgrad_buffer predictions, const std::map<std::string, std::int64_t>& known) const;
  ffi::Any State() const;
  void TakeState(const ffi::Any& state);
  ffi::Any Rate() const;
  void Count(double loss);

  Artifact artifact_;
  OpenName name_;  // before what is of the library, which is closed first
  ffi::Any library_, machine_;
  std::map<std::string, ffi::Any> functions_;
  std::vector<ffi::Tensor> state_;
  std::map<std::string, std::int64_t> extents_;  // of the last batch
  std::vector<double> pending_;                  // losses of the gradients since the last update
};

}  // namespace convgrad

#endif  // CONVGRAD_SRC_SESSION_H_
