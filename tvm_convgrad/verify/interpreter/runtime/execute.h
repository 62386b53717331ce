// SPDX-License-Identifier: Apache-2.0
// Executes a Program, and throws a Fault at the first access out of bounds, data race, overflow of an index or
// assertion that does not hold. Memory of local buffers is full of one byte until it is written.
//
// Two iterations of a parallel loop may store the same bytes to an element: where tiles do not divide a row, the last
// one overlaps the one before it, and both store what is there already or will be. Anything else is a data race.
#ifndef CONVGRAD_INTERPRETER_EXECUTE_H_
#define CONVGRAD_INTERPRETER_EXECUTE_H_

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "floats.h"
#include "program.h"
#include "tiles.h"

namespace convgrad {

union Lanes {
  int64_t i[kMostLanes];
  float f[kMostLanes];
  double d[kMostLanes];
};

/*! \brief Memory of a tensor or a local buffer, and which iterations of the running parallel loop touched its elements. */
struct Memory {
  std::vector<uint8_t> own;
  uint8_t* data = nullptr;
  int64_t elements = 0;
  int made_in = 0;     // the parallel loop that was running then; 0 for none
  int watched_in = 0;  // the parallel loop that `writer` and `reader` are of
  std::vector<int32_t> writer, reader;  // iterations + 1; 0 is none
};

struct View {
  Memory* memory = nullptr;
  int64_t extent = 0;
};

class Execution {
 public:
  Execution(const Program& program, const std::vector<uint8_t*>& tensors, const std::vector<int64_t>& elements,
            const std::vector<int64_t>& symbols, uint8_t fill)
      : program_(program),
        fill_(fill),
        memories_(program.buffers.size()),
        views_(program.buffers.size()),
        variables_(program.variables.size()) {
    for (size_t i = 0; i < program.symbols.size(); ++i) variables_[program.symbols[i]].i[0] = symbols.at(i);
    for (size_t i = 0; i < program.parameters.size(); ++i) {
      Memory& memory = memories_[program.parameters[i]];
      int64_t extent = Product(program.parameter_shapes[i]);
      if (extent != elements.at(i)) {
        throw Fault{"the argument " + program.buffers[program.parameters[i]].name + " has " +
                    std::to_string(elements[i]) + " elements, not " + std::to_string(extent)};
      }
      memory.data = tensors.at(i);
      memory.elements = extent;
      views_[program.parameters[i]] = {&memory, extent};
    }
  }

  void Run() {
    Perform(*program_.body);
    if (tiles_.configured()) throw Fault{"tile registers are in use at the end"};
  }

 private:
  static constexpr int32_t kSeveral = -1;  // readers of an element

  // -- statements

