// SPDX-License-Identifier: Apache-2.0
// A plan: the primitives of one call (reorders, the convolution, reorders) and where each of their tensors lies, in the
// caller's tensors or in one piece of workspace. Made once for a Spec and a number of threads, run by any thread.
#pragma once

#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>

#include "spec.h"

namespace convgrad {

class Plan {
 public:
  explicit Plan(const Spec& spec) : spec_(spec), engine_(dnnl::engine::kind::cpu, 0) {
    // Inputs first, results last, as generated code passes them.
    int next = 2;
    const int bias = spec.bias ? next++ : -1;
    const int acc = spec.accumulate ? next++ : -1;
    const int bias_acc = spec.bias_accumulate ? next++ : -1;
    const int result = next++;
    const int bias_grad = spec.bias_grad ? next++ : -1;
    tensors_ = next;
    switch (spec.direction) {
      case kForward: Forward(bias, acc, result); break;
      case kBackwardWeight: BackwardWeight(acc, bias_acc, result, bias_grad); break;
      default: BackwardData(acc, result); break;
    }
  }

  int tensors() const { return tensors_; }
  size_t workspace() const { return workspace_; }
  const std::string& implementation() const { return implementation_; }
  size_t primitives() const { return steps_.size(); }

  /*! \brief Compute. Threads that run the same plan at the same time get a context each. */
  void Run(void* const* tensors, char* workspace) {
    std::unique_ptr<Context> context = Take();
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      const Slot& where = slots_[slot];
      context->memories[slot].set_data_handle(where.tensor >= 0 ? tensors[where.tensor] : workspace + where.offset);
    }
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      if (step.copied >= 0 && tensors[step.copied] == tensors[step.onto]) continue;  // the sum is in place
      const std::vector<dnnl_exec_arg_t>& args = context->args[i];
      dnnl::error::wrap_c_api(dnnl_primitive_execute(step.primitive.get(), context->stream.get(),
                                                     static_cast<int>(args.size()), args.data()),
                              "a primitive could not be executed");
    }
    context->stream.wait();
    Give(std::move(context));
  }

 private:
  /*! \brief A tensor of a primitive: the caller's, or at an offset in the workspace. */
  struct Slot {
    Desc desc;
    int tensor;
    size_t offset;
  };
  struct Step {
    dnnl::primitive primitive;
    std::vector<std::pair<int, int>> args;  // oneDNN's name of the argument, slot
    int copied, onto;                       // the tensors, if all that it does is to bring a summand to a result
  };
  /*! \brief What one running call needs; kept, so that a call allocates nothing here. */
  struct Context {
    dnnl::stream stream;
    std::vector<dnnl::memory> memories;
    std::vector<std::vector<dnnl_exec_arg_t>> args;
  };

  void Forward(int bias, int acc, int result) {
    dnnl::primitive_attr attr = Attributes();
    dnnl::post_ops after;
    if (acc >= 0) after.append_sum(1.F);
    if (after.len() > 0) attr.set_post_ops(after);
    const Desc x = spec_.Data(), w = spec_.Weight(), y = spec_.Grad(), b = spec_.Vector(spec_.grad_type);
    const dnnl::convolution_forward::primitive_desc pd =
        bias >= 0 ? dnnl::convolution_forward::primitive_desc(
                        engine_, dnnl::prop_kind::forward_training, kDirect, OfData(x), Any(w), b, OfData(y),
                        Strides(), Dilation(), Low(), High(), attr)
                  : dnnl::convolution_forward::primitive_desc(
                        engine_, dnnl::prop_kind::forward_training, kDirect, OfData(x), Any(w), OfData(y),
                        Strides(), Dilation(), Low(), High(), attr);
    const int src = Input(x, pd.src_desc(), 0), weight = Input(w, pd.weights_desc(), 1);
    const int dst = Output(y, pd.dst_desc(), result);
    if (acc >= 0) Reorder(User(y, acc), dst, dnnl::primitive_attr(), slots_[dst].tensor >= 0 ? acc : -1, result);
    std::vector<std::pair<int, int>> args{{DNNL_ARG_SRC, src}, {DNNL_ARG_WEIGHTS, weight}, {DNNL_ARG_DST, dst}};
    if (bias >= 0) args.emplace_back(DNNL_ARG_BIAS, User(b, bias));
    Convolve(pd, dnnl::convolution_forward(pd), std::move(args));
    Deliver(dst, y, -1, result);
  }

  void BackwardData(int acc, int result) {
    const Desc x = spec_.Data(), w = spec_.Weight(), y = spec_.Grad();
    const dnnl::convolution_backward_data::primitive_desc pd(engine_, kDirect, OfData(x), Any(w), OfData(y),
                                                             Strides(), Dilation(), Low(), High(), Hint(), Attributes());
    const int diff_dst = Input(y, pd.diff_dst_desc(), 0), weight = Input(w, pd.weights_desc(), 1);
    const int diff_src = acc >= 0 ? Temporary(pd.diff_src_desc()) : Output(x, pd.diff_src_desc(), result);
    Convolve(pd, dnnl::convolution_backward_data(pd),
             {{DNNL_ARG_DIFF_DST, diff_dst}, {DNNL_ARG_WEIGHTS, weight}, {DNNL_ARG_DIFF_SRC, diff_src}});
    Deliver(diff_src, x, acc, result);
  }

  void BackwardWeight(int acc, int bias_acc, int result, int bias_grad) {
    const Desc x = spec_.Data(), w = spec_.Weight(), y = spec_.Grad(), b = spec_.Vector(spec_.weight_type);
    const dnnl::convolution_backward_weights::primitive_desc pd =
        bias_grad >= 0 ? dnnl::convolution_backward_weights::primitive_desc(
                             engine_, kDirect, OfData(x), Any(w), b, OfData(y), Strides(), Dilation(), Low(),
                             High(), Hint(), Attributes())
                       : dnnl::convolution_backward_weights::primitive_desc(
                             engine_, kDirect, OfData(x), Any(w), OfData(y), Strides(), Dilation(), Low(),
                             High(), Hint(), Attributes());
    const int diff_dst = Input(y, pd.diff_dst_desc(), 0), src = Input(x, pd.src_desc(), 1);
    const int diff_weight = acc >= 0 ? Temporary(pd.diff_weights_desc()) : Output(w, pd.diff_weights_desc(), result);
    std::vector<std::pair<int, int>> args{
        {DNNL_ARG_DIFF_DST, diff_dst}, {DNNL_ARG_SRC, src}, {DNNL_ARG_DIFF_WEIGHTS, diff_weight}};
    const int diff_bias = bias_grad < 0 ? -1 : bias_acc >= 0 ? Temporary(b) : User(b, bias_grad);
    if (diff_bias >= 0) args.emplace_back(DNNL_ARG_DIFF_BIAS, diff_bias);
    Convolve(pd, dnnl::convolution_backward_weights(pd), std::move(args));
    Deliver(diff_weight, w, acc, result);
    if (bias_acc >= 0) Sum(b, bias_acc, diff_bias, bias_grad);
  }

  static constexpr dnnl::algorithm kDirect = dnnl::algorithm::convolution_direct;
  static constexpr size_t kAlignment = 128;

  Dims Strides() const { return spec_.Spatial(spec_.strides); }
  Dims Low() const { return spec_.Spatial(spec_.pad_low); }
  Dims High() const { return spec_.Spatial(spec_.pad_high); }
  Dims Dilation() const {  // oneDNN counts the holes
    Dims holes = spec_.Spatial(spec_.dilation);
    for (auto& each : holes) each -= 1;
    return holes;
  }

  /*! \brief The forward convolution that oneDNN takes as the hint of a gradient; all of the incoming gradient's type. */
  dnnl::convolution_forward::primitive_desc Hint() const {
    const auto type = spec_.Type(spec_.grad_type);
    const auto of = [type](const Desc& desc) {
      return Desc(desc.get_dims(), type, dnnl::memory::format_tag::any);
    };
    return dnnl::convolution_forward::primitive_desc(engine_, dnnl::prop_kind::forward_training, kDirect,
                                                     of(spec_.Data()), of(spec_.Weight()), of(spec_.Grad()), Strides(),
                                                     Dilation(), Low(), High(), dnnl::primitive_attr());
  }

  /*! \brief What oneDNN may choose for data or a gradient: its own format, or only the caller's. */
  Desc OfData(const Desc& plain) const { return spec_.formats == kAnyFormats ? Any(plain) : plain; }
  static Desc Any(const Desc& plain) {
    return Desc(plain.get_dims(), plain.get_data_type(), dnnl::memory::format_tag::any);
  }

  static dnnl::primitive_attr Attributes() {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return attr;
  }

  int User(const Desc& desc, int tensor) {
    slots_.push_back({desc, tensor, 0});
    return static_cast<int>(slots_.size()) - 1;
  }

  int Temporary(const Desc& desc) {
    slots_.push_back({desc, -1, workspace_});
    workspace_ += (desc.get_size() + kAlignment - 1) / kAlignment * kAlignment;
    return static_cast<int>(slots_.size()) - 1;
  }

  /*! \brief The slot of an operand in the format that the convolution takes; reordered into the workspace if need be. */
  int Input(const Desc& plain, const Desc& wanted, int tensor) {
    const int user = User(plain, tensor);
    if (plain == wanted) return user;
    const int own = Temporary(wanted);
    Reorder(user, own);
    return own;
  }

  int Output(const Desc& plain, const Desc& given, int tensor) {
    return plain == given ? User(plain, tensor) : Temporary(given);
  }

  /*! \brief Bring the result to the caller, added to `acc` if there is one: oneDNN's gradients take no post-ops.
   *
   *  A result in blocks is added by the reorder that it takes anyhow; another one costs one more pass over its memory.
   */
  void Deliver(int own, const Desc& plain, int acc, int result) {
    if (acc < 0) {
      if (slots_[own].tensor < 0) Reorder(own, User(plain, result));
      return;
    }
    if (slots_[own].desc == plain) {
      Sum(plain, acc, own, result);
      return;
    }
    const int user = User(plain, result), summand = User(plain, acc);
    Reorder(summand, user, dnnl::primitive_attr(), acc, result);
    dnnl::post_ops after;
    after.append_sum(1.F);
    dnnl::primitive_attr attr;
    attr.set_post_ops(after);
    Reorder(own, user, attr);
  }

  /*! \brief result = acc + own, all in one format; the first source is the one that oneDNN may overwrite. */
  void Sum(const Desc& desc, int acc, int own, int result) {
    const dnnl::binary::primitive_desc pd(engine_, dnnl::algorithm::binary_add, desc, desc, desc, Attributes());
    const int summand = User(desc, acc), user = User(desc, result);
    Add(pd, dnnl::binary(pd), {{DNNL_ARG_SRC_0, summand}, {DNNL_ARG_SRC_1, own}, {DNNL_ARG_DST, user}});
  }

  void Reorder(int from, int to, dnnl::primitive_attr attr = dnnl::primitive_attr(), int copied = -1, int onto = -1) {
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const dnnl::reorder::primitive_desc pd(engine_, slots_[from].desc, engine_, slots_[to].desc, attr);
    Add(pd, dnnl::reorder(pd), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}, copied, onto);
  }

  template <typename PrimitiveDesc>
  void Convolve(const PrimitiveDesc& pd, const dnnl::primitive& primitive, std::vector<std::pair<int, int>> args) {
    implementation_ = pd.impl_info_str();
    Add(pd, primitive, std::move(args));
  }

  template <typename PrimitiveDesc>
  void Add(const PrimitiveDesc& pd, const dnnl::primitive& primitive, std::vector<std::pair<int, int>> args,
           int copied = -1, int onto = -1) {
    const Desc scratchpad = pd.scratchpad_desc();
    if (scratchpad.get_size() > 0) args.emplace_back(DNNL_ARG_SCRATCHPAD, Temporary(scratchpad));
    steps_.push_back({primitive, std::move(args), copied, onto});
  }

  std::unique_ptr<Context> Take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<Context> found = std::move(idle_.back());
        idle_.pop_back();
        return found;
      }
    }
    auto made = std::make_unique<Context>();
    made->stream = dnnl::stream(engine_);
    for (const Slot& slot : slots_) made->memories.emplace_back(slot.desc, engine_, nullptr);
    for (const Step& step : steps_) {
      std::vector<dnnl_exec_arg_t> args;
      for (auto [name, slot] : step.args) args.push_back({name, made->memories[slot].get()});
      made->args.push_back(std::move(args));
    }
    return made;
  }

  void Give(std::unique_ptr<Context> context) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(context));
  }

  Spec spec_;
  dnnl::engine engine_;
  int tensors_ = 0;
  size_t workspace_ = 0;
  std::string implementation_;
  std::vector<Slot> slots_;
  std::vector<Step> steps_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Context>> idle_;
};

}  // namespace convgrad
