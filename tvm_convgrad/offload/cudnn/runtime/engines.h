// SPDX-License-Identifier: Apache-2.0
// Engines: what cuDNN's heuristics propose for a graph, for this GPU or for one that is only described, which of them
// a call may use, and plans of them. An engine and its knobs name a plan: it is made again from them in microseconds.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <sstream>

#include "graph.h"

namespace convgrad {

/*! \brief An engine with its knobs, as generated code holds it. */
struct Choice {
  int64_t index = 0;
  std::vector<std::pair<int64_t, int64_t>> knobs;  // cudnnBackendKnobType_t, value

  bool operator==(const Choice& other) const { return index == other.index && knobs == other.knobs; }
};

/*! \brief A plan, the engine that it is of, and bytes of workspace. */
struct Plan {
  Descriptor plan{CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR};
  Choice choice;
  std::vector<cudnnBackendNumericalNote_t> notes;
  std::vector<cudnnBackendBehaviorNote_t> behavior;
  int64_t workspace = 0;
};

/*! \brief Where plans are made for: a GPU of this machine, or one that properties describe. */
struct Device {
  cudnnHandle_t handle = nullptr;
  std::unique_ptr<Descriptor> properties;
};

constexpr int64_t kMostKnobs = CUDNN_KNOB_TYPE_COUNTS;

/*! \brief Engines of the weight gradient whose results are not those that their notes promise, by their numbers. */
enum : int64_t {
  // Rounds as a transform does: up to 1e-3 of the largest element for 5x5 kernels, 1e-5 for 3x3 (cuDNN 9.19, sm_90).
  kTransformWithoutNote = 17,
  // Adds parts of a reduction in bfloat16 (the same).
  kNarrowSumsWithoutNote = 47,
};

/*! \brief Why a call may not use an engine by what it has been seen to compute; empty if it may. */
inline std::string Unannounced(const Spec& spec, int64_t engine) {
  if (spec.direction != kBackwardWeight) return "";
  if (engine == kTransformWithoutNote && !spec.transforms) return "computes by a transform, though it has no note of it";
  if (engine == kNarrowSumsWithoutNote && spec.data_type == CUDNN_DATA_BFLOAT16 && !spec.tf32) {
    return "sums in a narrow type, though it has no note of it";
  }
  return "";
}

/*! \brief Why a call may not use an engine with these notes; empty if it may. */
inline std::string Refusal(const Spec& spec, int64_t engine, const std::vector<cudnnBackendNumericalNote_t>& notes,
                           const std::vector<cudnnBackendBehaviorNote_t>& behavior) {
  const bool compiles =
      std::find(behavior.begin(), behavior.end(), CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) != behavior.end();
  if (compiles && !spec.compiled) {
    return "compiled when it is first called, which the setting compiled permits";
  }
  const bool narrow = spec.data_type == CUDNN_DATA_HALF || spec.data_type == CUDNN_DATA_BFLOAT16;
  for (const cudnnBackendNumericalNote_t note : notes) {
    switch (note) {
      case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC:
        if (spec.deterministic) return "not deterministic";
        break;
      case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
        if (!spec.tf32 && spec.data_type == CUDNN_DATA_FLOAT) return "rounds float32 to tf32";
        break;
      case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
        if (!spec.tf32) return "rounds its inputs";
        break;
      case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
        if (narrow || !spec.tf32) return "sums in a narrow type";
        break;
      case CUDNN_NUMERICAL_NOTE_FFT:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6:
      case CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13:
        if (!spec.transforms) return "computes by a transform, whose rounding is another";
        break;
      default: break;
    }
  }
  return Unannounced(spec, engine);
}

class Engines {
 public:
  Engines(const Spec& spec, const Graph& graph, const Device& device) : spec_(spec), graph_(graph), device_(device) {}