  void Perform(const Stmt& s) {
    switch (s.what) {
      case Do::kNothing:
        return;
      case Do::kSequence:
        for (const Stmt* each : s.body) Perform(*each);
        return;
      case Do::kFor: {
        int64_t count = Int(*s.a);
        for (int64_t i = 0; i < count; ++i) {
          variables_[s.slot].i[0] = i;
          Perform(*s.body[0]);
        }
        return;
      }
      case Do::kParallel: {
        if (region_ != 0) throw Fault{"a parallel loop inside of another"};
        int64_t count = Int(*s.a);
        region_ = ++regions_;
        for (int64_t i = 0; i < count; ++i) {
          variables_[s.slot].i[0] = i;
          iteration_ = static_cast<int32_t>(i + 1);
          Perform(*s.body[0]);
          if (tiles_.configured()) throw Fault{"tile registers are in use at the end of an iteration" + Where()};
        }
        region_ = 0;
        return;
      }
      case Do::kIf:
        if (Int(*s.a)) {
          Perform(*s.body[0]);
        } else if (s.body.size() > 1) {
          Perform(*s.body[1]);
        }
        return;
      case Do::kStore:
        Store(s);
        return;
      case Do::kMaskedStore:
        MaskedStore(s);
        return;
      case Do::kAlloc:
        Allocate(s);
        return;
      case Do::kDecl: {
        const View& source = views_[s.source];
        int64_t extent = Product(s.shape);
        const int own = program_.buffers[s.slot].type.bytes(), other = program_.buffers[s.source].type.bytes();
        if (source.memory == nullptr || extent * own > source.extent * other) {
          throw Fault{"a view " + program_.buffers[s.slot].name + " of " + std::to_string(extent) +
                      " elements of " + program_.buffers[s.source].name + ", which has " +
                      std::to_string(source.extent)};
        }
        views_[s.slot] = {source.memory, extent};
        return;
      }
      case Do::kBind:
        Evaluate(*s.a, variables_[s.slot]);
        return;
      case Do::kAssert:
        if (!Int(*s.a)) throw Fault{"an assertion does not hold: " + s.text};
        return;
      case Do::kTileConfigure:
        tiles_.Configure(Get(s.slot, Int(*s.a), Tiles::kConfiguration / 4));
        return;
      case Do::kTileRelease:
        tiles_.Release();
        return;
      case Do::kTileZero:
        tiles_.Clear(s.tiles[0]);
        return;
      case Do::kTileDot:
      case Do::kTileHalf:
        tiles_.Multiply(s.tiles[0], s.tiles[1], s.tiles[2], s.what == Do::kTileHalf);
        return;
      case Do::kTileLoad:
      case Do::kTileStore:
        MoveTile(s);
        return;
    }
  }

  int64_t Product(const std::vector<const Expr*>& shape) {
    int64_t product = 1;
    for (const Expr* extent : shape) product *= Int(*extent);
    return product;
  }

  void Allocate(const Stmt& s) {
    Memory& memory = memories_[s.slot];
    int64_t extent = Product(s.shape);
    memory.own.assign(extent * program_.buffers[s.slot].type.bytes(), fill_);
    memory.data = memory.own.data();
    memory.elements = extent;
    memory.made_in = region_;
    memory.watched_in = 0;
    views_[s.slot] = {&memory, extent};
  }

  // -- memory

  [[noreturn]] void OutOfBounds(int slot, int64_t index, int64_t count, bool writes) {
    std::string at = std::to_string(index);
    if (count > 1) at += " to " + std::to_string(index + count - 1);
    throw Fault{std::string(writes ? "a store to " : "a load of ") + program_.buffers[slot].name + "[" + at +
                "], which has " + std::to_string(views_[slot].extent) + " elements" + Where()};
  }

  [[noreturn]] void Race(int slot, int64_t index, const char* what) {
    throw Fault{std::string("a data race: ") + what + " " + program_.buffers[slot].name + "[" + std::to_string(index) +
                "]" + Where()};
  }

  std::string Where() {
    return region_ == 0 ? std::string() : " (iteration " + std::to_string(iteration_ - 1) + " of a parallel loop)";
  }

  /*! \brief The address of elements that are there, after the check for races. */
  const uint8_t* Get(int slot, int64_t index, int64_t count) {
    return Place(slot, index, count, nullptr);
  }

  /*! \brief Store lanes from `first` on of a value, in the buffer's type. */
  void Put(int slot, int64_t index, int64_t count, const Lanes& value, int first = 0) {
    const Type& type = program_.buffers[slot].type;
    uint8_t bytes[8 * kMostLanes];
    Write(type, bytes, static_cast<int>(count), value, first);
    std::memcpy(Place(slot, index, count, bytes), bytes, count * type.bytes());
  }

  /*! \brief Where elements are, after the checks for a load, or for a store of these bytes. */
  uint8_t* Place(int slot, int64_t index, int64_t count, const uint8_t* bytes) {
    View& view = views_[slot];
    if (index < 0 || index + count > view.extent) OutOfBounds(slot, index, count, bytes != nullptr);
    Memory& memory = *view.memory;
    if (region_ != 0 && memory.made_in != region_) Watch(slot, memory, index, count, bytes);
    return memory.data + index * program_.buffers[slot].type.bytes();
  }

