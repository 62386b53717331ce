// SPDX-License-Identifier: Apache-2.0
// The functions of convgrad.h: no exception leaves them.
#include <exception>
#include <string>

#include "checkpoint.h"
#include "convgrad.h"
#include "failure.h"
#include "machine.h"
#include "session.h"

using convgrad::Failure;
using convgrad::Session;

struct convgrad_session {
  explicit convgrad_session(const char* path) : session(path) {}
  Session session;
};

namespace {

thread_local std::string last_error;

template <typename Function>
int Guarded(const Function& function) {
  try {
    function();
    return CONVGRAD_OK;
  } catch (const std::bad_alloc&) {
    last_error = "there is not enough memory.";
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown error.";
  }
  return CONVGRAD_ERROR;
}

template <typename T>
T& Given(T* pointer, const char* name) {
  if (pointer == nullptr) throw Failure(std::string(name) + " is NULL.");
  return *pointer;
}

Session& Of(convgrad_session* session) { return Given(session, "the session").session; }
const Session& Of(const convgrad_session* session) { return Given(session, "the session").session; }

std::size_t Count(const Session& session, int kind) {
  const convgrad::Artifact& artifact = session.artifact();
  switch (kind) {
    case CONVGRAD_INPUT:
      return artifact.inputs.size();
    case CONVGRAD_TARGET:
      return artifact.target ? 1 : 0;
    case CONVGRAD_PREDICTION:
      return 1;
    case CONVGRAD_STATE:
      return artifact.state.size();
    default:
      return 0;
  }
}

const convgrad::Spec& SpecOf(const Session& session, int kind, std::size_t index) {
  if (index >= Count(session, kind)) throw Failure("there is no tensor of this kind and number.");
  const convgrad::Artifact& artifact = session.artifact();
  switch (kind) {
    case CONVGRAD_INPUT:
      return artifact.inputs[index];
    case CONVGRAD_TARGET:
      return *artifact.target;
    case CONVGRAD_PREDICTION:
      return artifact.prediction;
    default:
      return artifact.state[index];
  }
}

}  // namespace

extern "C" {

const char* convgrad_version(void) { return CONVGRAD_VERSION; }

const char* convgrad_last_error(void) { return last_error.c_str(); }

const char* convgrad_cpu_features(void) {
  static const std::string text = [] {
    std::string joined;
    for (const std::string& name : convgrad::CpuFeatures()) joined += (joined.empty() ? "" : " ") + name;
    return joined;
  }();
  return text.c_str();
}

int convgrad_use_threads(int count) {
  return Guarded([&] { convgrad::UseThreads(count); });
}

int convgrad_open(const char* path, convgrad_session** session) {
  return Guarded([&] {
    Given(session, "the place for the session") = nullptr;
    *session = new convgrad_session(&Given(path, "the path"));
  });
}

void convgrad_close(convgrad_session* session) { delete session; }

const char* convgrad_id(const convgrad_session* session) {
  return session ? session->session.artifact().id.c_str() : "";
}

const char* convgrad_manifest(const convgrad_session* session) {
  return session ? session->session.artifact().manifest.c_str() : "";
}

size_t convgrad_count(const convgrad_session* session, int kind) { return session ? Count(session->session, kind) : 0; }

int convgrad_describe(const convgrad_session* session, int kind, size_t index, convgrad_tensor* tensor) {
  return Guarded([&] {
    const convgrad::Spec& spec = SpecOf(Of(session), kind, index);
    Given(tensor, "the place for the tensor") = {spec.name.c_str(), spec.dtype.c_str(), spec.role.c_str(),
                                                 spec.shape.size(), spec.shape.data()};
  });
}

int convgrad_set_learning_rate(convgrad_session* session, float rate) {
  return Guarded([&] {
    if (!(rate >= 0 && rate <= 3e38F)) throw Failure("the learning rate must be a finite number of at least 0.");
    Of(session).progress.rate = rate;
  });
}

float convgrad_learning_rate(const convgrad_session* session) {
  return session ? static_cast<float>(session->session.progress.rate) : 0;
}

int convgrad_train_step(convgrad_session* session, const convgrad_batch* batch, float* loss,
                        convgrad_buffer predictions) {
  return Guarded([&] {
    const float found = Of(session).TrainStep(Given(batch, "the batch"), predictions);
    if (loss != nullptr) *loss = found;
  });
}

int convgrad_gradients(convgrad_session* session, const convgrad_batch* batch, int64_t number, float* loss, float* flat,
                       size_t flat_size, convgrad_buffer predictions) {
  return Guarded([&] {
    const float found = Of(session).Gradients(Given(batch, "the batch"), number, flat, flat_size, predictions);
    if (loss != nullptr) *loss = found;
  });
}

int convgrad_apply(convgrad_session* session, const float* flat, size_t flat_size) {
  return Guarded([&] { Of(session).Apply(flat, flat_size); });
}

int convgrad_eval_step(convgrad_session* session, const convgrad_batch* batch, float* loss,
                       convgrad_buffer predictions) {
  return Guarded([&] {
    const float found = Of(session).EvalStep(Given(batch, "the batch"), predictions);
    if (loss != nullptr) *loss = found;
  });
}

int convgrad_predict(convgrad_session* session, const convgrad_batch* batch, convgrad_buffer predictions) {
  return Guarded([&] { Of(session).Predict(Given(batch, "the batch"), predictions); });
}

size_t convgrad_flat_size(const convgrad_session* session) { return session ? session->session.FlatSize() : 0; }

int convgrad_get_parameters(const convgrad_session* session, float* flat, size_t flat_size) {
  return Guarded([&] { Of(session).GetParameters(flat, flat_size); });
}

int convgrad_set_parameters(convgrad_session* session, const float* flat, size_t flat_size) {
  return Guarded([&] { Of(session).SetParameters(flat, flat_size); });
}

int convgrad_get_state(const convgrad_session* session, const char* name, convgrad_buffer value) {
  return Guarded([&] { Of(session).GetState(&Given(name, "the name"), value); });
}

int convgrad_set_state(convgrad_session* session, const char* name, convgrad_array value) {
  return Guarded([&] { Of(session).SetState(&Given(name, "the name"), value); });
}

int convgrad_reset(convgrad_session* session) {
  return Guarded([&] { Of(session).Reset(); });
}

int convgrad_get_progress(const convgrad_session* session, convgrad_progress* progress) {
  return Guarded([&] {
    const convgrad::Progress& found = Of(session).progress;
    Given(progress, "the place for the progress") = {static_cast<int64_t>(found.losses.size()), found.epoch,
                                                     found.position};
  });
}

int convgrad_end_epoch(convgrad_session* session) {
  return Guarded([&] {
    convgrad::Progress& progress = Of(session).progress;
    ++progress.epoch;
    progress.position = 0;
  });
}

int convgrad_set_seed(convgrad_session* session, int64_t seed) {
  return Guarded([&] {
    if (seed < 0) throw Failure("the seed must be at least 0.");
    Of(session).progress.seed = seed;
  });
}

int convgrad_save_checkpoint(const convgrad_session* session, const char* path) {
  return Guarded([&] { convgrad::SaveCheckpoint(Of(session), &Given(path, "the path")); });
}

int convgrad_load_checkpoint(convgrad_session* session, const char* path) {
  return Guarded([&] { convgrad::LoadCheckpoint(&Of(session), &Given(path, "the path")); });
}

}  // extern "C"
