// SPDX-License-Identifier: Apache-2.0
// A call in CUTLASS's own terms. This is host code that the tests compile too, to run a kernel's iterators there.
#pragma once

#include "call.h"
#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/thread/linear_combination_relu.h"

namespace convgrad {

/*! \brief The problem; a row is an image of the width 1. High padding follows from the extents. */
inline cutlass::conv::Conv2dProblemSize ProblemOf(const Call& call) {
  const auto of = [](int64_t value) { return static_cast<int>(value); };
  return {of(call.batch),           of(call.data_extents[0]), of(call.data_extents[1]), of(call.in_channels),
          of(call.out_channels),    of(call.kernel[0]),       of(call.kernel[1]),       of(call.grad_extents[0]),
          of(call.grad_extents[1]), of(call.pad_low[0]),      of(call.pad_low[1]),      of(call.strides[0]),
          of(call.strides[1]),      of(call.dilation[0]),     of(call.dilation[1]),
          cutlass::conv::Mode::kCrossCorrelation, of(call.slices), /*groups=*/1};
}

/*!
 * \brief What a kernel is started with.
 * \param tensors the operands, the bias or summand if there is one, the result.
 * \param workspace where `parallel` slices go, each for itself; others are added to the result in turn.
 */
template <typename Kernel>
typename Kernel::Arguments ArgumentsOf(const Call& call, void* const* tensors, void* workspace, bool parallel) {
  using Layout = cutlass::layout::TensorNHWC;
  using Output = typename Kernel::ElementC;
  const cutlass::conv::Conv2dProblemSize problem = ProblemOf(call);
  const auto op = Kernel::kConvolutionalOperator;
  const Layout a = Layout::packed(cutlass::conv::implicit_gemm_tensor_a_extent(op, problem));
  const Layout b = Layout::packed(cutlass::conv::implicit_gemm_tensor_b_extent(op, problem));
  const Layout d = Layout::packed(cutlass::conv::implicit_gemm_tensor_c_extent(op, problem));
  const bool adds = !parallel && (call.bias || call.accumulate);
  auto* result = static_cast<Output*>(parallel ? workspace : tensors[call.tensors() - 1]);
  auto* summand = adds ? static_cast<Output*>(tensors[2]) : result;
  // A bias is one row of numbers, read again for every pixel.
  const Layout c = adds && call.bias ? Layout(Layout::Stride(0)) : d;
  return {problem,
          {static_cast<typename Kernel::ElementA*>(tensors[0]), a},
          {static_cast<typename Kernel::ElementB*>(tensors[1]), b},
          {summand, c},
          {result, d},
          {1.F, adds ? 1.F : 0.F},
          parallel ? cutlass::conv::SplitKMode::kParallel : cutlass::conv::SplitKMode::kSerial};
}

}  // namespace convgrad
