// SPDX-License-Identifier: Apache-2.0
#include "session.h"

#include <tvm/ffi/container/array.h>

#include <cstring>
#include <numeric>

#include "failure.h"

namespace convgrad {
namespace {

constexpr int kPooledAllocator = 2;  // as in tvm/runtime/memory/memory_manager.h
constexpr std::size_t kFlatAlignment = 16;

ffi::Tensor TensorIn(const ffi::Any& value, const std::string& what) {
  const auto tensor = value.as<ffi::Tensor>();
  if (!tensor) throw Failure(what + " is not a tensor; build the library again.");
  return *tensor;
}

ffi::Array<ffi::Any> TupleIn(const ffi::Any& value, std::size_t size, const std::string& what) {
  const auto tuple = value.as<ffi::Array<ffi::Any>>();
  if (!tuple || tuple->size() != size) throw Failure(what + " gave another number of results; build the library again.");
  return *tuple;
}

float LossIn(const ffi::Any& value) {
  const ffi::Tensor loss = TensorIn(value, "the loss");
  const DLDataType type = loss.dtype();
  if (loss.numel() != 1 || type.code != kDLFloat || (type.bits != 32 && type.bits != 64)) {
    throw Failure("the loss is not a float32; build the library again.");
  }
  return type.bits == 32 ? *static_cast<const float*>(loss.data_ptr())
                         : static_cast<float>(*static_cast<const double*>(loss.data_ptr()));
}

void CopyOut(const ffi::Any& value, convgrad_buffer to) {
  if (to.data == nullptr) return;
  const ffi::Tensor tensor = TensorIn(value, "the predictions");
  const std::size_t bytes = BytesOf(tensor);
  if (bytes != to.bytes) {
    throw Failure("the buffer for the predictions has " + std::to_string(to.bytes) + " bytes, and they take " +
                  std::to_string(bytes) + ".");
  }
  if (bytes > 0) std::memcpy(to.data, tensor.data_ptr(), bytes);
}

bool SameType(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

}  // namespace

Session::Session(const std::string& path) : artifact_(Artifact::Read(path)), name_(path, artifact_.id) {
  DefaultThreads();
  library_ = Call(Global("ffi.ModuleLoadFromFile"), {ffi::String(name_.text())}, path);
  machine_ = Call(FunctionOf(library_, "vm_load_executable", path), {}, path);
  Call(FunctionOf(machine_, "vm_initialization", path), {static_cast<int>(kDLCPU), 0, kPooledAllocator}, path);
  Reset();
}

ffi::Any Session::Function(const char* name) {
  const auto found = functions_.find(name);
  if (found != functions_.end()) return found->second;
  return functions_[name] = FunctionOf(machine_, name, artifact_.path);
}

ffi::Any Session::Run(const char* name, const Arguments& arguments) {
  return Call(Function(name), {arguments.begin(), arguments.end()}, artifact_.path + ": " + name);
}

void Session::Reset() {
  if (artifact_.target) TakeState(Run("init", {}));
  progress = Progress();
  progress.rate = artifact_.rate;
  pending_.clear();
}

ffi::Any Session::State() const {
  ffi::Array<ffi::Any> tuple;
  for (const ffi::Tensor& tensor : state_) tuple.push_back(tensor);
  return tuple;
}

void Session::TakeState(const ffi::Any& state) {
  std::vector<ffi::Tensor> taken;
  for (const ffi::Any& value : TupleIn(state, artifact_.state.size(), artifact_.path)) {
    const Spec& spec = artifact_.state[taken.size()];
    const ffi::Tensor tensor = TensorIn(value, "state " + spec.name);
    if (ShapeOf(tensor) != spec.shape || !SameType(tensor.dtype(), spec.type)) {
      throw Failure(artifact_.path + ": state " + spec.name + " is not " + spec.Shown() +
                    ", as its manifest says; build it again.");
    }
    BytesOf(tensor);
    taken.push_back(tensor);
  }
  state_ = std::move(taken);
}

void Session::Restore(std::vector<ffi::Tensor> state, Progress at) {
  state_ = std::move(state);
  progress = std::move(at);
  pending_.clear();
}

void Session::RequireTraining() const {
  if (!artifact_.target) {
    throw Failure(artifact_.path + ": an inference library, which has predict alone; give one of `convgrad build`.");
  }
}

void Session::RequireSplit() const {
  RequireTraining();
  if (!artifact_.split) {
    throw Failure(artifact_.path + ": it has no functions gradients, apply and evaluate; build it with --split.");
  }
}

Session::Arguments Session::BatchOf(const convgrad_batch& batch, bool target, bool trains) {
  if (batch.inputs == nullptr && batch.input_count > 0) throw Failure("the inputs are NULL.");
  if (batch.input_count != artifact_.inputs.size()) {
    throw Failure("the model takes " + std::to_string(artifact_.inputs.size()) + " inputs, but " +
                  std::to_string(batch.input_count) + " were given.");
  }
  std::map<std::string, std::int64_t> known;
  Arguments arguments;
  const auto add = [&](const Spec& spec, const convgrad_array& array, const std::string& what) {
    const auto shape = spec.Accept(array.bytes, &known, what);
    if (array.data == nullptr && array.bytes > 0) throw Failure(what + " is NULL.");
    const ffi::Tensor tensor = TensorOf(array.data, array.bytes, shape, spec.type);
    if (spec.range) spec.range->Check(tensor.data_ptr(), spec.type, shape, what);
    arguments.push_back(tensor);
  };
  for (std::size_t i = 0; i < batch.input_count; ++i) {
    add(artifact_.inputs[i], batch.inputs[i], "the input '" + artifact_.inputs[i].name + "'");
  }
  if (target) add(*artifact_.target, batch.target, "the target");
  const auto rows = ShapeOf(arguments[0].cast<ffi::Tensor>());
  const std::int64_t least = artifact_.inputs[0].least;
  if (trains && !rows.empty() && rows[0] < least) {
    throw Failure("the input has " + std::to_string(rows[0]) +
                  " sample, of which a batch norm has one value for each channel and no variance; give at least " +
                  std::to_string(least) + ", or build with --bn frozen.");
  }
  progress.batch = progress.batch != 0 || rows.empty() ? progress.batch : rows[0];
  extents_ = std::move(known);
  return arguments;
}

void Session::CheckBuffer(convgrad_buffer predictions, const std::map<std::string, std::int64_t>& known) const {
  if (predictions.data == nullptr) return;
  std::vector<std::int64_t> shape = artifact_.prediction.shape;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != kFree) continue;
    const auto found = known.find(artifact_.prediction.symbols[i]);
    if (found == known.end()) return;  // it is known after the call
    shape[i] = found->second;
  }
  const std::size_t bytes = BytesFor(shape, artifact_.prediction.type);
  if (bytes != predictions.bytes) {
    throw Failure("the buffer for the predictions has " + std::to_string(predictions.bytes) + " bytes, and they take " +
                  std::to_string(bytes) + ".");
  }
}