  void Watch(int slot, Memory& memory, int64_t index, int64_t count, const uint8_t* bytes) {
    const int size = program_.buffers[slot].type.bytes();
    if (memory.watched_in != region_) {
      memory.writer.assign(memory.elements, 0);
      memory.reader.assign(memory.elements, 0);
      memory.watched_in = region_;
    }
    for (int64_t at = index; at < index + count; ++at) {
      int32_t &writer = memory.writer[at], &reader = memory.reader[at];
      bool foreign = writer != 0 && writer != iteration_;
      if (bytes == nullptr) {
        if (foreign) Race(slot, at, "one iteration loads what another stores,");
        if (reader != iteration_) reader = reader == 0 ? iteration_ : kSeveral;
        continue;
      }
      if (reader != 0 && reader != iteration_) Race(slot, at, "one iteration stores what another loads,");
      if (foreign && std::memcmp(memory.data + at * size, bytes + (at - index) * size, size) != 0) {
        Race(slot, at, "two iterations store different values to");
      }
      writer = iteration_;
    }
  }

  static void Read(const Type& type, const uint8_t* from, int lanes, Lanes& out, int first = 0) {
    if (type.code == kDLFloat && type.bits == 32) {
      std::memcpy(out.f + first, from, lanes * 4);
    } else if (type.code == kDLFloat && type.bits == 64) {
      std::memcpy(out.d + first, from, lanes * 8);
    } else if (type.is_narrow()) {
      for (int l = 0; l < lanes; ++l) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * l, 2);
        out.f[first + l] = type.code == kDLBfloat ? FromBfloat16(bits) : FromFloat16(bits);
      }
    } else {
      for (int l = 0; l < lanes; ++l) {
        int64_t value = 0;
        std::memcpy(&value, from + l * type.bytes(), type.bytes());
        out.i[first + l] = Wrapped(type, value);
      }
    }
  }

  static void Write(const Type& type, uint8_t* to, int lanes, const Lanes& value, int first = 0) {
    if (type.code == kDLFloat && type.bits == 32) {
      std::memcpy(to, value.f + first, lanes * 4);
    } else if (type.code == kDLFloat && type.bits == 64) {
      std::memcpy(to, value.d + first, lanes * 8);
    } else if (type.is_narrow()) {
      for (int l = 0; l < lanes; ++l) {
        float each = value.f[first + l];
        uint16_t bits = type.code == kDLBfloat ? ToBfloat16(each) : ToFloat16(each);
        std::memcpy(to + 2 * l, &bits, 2);
      }
    } else {
      for (int l = 0; l < lanes; ++l) std::memcpy(to + l * type.bytes(), &value.i[first + l], type.bytes());
    }
  }

  static int64_t Wrapped(const Type& type, int64_t value) {
    if (type.bits >= 64) return value;
    if (type.code == kDLBool || type.bits == 1) return value & 1;
    uint64_t low = static_cast<uint64_t>(value) & ((uint64_t{1} << type.bits) - 1);
    if (type.code == kDLUInt) return static_cast<int64_t>(low);
    uint64_t sign = uint64_t{1} << (type.bits - 1);
    return static_cast<int64_t>((low ^ sign) - sign);
  }

  void Store(const Stmt& s) {
    const Type& type = s.b->type;
    Lanes value;
    Evaluate(*s.b, value);
    if (type.lanes == 1) {
      Put(s.slot, Int(*s.a), 1, value);
      return;
    }
    Put(s.slot, RunOf(*s.a), type.lanes, value);
  }

  /*! \brief Where contiguous lanes begin. */
  int64_t RunOf(const Expr& index) {
    if (index.op != Op::kRamp || index.b->op != Op::kConst || index.b->integer != 1) {
      throw Fault{"an access to lanes that are not contiguous"};
    }
    return Int(*index.a);
  }

  void MaskedStore(const Stmt& s) {
    Lanes value, mask;
    Evaluate(*s.b, value);
    Evaluate(*s.c, mask);
    int64_t index = Int(*s.a);
    for (int l = 0; l < s.b->type.lanes; ++l) {
      if (mask.i[l]) Put(s.slot, index + l, 1, value, l);
    }
  }

  /*! \brief Load or store a tile register, row by row; the stride is in bytes. */
  void MoveTile(const Stmt& s) {
    const int64_t first = Int(*s.a), stride = Int(*s.b), rows = tiles_.rows(s.tiles[0]), words = tiles_.words(s.tiles[0]);
    if (program_.buffers[s.slot].type.bytes() != 4 || stride % 4 != 0) throw Fault{"a tile of other than words"};
    if (s.what == Do::kTileLoad) tiles_.Clear(s.tiles[0]);
    for (int64_t row = 0; row < rows; ++row) {
      float* words_of_row = tiles_.row(s.tiles[0], row);
      const int64_t at = first + row * (stride / 4);
      if (s.what == Do::kTileLoad) {
        std::memcpy(words_of_row, Get(s.slot, at, words), 4 * words);
      } else {
        Lanes value;
        std::memcpy(value.f, words_of_row, 4 * words);
        Put(s.slot, at, words, value);
      }
    }
  }

  // -- expressions

  /*! \brief A scalar integer. */
  int64_t Int(const Expr& e) {
    switch (e.op) {
      case Op::kConst:
        return e.integer;
      case Op::kVar:
        return variables_[e.slot].i[0];
      case Op::kAdd:
        return Fitting(e, Int(*e.a) + Int(*e.b));
      case Op::kSub:
        return Fitting(e, Int(*e.a) - Int(*e.b));
      case Op::kMul:
        return Fitting(e, Int(*e.a) * Int(*e.b));
      case Op::kLoad:
        if (e.type.code == kDLInt && e.type.bits == 32) {
          int32_t value;
          std::memcpy(&value, Get(e.slot, Int(*e.a), 1), 4);
          return value;
        }
        break;
      case Op::kAnd: {
        int64_t left = Int(*e.a);
        return Int(*e.b) & left;
      }
      case Op::kNot:
        return !Int(*e.a);
      case Op::kIfThenElse:
        return Int(*e.a) ? Int(*e.b) : Int(*e.c);
      default:
        break;
    }
    Lanes value;
    Evaluate(e, value);
    return value.i[0];
  }

  /*! \brief Signed indices must not overflow; unsigned ones wrap. */
  static int64_t Fitting(const Expr& e, int64_t value) {
    if (e.type.code == kDLUInt) return Wrapped(e.type, value);
    if (e.type.bits == 32 && value != static_cast<int32_t>(value)) {
      throw Fault{"an int32 index overflows: " + std::to_string(value)};
    }
    return value;
  }

  void Evaluate(const Expr& e, Lanes& out) {
    const int lanes = e.type.lanes;
    switch (e.op) {
      case Op::kConst:
        Fill(e.type, e.integer, e.real, out);
        return;
      case Op::kVar:
        out = variables_[e.slot];
        return;
      case Op::kBroadcast: {
        Lanes one;
        Evaluate(*e.a, one);
        for (int l = 0; l < lanes; ++l) Copy(e.type.held(), one, 0, out, l);
        return;
      }
      case Op::kRamp: {
        int64_t first = Int(*e.a), step = Int(*e.b);
        for (int l = 0; l < lanes; ++l) out.i[l] = first + l * step;
        return;
      }
      case Op::kShuffle: {
        Lanes all[4];
        int total = 0, each = e.parts[0]->type.lanes;
        if (e.parts.size() > 4) throw Fault{"a shuffle of more than four vectors"};
        for (const Expr* part : e.parts) Evaluate(*part, all[total++]);
        for (int l = 0; l < lanes; ++l) Copy(e.type.held(), all[e.order[l] / each], e.order[l] % each, out, l);
        return;
      }
      case Op::kLoad: {
        if (lanes == 1) {
          Read(program_.buffers[e.slot].type, Get(e.slot, Int(*e.a), 1), 1, out);
          return;
        }
        int64_t first = RunOf(*e.a);
        Read(program_.buffers[e.slot].type, Get(e.slot, first, lanes), lanes, out);
        return;
      }
      case Op::kMaskedLoad: {
        Lanes mask;
        Evaluate(*e.b, mask);
        Evaluate(*e.c, out);
        int64_t index = Int(*e.a);
        for (int l = 0; l < lanes; ++l) {
          if (mask.i[l]) Read(program_.buffers[e.slot].type, Get(e.slot, index + l, 1), 1, out, l);
        }
        return;
      }
      case Op::kIfThenElse:
        Evaluate(Int(*e.a) ? *e.b : *e.c, out);
        return;
      case Op::kSelect: {
        Lanes condition, first, second;
        Evaluate(*e.a, condition);
        Evaluate(*e.b, first);
        Evaluate(*e.c, second);
        bool one = e.a->type.lanes == 1;
        for (int l = 0; l < lanes; ++l) Copy(e.type.held(), condition.i[one ? 0 : l] ? first : second, l, out, l);
        return;
      }
      case Op::kNarrow: {
        Lanes a;
        Evaluate(*e.a, a);
        for (int l = 0; l < lanes; ++l) out.i[l] = ToBfloat16(WithoutDenormals(a.f[l]));
        return;
      }
      case Op::kDotProduct: {
        Lanes sum, a, b;
        Evaluate(*e.a, sum);
        Evaluate(*e.b, a);
        Evaluate(*e.c, b);
        for (int l = 0; l < lanes; ++l) out.f[l] = DotProduct(sum.f[l], a.f[l], b.f[l]);
        return;
      }
      case Op::kNot: {
        Lanes a;
        Evaluate(*e.a, a);
        for (int l = 0; l < lanes; ++l) out.i[l] = !a.i[l];
        return;
      }
      case Op::kCast:
        Cast(e, out);
        return;
      case Op::kReinterpret:
        Reinterpret(e, out);
        return;
      default:
        Binary(e, out);
    }
  }

  static void Fill(const Type& type, int64_t integer, double real, Lanes& out) {
    for (int l = 0; l < type.lanes; ++l) {
      if (type.held() == Held::kInt) out.i[l] = integer;
      if (type.held() == Held::kFloat) out.f[l] = static_cast<float>(real);
      if (type.held() == Held::kDouble) out.d[l] = real;
    }
  }

  static void Copy(Held held, const Lanes& from, int source, Lanes& to, int lane) {
    if (held == Held::kFloat) {
      to.f[lane] = from.f[source];
    } else {
      to.i[lane] = from.i[source];
    }
  }

  void Binary(const Expr& e, Lanes& out) {
    Lanes a, b;
    Evaluate(*e.a, a);
    Evaluate(*e.b, b);
    const int lanes = e.type.lanes;
    switch (e.a->type.held()) {
      case Held::kFloat:
        Floats(e.op, a.f, b.f, out.f, out.i, lanes);
        return;
      case Held::kDouble:
        Floats(e.op, a.d, b.d, out.d, out.i, lanes);
        return;
      case Held::kInt:
        for (int l = 0; l < lanes; ++l) out.i[l] = Fitting(e, Integers(e.op, a.i[l], b.i[l]));
    }
  }

  template <typename T>
  static void Floats(Op op, const T* a, const T* b, T* out, int64_t* truth, int lanes) {
    switch (op) {
#define CONVGRAD_EACH(result, expression) \
  for (int l = 0; l < lanes; ++l) result[l] = expression; \
  return
      case Op::kAdd: CONVGRAD_EACH(out, a[l] + b[l]);
      case Op::kSub: CONVGRAD_EACH(out, a[l] - b[l]);
      case Op::kMul: CONVGRAD_EACH(out, a[l] * b[l]);
      case Op::kDiv: CONVGRAD_EACH(out, a[l] / b[l]);
      case Op::kMin: CONVGRAD_EACH(out, (a[l] < b[l] ? a[l] : b[l]));  // as TVM's code for LLVM compares
      case Op::kMax: CONVGRAD_EACH(out, (a[l] > b[l] ? a[l] : b[l]));
      case Op::kEQ: CONVGRAD_EACH(truth, a[l] == b[l]);
      case Op::kNE: CONVGRAD_EACH(truth, a[l] != b[l]);
      case Op::kLT: CONVGRAD_EACH(truth, a[l] < b[l]);
      case Op::kLE: CONVGRAD_EACH(truth, a[l] <= b[l]);
      case Op::kGT: CONVGRAD_EACH(truth, a[l] > b[l]);
      case Op::kGE: CONVGRAD_EACH(truth, a[l] >= b[l]);
#undef CONVGRAD_EACH
      default:
        throw Fault{"an operation that floats do not have"};
    }
  }

  static int64_t Integers(Op op, int64_t a, int64_t b) {
    if ((op == Op::kDiv || op == Op::kMod || op == Op::kFloorDiv || op == Op::kFloorMod) && b == 0) {
      throw Fault{"a division by zero"};
    }
    switch (op) {
      case Op::kAdd: return a + b;
      case Op::kSub: return a - b;
      case Op::kMul: return a * b;
      case Op::kDiv: return a / b;
      case Op::kMod: return a % b;
      case Op::kFloorDiv: return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
      case Op::kFloorMod: return a % b + (((a % b != 0) && ((a < 0) != (b < 0))) ? b : 0);
      case Op::kMin: return a < b ? a : b;
      case Op::kMax: return a > b ? a : b;
      case Op::kEQ: return a == b;
      case Op::kNE: return a != b;
      case Op::kLT: return a < b;
      case Op::kLE: return a <= b;
      case Op::kGT: return a > b;
      case Op::kGE: return a >= b;
      case Op::kAnd: return a && b;
      case Op::kOr: return a || b;
      case Op::kShiftLeft: return a << b;
      case Op::kShiftRight: return a >> b;
      case Op::kBitAnd: return a & b;
      case Op::kBitOr: return a | b;
      case Op::kBitXor: return a ^ b;
      default: throw Fault{"an operation that integers do not have"};
    }
  }

  void Cast(const Expr& e, Lanes& out) {
    Lanes a;
    Evaluate(*e.a, a);
    const Type &from = e.a->type, &to = e.type;
    for (int l = 0; l < to.lanes; ++l) {
      if (from.held() == Held::kInt && to.held() == Held::kInt) {
        out.i[l] = to.code == kDLBool ? a.i[l] != 0 : Wrapped(to, a.i[l]);
        continue;
      }
      double value = from.held() == Held::kInt     ? static_cast<double>(a.i[l])
                     : from.held() == Held::kFloat ? static_cast<double>(a.f[l])
                                                   : a.d[l];
      if (to.held() == Held::kInt) {
        out.i[l] = static_cast<int64_t>(value);
      } else if (to.held() == Held::kDouble) {
        out.d[l] = value;
      } else if (to.code == kDLBfloat) {
        out.f[l] = FromBfloat16(ToBfloat16(static_cast<float>(value)));
      } else if (to.bits == 16) {
        out.f[l] = FromFloat16(ToFloat16(value));
      } else {
        out.f[l] = static_cast<float>(value);
      }
    }
  }

  void Reinterpret(const Expr& e, Lanes& out) {
    Lanes a;
    Evaluate(*e.a, a);
    uint8_t bytes[8 * kMostLanes];
    if (e.a->type.bytes() * e.a->type.lanes != e.type.bytes() * e.type.lanes) {
      throw Fault{"a reinterpretation between sizes"};
    }
    Write(e.a->type, bytes, e.a->type.lanes, a);
    Read(e.type, bytes, e.type.lanes, out);
  }

  const Program& program_;
  const uint8_t fill_;
  std::vector<Memory> memories_;
  std::vector<View> views_;
  std::vector<Lanes> variables_;
  int region_ = 0, regions_ = 0;
  int32_t iteration_ = 0;
  Tiles tiles_;
};

}  // namespace convgrad

#endif  // CONVGRAD_INTERPRETER_EXECUTE_H_
