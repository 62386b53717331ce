// SPDX-License-Identifier: Apache-2.0
// One call of the library: a convolution's problem, its direction and what is fused, as the plain numbers that generated
// code holds. The order of fields is that of OneDnn.numbers in onednn/backend.py.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace convgrad {

using Dims = dnnl::memory::dims;
using Desc = dnnl::memory::desc;

constexpr int64_t kForward = 0, kBackwardWeight = 1, kBackwardData = 2;
constexpr int64_t kAnyFormats = 0;  // of data and gradients; of weights always

struct Spec {
  int64_t direction, rank, batch, in_channels, out_channels, groups;  // batch -1: as the first tensor has it
  int64_t data_extents[3], grad_extents[3], kernel[3], strides[3], dilation[3], pad_low[3], pad_high[3];
  int64_t data_type, weight_type, grad_type;                     // dnnl_data_type_t
  int64_t data_axes[5], weight_axes[5], grad_axes[5];            // for each place in memory the axis, N C ... or O I ...
  int64_t bias, relu, accumulate, bias_grad;                     // relu is 0: oneDNN's turns NaN into zero
  int64_t formats;                                               // kAnyFormats, or 1: as the caller has them
  int64_t bias_accumulate;                                       // whether the bias gradient has a summand, too

  static constexpr int kCount = 6 + 7 * 3 + 3 + 3 * 5 + 6;

  bool operator==(const Spec& other) const { return std::memcmp(this, &other, sizeof(Spec)) == 0; }

  dnnl::memory::data_type Type(int64_t type) const { return static_cast<dnnl::memory::data_type>(type); }

  Dims Spatial(const int64_t (&values)[3]) const { return Dims(values, values + rank); }

  /*! \brief X in the order N C spatial, with the strides of its layout. */
  Desc Data() const { return Activation(in_channels, data_extents, data_type, data_axes); }
  Desc Grad() const { return Activation(out_channels, grad_extents, grad_type, grad_axes); }

  /*! \brief W in the order (G) O I spatial; a group's outputs follow one another along O, whatever the layout. */
  Desc Weight() const {
    Dims dims{out_channels, in_channels / groups};
    dims.insert(dims.end(), kernel, kernel + rank);
    Dims strides = Strides(dims, weight_axes);
    if (groups > 1) {
      const int64_t each = out_channels / groups;
      dims.insert(dims.begin(), groups);
      strides.insert(strides.begin(), strides[0] * each);
      dims[1] = each;
    }
    return Desc(dims, Type(weight_type), strides);
  }

  Desc Vector(int64_t type) const {
    return Desc({out_channels}, Type(type), dnnl::memory::format_tag::a);
  }

 private:
  Desc Activation(int64_t channels, const int64_t (&extents)[3], int64_t type, const int64_t (&axes)[5]) const {
    Dims dims{batch, channels};
    dims.insert(dims.end(), extents, extents + rank);
    return Desc(dims, Type(type), Strides(dims, axes));
  }

  Dims Strides(const Dims& dims, const int64_t (&axes)[5]) const {
    Dims strides(dims.size());
    int64_t stride = 1;
    for (size_t place = dims.size(); place-- > 0;) {
      strides[axes[place]] = stride;
      stride *= dims[axes[place]];
    }
    return strides;
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