ffi::Any Session::Rate() const {
  const ffi::Tensor rate = NewTensor({}, DLDataType{kDLFloat, 32, 1});
  *static_cast<float*>(rate.data_ptr()) = static_cast<float>(progress.rate);
  return rate;
}

void Session::Count(double loss) {
  progress.losses.push_back(loss);
  ++progress.position;
  progress.trained = true;
}

float Session::TrainStep(const convgrad_batch& batch, convgrad_buffer predictions) {
  RequireTraining();
  Arguments arguments = BatchOf(batch, true, true);
  CheckBuffer(predictions, extents_);
  arguments.push_back(Rate());
  arguments.push_back(State());
  const auto results = TupleIn(Run("step", arguments), 3, "step");
  TakeState(results[2]);
  const float loss = LossIn(results[0]);
  Count(loss);
  CopyOut(results[1], predictions);
  return loss;
}

float Session::Gradients(const convgrad_batch& batch, std::int64_t number, float* flat, std::size_t size,
                         convgrad_buffer predictions) {
  RequireSplit();
  CheckFlat(flat, size, false);
  Arguments arguments = BatchOf(batch, true, true);
  CheckBuffer(predictions, extents_);
  ffi::Array<ffi::Any> state = State().cast<ffi::Array<ffi::Any>>();
  if (number >= 0 && !artifact_.state.empty() && artifact_.state.back().role == "counter") {
    const ffi::Tensor counter = NewTensor({}, DLDataType{kDLInt, 64, 1});
    *static_cast<std::int64_t*>(counter.data_ptr()) = number;
    state.Set(static_cast<std::int64_t>(state.size()) - 1, counter);
  }
  arguments.push_back(state);
  const auto results = TupleIn(Run("gradients", arguments), 4, "gradients");
  const ffi::Tensor found = TensorIn(results[2], "the gradients");
  if (BytesOf(found) != size * sizeof(float)) throw Failure("the gradients have another size than the manifest says.");
  std::memcpy(flat, found.data_ptr(), size * sizeof(float));
  std::vector<std::size_t> moved;
  for (std::size_t i = 0; i < artifact_.state.size(); ++i) {
    if (artifact_.state[i].role == "running_stat") moved.push_back(i);
  }
  const auto statistics = TupleIn(results[3], moved.size(), "gradients");
  ffi::Array<ffi::Any> next = State().cast<ffi::Array<ffi::Any>>();
  for (std::size_t i = 0; i < moved.size(); ++i) next.Set(static_cast<std::int64_t>(moved[i]), statistics[i]);
  TakeState(next);
  const float loss = LossIn(results[0]);
  pending_.push_back(loss);
  CopyOut(results[1], predictions);
  return loss;
}

