// SPDX-License-Identifier: Apache-2.0
// A call as an operation graph of cuDNN: the convolution or one of its gradients, and what follows a forward one.
#pragma once

#include <tuple>

#include "library.h"
#include "spec.h"

namespace convgrad {

/*! \brief The graph, and which of its tensors is which of the caller's: the unique id is the place among them, from 1. */
class Graph {
 public:
  Graph(const Spec& spec, int64_t alignment, cudnnHandle_t handle) : spec_(spec), alignment_(alignment) {
    int64_t next = 2;  // inputs first, results last, as generated code passes them
    const int64_t bias = spec.bias ? ++next : 0, acc = spec.accumulate ? ++next : 0;
    result_ = ++next;
    Convolution();
    switch (spec.direction) {
      case kForward: Forward(bias, acc); break;
      case kBackwardWeight: BackwardWeight(acc); break;
      default: BackwardData(acc); break;
    }
    std::vector<cudnnBackendDescriptor_t> raw;
    for (const Descriptor& each : operations_) raw.push_back(each.raw());
    graph_.SetArray(CUDNN_ATTR_OPERATIONGRAPH_OPS, raw);
    if (handle != nullptr) graph_.Set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle);
    status_ = graph_.Finalize();
  }

  const Descriptor& descriptor() const { return graph_; }
  /*! \brief Of the graph's own checks; engines are not asked where it is not success. */
  cudnnStatus_t status() const { return status_; }
  int64_t tensors() const { return result_; }
  /*! \brief The summand that the result must hold when the call begins (from 0), or -1. */
  int64_t copied() const { return copied_; }
  /*! \brief The ids of the tensors that the graph reads or writes. */
  const std::vector<int64_t>& ids() const { return ids_; }

 private:
  static constexpr int64_t kVirtual = 100;

  void Convolution() {
    convolution_.Set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Compute())
        .Set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_CROSS_CORRELATION)
        .Set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, spec_.Axes())
        .Set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, spec_.Spatial(spec_.strides, 1))
        .Set(CUDNN_ATTR_CONVOLUTION_DILATIONS, spec_.Spatial(spec_.dilation, 1))
        .Set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, spec_.Spatial(spec_.pad_low, 0))
        .Set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, spec_.Spatial(spec_.pad_high, 0));
    Check(convolution_.Finalize(), "a convolution is refused");
  }

  void Forward(int64_t bias, int64_t acc) {
    const bool follows = spec_.bias || spec_.relu;
    const Layout y = spec_.Grad();
    const size_t x = Tensor(1, spec_.Data()), w = Tensor(2, spec_.Weight());
    size_t last = follows ? Tensor(kVirtual, Sums(y)) : Tensor(result_, y);
    Descriptor conv(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
    conv.Set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, tensors_[x])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, tensors_[w])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, tensors_[last])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, convolution_);
    Scale(&conv, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
          follows ? 0 : acc);
    Add(std::move(conv));
    if (!follows) return;
    if (acc) last = Pointwise(CUDNN_POINTWISE_ADD, last, Tensor(acc, y), y, false);
    if (bias) last = Pointwise(CUDNN_POINTWISE_ADD, last, Tensor(bias, spec_.Bias()), y, !spec_.relu);
    if (spec_.relu) Pointwise(CUDNN_POINTWISE_RELU_FWD, last, kNone, y, true);
  }

  void BackwardWeight(int64_t acc) {
    const size_t dy = Tensor(1, spec_.Grad()), x = Tensor(2, spec_.Data()), dw = Tensor(result_, spec_.Weight());
    Descriptor conv(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
    conv.Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, tensors_[x])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, tensors_[dy])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, tensors_[dw])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, convolution_);
    Scale(&conv, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
          acc);
    Add(std::move(conv));
  }

  void BackwardData(int64_t acc) {
    const size_t dy = Tensor(1, spec_.Grad()), w = Tensor(2, spec_.Weight()), dx = Tensor(result_, spec_.Data());
    Descriptor conv(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
    conv.Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, tensors_[dx])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, tensors_[dy])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, tensors_[w])
        .Set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, convolution_);
    Scale(&conv, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, acc);
    Add(std::move(conv));
  }

  static constexpr size_t kNone = static_cast<size_t>(-1);

  cudnnDataType_t Compute() const { return spec_.IsDouble() ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT; }
  Layout Sums(Layout like) const {
    like.type = Compute();
    return like;
  }

  /*! \brief Factors of the product and of what the result holds, 1 with a summand. */
  void Scale(Descriptor* conv, cudnnBackendAttributeName_t alpha, cudnnBackendAttributeName_t beta, int64_t acc) {
    if (acc) copied_ = acc - 1;
    if (spec_.IsDouble()) {
      conv->Set(alpha, 1.0).Set(beta, acc ? 1.0 : 0.0);
    } else {
      conv->Set(alpha, 1.0F).Set(beta, acc ? 1.0F : 0.0F);
    }
  }

  /*! \brief A tensor of the graph; ids from kVirtual on lie in no memory. */
  size_t Tensor(int64_t id, const Layout& layout) {
    const bool is_virtual = id >= kVirtual;
    Descriptor made(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    made.Set(CUDNN_ATTR_TENSOR_UNIQUE_ID, is_virtual ? kVirtual + static_cast<int64_t>(tensors_.size()) : id)
        .Set(CUDNN_ATTR_TENSOR_DATA_TYPE, layout.type)
        .Set(CUDNN_ATTR_TENSOR_DIMENSIONS, layout.dims)
        .Set(CUDNN_ATTR_TENSOR_STRIDES, layout.strides)
        .Set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, alignment_)
        .Set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, is_virtual);
    tensors_.push_back(made.Finished("a tensor is refused"));
    if (!is_virtual) ids_.push_back(id);
    return tensors_.size() - 1;
  }

  size_t Pointwise(cudnnPointwiseMode_t mode, size_t from, size_t other, const Layout& like, bool is_last) {
    const size_t to = is_last ? Tensor(result_, like) : Tensor(kVirtual, Sums(like));
    Descriptor kind(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    kind.Set(CUDNN_ATTR_POINTWISE_MODE, mode).Set(CUDNN_ATTR_POINTWISE_MATH_PREC, Compute());
    kinds_.push_back(kind.Finished("an elementwise operation is refused"));
    Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kinds_.back())
        .Set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, tensors_[from])
        .Set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, tensors_[to]);
    if (other != kNone) operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, tensors_[other]);
    Add(std::move(operation));
    return to;
  }

  void Add(Descriptor operation) { operations_.push_back(operation.Finished("an operation is refused")); }

  Spec spec_;
  int64_t alignment_, result_ = 0, copied_ = -1;
  Descriptor convolution_{CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR};
  std::vector<Descriptor> tensors_, kinds_, operations_;
  std::vector<int64_t> ids_;
  Descriptor graph_{CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR};
  cudnnStatus_t status_ = CUDNN_STATUS_SUCCESS;
};

}  // namespace convgrad
