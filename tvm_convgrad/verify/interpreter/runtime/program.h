// SPDX-License-Identifier: Apache-2.0
// What the interpreter executes: trees of expressions and statements, made from a PrimFunc by lower.h.
#ifndef CONVGRAD_INTERPRETER_PROGRAM_H_
#define CONVGRAD_INTERPRETER_PROGRAM_H_

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace convgrad {

constexpr int kMostLanes = 64;

/*! \brief How the lanes of a value are held: every integer and bool as int64, every float up to 32 bits as float. */
enum class Held : uint8_t { kInt, kFloat, kDouble };

struct Type {
  uint8_t code = kDLInt;
  uint8_t bits = 32;
  int lanes = 1;
  Held held() const {
    if (code == kDLFloat || code == kDLBfloat) return bits == 64 ? Held::kDouble : Held::kFloat;
    return Held::kInt;
  }
  bool is_narrow() const { return code == kDLBfloat || (code == kDLFloat && bits == 16); }
  int bytes() const { return bits <= 8 ? 1 : bits / 8; }
};

enum class Op : uint8_t {
  kConst, kVar, kAdd, kSub, kMul, kDiv, kMod, kFloorDiv, kFloorMod, kMin, kMax,
  kEQ, kNE, kLT, kLE, kGT, kGE, kAnd, kOr, kNot, kSelect, kIfThenElse,
  kCast, kReinterpret, kShiftLeft, kShiftRight, kBitAnd, kBitOr, kBitXor,
  kBroadcast, kRamp, kShuffle, kLoad, kMaskedLoad, kDotProduct, kNarrow,
};

struct Expr {
  Op op = Op::kConst;
  Type type;
  const Expr *a = nullptr, *b = nullptr, *c = nullptr;
  int64_t integer = 0;    // of a constant
  double real = 0;        // of a constant
  int slot = 0;           // of a variable or a buffer
  std::vector<const Expr*> parts;  // of a shuffle
  std::vector<int> order;          // of a shuffle
};

enum class Do : uint8_t {
  kNothing, kSequence, kFor, kParallel, kIf, kStore, kMaskedStore, kAlloc, kDecl, kBind, kAssert,
  kTileConfigure, kTileRelease, kTileZero, kTileLoad, kTileStore, kTileDot, kTileHalf,
};

struct Stmt {
  Do what = Do::kNothing;
  const Expr *a = nullptr, *b = nullptr, *c = nullptr;  // condition, extent, index, value, mask
  int slot = 0;       // of a variable or a buffer
  int source = 0;     // the buffer that a declared one is a view of
  std::vector<const Stmt*> body;
  std::vector<const Expr*> shape;
  std::string text;   // of an assertion
  std::vector<int> tiles;  // the tile registers of an instruction
};

struct BufferInfo {
  std::string name;
  Type type;
};

struct Program {
  std::deque<Expr> expressions;
  std::deque<Stmt> statements;
  std::vector<BufferInfo> buffers;
  std::vector<std::string> variables;
  std::vector<int> parameters;                           // buffers
  std::vector<std::vector<const Expr*>> parameter_shapes;
  std::vector<int> symbols;                              // variables of the parameters' shapes
  const Stmt* body = nullptr;
};

}  // namespace convgrad

#endif  // CONVGRAD_INTERPRETER_PROGRAM_H_