void Session::Apply(const float* flat, std::size_t size) {
  RequireSplit();
  CheckFlat(flat, size, false);
  const ffi::Tensor gradients = TensorOf(flat, size * sizeof(float), {static_cast<std::int64_t>(size)},
                                         DLDataType{kDLFloat, 32, 1});
  TakeState(Run("apply", {gradients, Rate(), State()}));
  if (!pending_.empty()) {
    Count(std::accumulate(pending_.begin(), pending_.end(), 0.0) / static_cast<double>(pending_.size()));
  }
  pending_.clear();
}

float Session::EvalStep(const convgrad_batch& batch, convgrad_buffer predictions) {
  RequireSplit();
  Arguments arguments = BatchOf(batch, true);
  CheckBuffer(predictions, extents_);
  arguments.push_back(State());
  const auto results = TupleIn(Run("evaluate", arguments), 2, "evaluate");
  CopyOut(results[1], predictions);
  return LossIn(results[0]);
}

void Session::Predict(const convgrad_batch& batch, convgrad_buffer predictions) {
  Arguments arguments = BatchOf(batch, false);
  CheckBuffer(predictions, extents_);
  if (artifact_.target) arguments.push_back(State());
  CopyOut(Run("predict", arguments), predictions);
}

std::vector<std::pair<std::size_t, std::size_t>> Session::Places() const {
  std::vector<std::pair<std::size_t, std::size_t>> places;
  std::size_t offset = 0;
  for (std::size_t i = 0; i < artifact_.state.size(); ++i) {
    const Spec& spec = artifact_.state[i];
    if (spec.role != "parameter") continue;
    places.emplace_back(i, offset);
    const std::size_t size = BytesFor(spec.shape, spec.type) / (spec.type.bits / 8);
    offset += (size + kFlatAlignment - 1) / kFlatAlignment * kFlatAlignment;
  }
  places.emplace_back(artifact_.state.size(), offset);  // the end
  return places;
}

std::size_t Session::FlatSize() const { return Places().back().second; }

void Session::CheckFlat(const void* flat, std::size_t size, bool parameters) const {
  const std::size_t wanted = FlatSize();
  if (flat == nullptr || size != wanted) {
    throw Failure("the flat vector has " + std::to_string(flat == nullptr ? 0 : size) + " floats, and " +
                  std::to_string(wanted) + " are needed, see convgrad_flat_size.");
  }
  for (const Spec& spec : artifact_.state) {
    if (parameters && spec.role == "parameter" && spec.dtype != "float32") {
      throw Failure("the parameter " + spec.name + " is " + spec.dtype + ", and a flat vector has float32; use " +
                    "convgrad_get_state and convgrad_set_state.");
    }
  }
}

void Session::GetParameters(float* flat, std::size_t size) const {
  CheckFlat(flat, size, true);
  std::memset(flat, 0, size * sizeof(float));
  for (const auto& [number, offset] : Places()) {
    if (number == state_.size()) break;
    std::memcpy(flat + offset, state_[number].data_ptr(), BytesOf(state_[number]));
  }
}

void Session::SetParameters(const float* flat, std::size_t size) {
  CheckFlat(flat, size, true);
  for (const auto& [number, offset] : Places()) {
    if (number == state_.size()) break;
    std::memcpy(state_[number].data_ptr(), flat + offset, BytesOf(state_[number]));
  }
}

std::size_t Session::Number(const std::string& name) const {
  for (std::size_t i = 0; i < artifact_.state.size(); ++i) {
    if (artifact_.state[i].name == name) return i;
  }
  throw Failure("the state has no tensor " + name + ".");
}

void Session::GetState(const std::string& name, convgrad_buffer value) const {
  const ffi::Tensor& tensor = state_[Number(name)];
  if (value.data == nullptr || value.bytes != BytesOf(tensor)) {
    throw Failure("the buffer for " + name + " has " + std::to_string(value.data ? value.bytes : 0) + " bytes, and it takes " +
                  std::to_string(BytesOf(tensor)) + ".");
  }
  std::memcpy(value.data, tensor.data_ptr(), value.bytes);
}

void Session::SetState(const std::string& name, convgrad_array value) {
  const ffi::Tensor& tensor = state_[Number(name)];
  if (value.data == nullptr || value.bytes != BytesOf(tensor)) {
    throw Failure("the value of " + name + " has " + std::to_string(value.data ? value.bytes : 0) + " bytes, and it takes " +
                  std::to_string(BytesOf(tensor)) + ".");
  }
  std::memcpy(tensor.data_ptr(), value.data, value.bytes);
}

}  // namespace convgrad
