// SPDX-License-Identifier: Apache-2.0
// A kernel of CUTLASS on the host: its own iterators, for every thread of every block, with the product of two tiles in
// plain C++ between them. Every element of a tile must be loaded once, every access must lie in its tensor, and every
// element of the result must be written as often as there are slices that write to it. What this leaves out is what all
// of CUTLASS's matrix products share: shared memory, fragments, and the multiply-add itself.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "arguments.h"

namespace convgrad {

template <typename Iterator, typename = void>
struct LoadsFragments : std::false_type {};
template <typename Iterator>
struct LoadsFragments<Iterator, std::void_t<typename Iterator::Fragment>> : std::true_type {};

inline void Demand(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

/*! \brief A tile of an operand, by lines along the contiguous axis of memory. */
class Tile {
 public:
  Tile(int contiguous, int strided) : contiguous_(contiguous), strided_(strided) {}

  void Clear() { values_.assign(contiguous_ * strided_, std::numeric_limits<float>::quiet_NaN()); }

  void Put(int contiguous, int strided, float value) {
    Demand(contiguous >= 0 && contiguous < contiguous_ && strided >= 0 && strided < strided_, "outside of the tile");
    float& place = values_[strided * contiguous_ + contiguous];
    Demand(std::isnan(place), "an element of a tile is loaded twice");
    place = value;
  }

  float At(int contiguous, int strided) const { return values_[strided * contiguous_ + contiguous]; }

  void DemandFull() const {
    for (float value : values_) Demand(!std::isnan(value), "an element of a tile is not loaded");
  }

 private:
  int contiguous_, strided_;
  std::vector<float> values_;
};

/*! \brief One thread's part of a tile, as a kernel of two stages (fragments) or of more (single accesses) loads it. */
template <typename Iterator>
void Load(Iterator& iterator, int thread, Tile& tile) {
  using Map = typename Iterator::ThreadMap;
  using Access = typename Iterator::AccessType;
  using Element = typename Iterator::Element;
  constexpr int kVector = Map::kElementsPerAccess, kCount = Map::Iterations::kCount;
  const auto first = Map::initial_offset(thread);
  std::vector<Element> values(kCount * kVector, Element(0));
  if constexpr (LoadsFragments<Iterator>::value) {
    typename Iterator::Fragment fragment;
    iterator.load(fragment);
    for (int i = 0; i < kCount * kVector; ++i) values[i] = fragment[i];
  } else {
    iterator.set_iteration_index(0);
    for (int i = 0; i < kCount * kVector / Access::kElements; ++i, ++iterator) {
      if (!iterator.valid()) continue;
      Within(iterator.get(), sizeof(Access));
      std::memcpy(&values[i * Access::kElements], iterator.get(), sizeof(Access));
    }
  }
  for (int i = 0; i < kCount * kVector; ++i) {
    const int line = i / kVector;
    tile.Put(first.contiguous() + line % Map::Iterations::kContiguous * Map::Delta::kContiguous + i % kVector,
             first.strided() + line / Map::Iterations::kContiguous * Map::Delta::kStrided, float(values[i]));
  }
}

template <typename Iterator>
void Advance(Iterator& iterator) {
  iterator.advance();
}

/*! \brief Sums of one block, m by n. */
template <typename Kernel>
class Block {
 public:
  using Mma = typename Kernel::Mma;
  using Shape = typename Mma::Shape;
  static constexpr bool kLoadsK = Kernel::kConvolutionalOperator != cutlass::conv::Operator::kWgrad;
  static constexpr bool kFprop = Kernel::kConvolutionalOperator == cutlass::conv::Operator::kFprop;

  Block() : sums_(Shape::kM * Shape::kN, 0.F) {}

  float At(int m, int n) const { return sums_[m * Shape::kN + n]; }

  /*! \brief The main loop; `make_a` and `make_b` give a thread's iterators. */
  template <typename MakeA, typename MakeB>
  void Multiply(int iterations, MakeA make_a, MakeB make_b) {
    // Lines of memory run along k, or along m and n.
    Tile a(kLoadsK ? Shape::kK : Shape::kM, kLoadsK ? Shape::kM : Shape::kK);
    Tile b(kFprop ? Shape::kK : Shape::kN, kFprop ? Shape::kN : Shape::kK);
    std::vector<decltype(make_a(0))> as;
    std::vector<decltype(make_b(0))> bs;
    for (int thread = 0; thread < Kernel::kThreadCount; ++thread) {
      as.push_back(make_a(thread));
      bs.push_back(make_b(thread));
    }
    // As many tiles more as the stages load ahead, of which nothing is used.
    for (int k = 0; k < iterations + Mma::kStages - 1; ++k) {
      a.Clear();
      b.Clear();
      for (int thread = 0; thread < Kernel::kThreadCount; ++thread) {
        Load(as[thread], thread, a);
        Load(bs[thread], thread, b);
        Advance(as[thread]);
        Advance(bs[thread]);
      }
      a.DemandFull();
      b.DemandFull();
      if (k < iterations) Add(a, b);
    }
  }

 private:
  void Add(const Tile& a, const Tile& b) {
    for (int m = 0; m < Shape::kM; ++m) {
      for (int k = 0; k < Shape::kK; ++k) {
        const float value = kLoadsK ? a.At(k, m) : a.At(m, k);
        if (value == 0.F) continue;
        for (int n = 0; n < Shape::kN; ++n) sums_[m * Shape::kN + n] += value * (kFprop ? b.At(k, n) : b.At(n, k));
      }
    }
  }

  std::vector<float> sums_;
};

/*! \brief One thread's part of the epilogue: sums, and a summand where there is one, through the output operation. */
template <typename Kernel, typename Iterator>
void Store(const Block<Kernel>& block, const typename Kernel::EpilogueOutputOp& op, Iterator to, Iterator from,
           int thread) {
  using Map = typename Iterator::ThreadMap;
  using Op = typename Kernel::EpilogueOutputOp;
  using Iterations = typename Map::Iterations;
  constexpr int kVector = Map::kElementsPerAccess;
  static_assert(Op::kCount == kVector);
  const auto first = Map::initial_offset(thread);
  int row_of_tile = first.row(), state[2] = {0, 0};
  for (int i = 0; i < Iterator::kIterations; ++i, ++to, ++from) {
    typename Iterator::Fragment summand, result;
    summand.clear();
    if (op.is_source_needed()) from.load(summand);
    int place = 0;
    for (int cluster = 0; cluster < Iterations::kCluster; ++cluster) {
      for (int group = 0; group < Iterations::kGroup; ++group) {
        for (int row = 0; row < Iterations::kRow; ++row) {
          for (int column = 0; column < Iterations::kColumn; ++column, ++place) {
            const int m = row_of_tile + row * Map::Delta::kRow + group * Map::Delta::kGroup +
                          cluster * Map::Delta::kCluster;
            typename Op::FragmentAccumulator sums;
            typename Op::FragmentOutput source;
            for (int j = 0; j < kVector; ++j) {
              sums[j] = block.At(m, first.column() + column * Map::Delta::kColumn + j);
              source[j] = summand[place * kVector + j];
            }
            const typename Op::FragmentOutput stored = op.is_source_needed() ? op(sums, source) : op(sums);
            for (int j = 0; j < kVector; ++j) result[place * kVector + j] = stored[j];
          }
        }
      }
    }
    to.store(result);
    // The next tile of the accumulators, as the epilogue's own iterators go from one to the next.
    row_of_tile += Map::Shape::kRow;
    if (++state[0] == Map::Count::kRow) {
      state[0] = 0;
      row_of_tile += (Map::Shape::kGroup - 1) * Map::Shape::kRow * Map::Count::kRow;
      if (++state[1] == Map::Count::kGroup) {
        state[1] = 0;
        row_of_tile += Map::Count::kGroup * Map::Shape::kGroup * Map::Count::kRow * Map::Shape::kRow;
      }
    }
  }
}

template <typename Kernel>
class Emulation {
 public:
  using Mma = typename Kernel::Mma;
  using Iterator = typename Kernel::Epilogue::OutputTileIterator;
  using Extent = typename Kernel::ConvOutputIteratorParameter;
  static constexpr bool kStridedDgrad =
      Kernel::kConvolutionalOperator == cutlass::conv::Operator::kDgrad &&
      Kernel::kStrideSupport == cutlass::conv::StrideSupport::kStrided;

  explicit Emulation(const typename Kernel::Arguments& arguments) : params_(arguments, nullptr) {}

  /*! \brief Every block, those of a later slice after those before it. */
  void Run() {
    const auto grid = params_.grid_tiled_shape;
    for (int k = 0; k < grid.k(); ++k) {
      for (int m = 0; m < grid.m(); ++m) {
        for (int n = 0; n < grid.n(); ++n) RunBlock(m, n, k);
      }
    }
  }

 private:
  void RunBlock(int m, int n, int k) {
    const cutlass::MatrixCoord a(m * Mma::Shape::kM, k * Mma::Shape::kK), b(k * Mma::Shape::kK, n * Mma::Shape::kN);
    const cutlass::MatrixCoord d(m * Mma::Shape::kM, n * Mma::Shape::kN);
    Block<Kernel> block;
    if constexpr (kStridedDgrad) {
      const auto& p = params_.problem_size;
      const int filter = m / cutlass::conv::strided_dgrad_tile_m_per_filter(p, Mma::Shape::kM);
      int r, s, h, w;
      params_.stride_w_divmod(r, s, filter);
      cutlass::conv::strided_dgrad_starting_coords(p, params_.stride_h_divmod, params_.stride_w_divmod, r, s, h, w);
      if (h >= p.H || w >= p.W) return;
      if (r < p.R && s < p.S) {
        block.Multiply(
            params_.gemm_k_iterations / (p.R * p.S) * p.num_gemm_k_filter_positions(r, s),
            [&](int thread) {
              return typename Mma::IteratorA(params_.iterator_A, p, params_.ptr_A, thread, params_.stride_h_divmod,
                                             params_.stride_w_divmod, r, s, a);
            },
            [&](int thread) {
              return typename Mma::IteratorB(params_.iterator_B, p, params_.ptr_B, thread, r, s, b);
            });
      }
      StoreAll(block, k, [&](const typename Iterator::Params& params, auto* data, int thread) {
        return Iterator(params, data, Extent::extent(p), thread, params_.stride_h_divmod, params_.stride_w_divmod, r, s,
                        d);
      });
    } else {
      const auto& p = params_.problem_size;
      block.Multiply(
          params_.gemm_k_iterations,
          [&](int thread) { return typename Mma::IteratorA(params_.iterator_A, p, params_.ptr_A, thread, a); },
          [&](int thread) { return typename Mma::IteratorB(params_.iterator_B, p, params_.ptr_B, thread, b); });
      StoreAll(block, k, [&](const typename Iterator::Params& params, auto* data, int thread) {
        return Iterator(params, data, Extent::extent(p), thread, d);
      });
    }
  }

  template <typename Make>
  void StoreAll(const Block<Kernel>& block, int k, Make make) {
    const bool serial = params_.split_k_mode == cutlass::conv::SplitKMode::kSerial && params_.grid_tiled_shape.k() > 1;
    typename Kernel::EpilogueOutputOp op(params_.output_op);
    if (serial) op.set_k_partition(k, params_.grid_tiled_shape.k());
    for (int thread = 0; thread < Kernel::kThreadCount; ++thread) {
      Iterator to = make(params_.iterator_D, params_.ptr_D, thread);
      Iterator from = serial && k > 0 ? to : make(params_.iterator_C, params_.ptr_C, thread);
      if (params_.split_k_mode == cutlass::conv::SplitKMode::kParallel) {
        to.add_pointer_offset(k * cutlass::conv::implicit_gemm_tensor_c_size(Kernel::kConvolutionalOperator,
                                                                             params_.problem_size));
      }
      Store(block, op, to, from, thread);
    }
  }

  typename Kernel::Params params_;
};

/*!
 * \brief Compute a call on the host.
 * \param tensors as the kernel's launch takes them; `bytes` of each.
 * \param slices where parallel slices go, or null.
 * \return why not, or null. The text lives until the next call.
 */
template <typename Kernel>
const char* Emulate(const Call& call, void* const* tensors, const int64_t* bytes, void* slices, int64_t slices_bytes) {
  static std::string text;
  const bool parallel = slices != nullptr;
  const int last = static_cast<int>(call.tensors()) - 1;
  std::vector<int> writes(parallel ? slices_bytes : bytes[last], 0);
  Memory().clear();
  for (int i = 0; i < last; ++i) Memory().push_back({static_cast<char*>(tensors[i]), size_t(bytes[i]), nullptr});
  Memory().push_back({static_cast<char*>(parallel ? slices : tensors[last]), writes.size(), &writes});
  try {
    Emulation<Kernel>(ArgumentsOf<Kernel>(call, tensors, slices, parallel)).Run();
    const int wanted = parallel ? 1 : static_cast<int>(call.slices);
    for (int count : writes) Demand(count == wanted, "an element of the result is not written once by each slice");
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
  return nullptr;
}

}  // namespace convgrad
