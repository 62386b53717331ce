// SPDX-License-Identifier: Apache-2.0
// One call: a convolution's problem, its direction, what is fused and what engines may do, as the plain numbers that generated
// code holds. The order of fields is that of CuDnn.numbers in cudnn/backend.py. A ranked list of engines may follow.
#pragma once

#include <cudnn_graph.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace convgrad {

constexpr int64_t kForward = 0, kBackwardWeight = 1, kBackwardData = 2;

using Dims = std::vector<int64_t>;

/*! \brief A tensor as cuDNN sees it: extents in the order N C spatial, elements between neighbours. */
struct Layout {
  Dims dims, strides;
  cudnnDataType_t type;
};

struct Spec {
  int64_t direction, rank, batch, in_channels, out_channels, groups;  // batch -1: as the first tensor has it
  int64_t data_extents[3], grad_extents[3], kernel[3], strides[3], dilation[3], pad_low[3], pad_high[3];
  int64_t data_type, weight_type, grad_type;             // cudnnDataType_t
  int64_t data_axes[5], weight_axes[5], grad_axes[5];    // for each place in memory the axis, N C ... or O I ...
  int64_t bias, relu, accumulate, bias_grad;
  int64_t deterministic, tf32, transforms, compiled;     // 1: only such engines, allowed, allowed, allowed
  int64_t workspace_limit;                               // bytes

  static constexpr int kCount = 6 + 7 * 3 + 3 + 3 * 5 + 4 + 5;

  bool operator==(const Spec& other) const { return std::memcmp(this, &other, sizeof(Spec)) == 0; }

  /*! \brief The numbers behind the fields: version of cuDNN, SM, count, then engines. */
  const int64_t* Ranked() const { return reinterpret_cast<const int64_t*>(this) + kCount; }

  Layout Data() const { return Tensor({batch, in_channels}, data_extents, data_type, data_axes); }
  Layout Weight() const { return Tensor({out_channels, in_channels / groups}, kernel, weight_type, weight_axes); }
  Layout Grad() const { return Tensor({batch, out_channels}, grad_extents, grad_type, grad_axes); }
  Layout Bias() const {
    Layout bias{Dims(static_cast<size_t>(Axes()) + 2, 1), Dims(static_cast<size_t>(Axes()) + 2, 1), Type(grad_type)};
    bias.dims[1] = bias.strides[0] = out_channels;
    return bias;
  }

  /*! \brief Spatial axes for cuDNN, which has no convolutions of one axis: those get one of extent 1 in front. */
  int64_t Axes() const { return rank == 1 ? 2 : rank; }
  Dims Spatial(const int64_t (&values)[3], int64_t filling) const {
    Dims dims;
    if (rank == 1) dims.push_back(filling);
    dims.insert(dims.end(), values, values + rank);
    return dims;
  }

  bool IsDouble() const { return data_type == CUDNN_DATA_DOUBLE; }

  static cudnnDataType_t Type(int64_t type) { return static_cast<cudnnDataType_t>(type); }

 private:
  Layout Tensor(Dims dims, const int64_t (&extents)[3], int64_t type, const int64_t (&axes)[5]) const {
    dims.insert(dims.end(), extents, extents + rank);
    Dims strides(dims.size());
    int64_t stride = 1;
    for (size_t place = dims.size(); place-- > 0;) {
      strides[static_cast<size_t>(axes[place])] = stride;
      stride *= dims[static_cast<size_t>(axes[place])];
    }
    if (rank == 1) {
      dims.insert(dims.begin() + 2, 1);
      strides.insert(strides.begin() + 2, strides[2] * dims[3]);
    }
    return {std::move(dims), std::move(strides), Type(type)};
  }
};

static_assert(sizeof(Spec) == Spec::kCount * sizeof(int64_t));

struct SpecHash {
  size_t operator()(const Spec& spec) const {
    const auto* words = reinterpret_cast<const int64_t*>(&spec);
    return std::accumulate(words, words + Spec::kCount, size_t{1469598103934665603U},
                           [](size_t hash, int64_t word) { return (hash ^ static_cast<size_t>(word)) * 1099511628211U; });
  }
};

}  // namespace convgrad