  /*!
   * \brief Call `found` with each engine of the heuristics and of their fallbacks, best first, until it returns false.
   * `found` gets the plan, or why there is none.
   */
  void Each(const std::function<bool(Plan, const std::string&)>& found) const {
    std::vector<Choice> seen;
    for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
      Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
      heuristics.Set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph_.descriptor()).Set(CUDNN_ATTR_ENGINEHEUR_MODE, mode);
      if (device_.properties) heuristics.Set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *device_.properties);
      if (heuristics.Finalize() != CUDNN_STATUS_SUCCESS) continue;  // this mode has nothing for such a graph
      const int64_t count = heuristics.Count(CUDNN_ATTR_ENGINEHEUR_RESULTS);
      std::vector<Descriptor> configs =
          heuristics.Descriptors(CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, count);
      for (const Descriptor& config : configs) {
        Plan plan = Described(config);
        if (std::find(seen.begin(), seen.end(), plan.choice) != seen.end()) continue;
        seen.push_back(plan.choice);
        std::string reason = Refusal(spec_, plan.choice.index, plan.notes, plan.behavior);
        if (reason.empty()) reason = Finish(config, &plan);
        if (!found(std::move(plan), reason)) return;
      }
    }
  }

  /*! \brief The plan of an engine with given knobs, or why there is none. */
  std::string Make(const Choice& choice, Plan* plan) const {
    Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    engine.Set(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph_.descriptor()).Set(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, choice.index);
    if (device_.properties) engine.Set(CUDNN_ATTR_ENGINE_DEVICEPROP, *device_.properties);
    cudnnStatus_t status = engine.Finalize();
    if (status != CUDNN_STATUS_SUCCESS) return Library::Get().Reason(status);
    std::vector<Descriptor> knobs;
    std::vector<cudnnBackendDescriptor_t> raw;
    for (const auto& [type, value] : choice.knobs) {
      Descriptor knob(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
      knob.Set(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, static_cast<cudnnBackendKnobType_t>(type))
          .Set(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, value);
      knobs.push_back(knob.Finished("a knob is refused"));
      raw.push_back(knobs.back().raw());
    }
    Descriptor config(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    config.Set(CUDNN_ATTR_ENGINECFG_ENGINE, engine);
    if (!raw.empty()) config.SetArray(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, raw);
    status = config.Finalize();
    if (status != CUDNN_STATUS_SUCCESS) return Library::Get().Reason(status);
    plan->choice = choice;
    ReadNotes(engine, plan);
    const std::string reason = Refusal(spec_, choice.index, plan->notes, plan->behavior);
    return reason.empty() ? Finish(config, plan) : reason;
  }

 private:
  /*! \brief The engine of a configuration, with its knobs and notes; not yet a plan. */
  Plan Described(const Descriptor& config) const {
    Plan plan;
    const std::vector<Descriptor> engine =
        config.Descriptors(CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1);
    plan.choice.index = engine.at(0).Value<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX);
    ReadNotes(engine[0], &plan);
    for (const Descriptor& knob : config.Descriptors(CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                                                     CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, kMostKnobs)) {
      plan.choice.knobs.emplace_back(knob.Value<cudnnBackendKnobType_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE),
                                     knob.Value<int64_t>(CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE));
    }
    return plan;
  }

  static void ReadNotes(const Descriptor& engine, Plan* plan) {
    plan->notes = engine.Values<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                                             CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
    plan->behavior = engine.Values<cudnnBackendBehaviorNote_t>(CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
                                                               CUDNN_BEHAVIOR_NOTE_TYPE_COUNT);
  }

  std::string Finish(const Descriptor& config, Plan* plan) const {
    plan->plan.Set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (device_.handle != nullptr) plan->plan.Set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, device_.handle);
    if (device_.properties) plan->plan.Set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *device_.properties);
    const cudnnStatus_t status = plan->plan.Finalize();
    if (status != CUDNN_STATUS_SUCCESS) return Library::Get().Reason(status);
    plan->workspace = plan->plan.Value<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
    if (plan->workspace > spec_.workspace_limit) {
      std::ostringstream text;
      text << "needs " << plan->workspace << " bytes of workspace, more than the limit of " << spec_.workspace_limit;
      return text.str();
    }
    return "";
  }

  const Spec& spec_;
  const Graph& graph_;
  const Device& device_;
};

}  // namespace convgrad
