// SPDX-License-Identifier: Apache-2.0
// From a PrimFunc, as kernels are before any pass of TVM, to the interpreter's trees.
#ifndef CONVGRAD_INTERPRETER_LOWER_H_
#define CONVGRAD_INTERPRETER_LOWER_H_

#include <tvm/ffi/function.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nodes.h"
#include "program.h"

namespace convgrad {

class Lowering {
 public:
  explicit Lowering(Program* program) : program_(*program) {}

  void Function(const ffi::Object* function) {
    for (const ffi::Object* parameter : Children(function, "params")) {
      const ffi::Object* type = Child(parameter, "ty");
      if (KindOf(type) != "BufferType") Refuse("a parameter that is not a buffer");
      program_.parameters.push_back(Buffer(parameter));
      program_.parameter_shapes.push_back(Shape(type));
    }
    program_.symbols = std::exchange(unbound_, {});
    program_.body = Statement(Child(function, "body"));
    if (!unbound_.empty()) Refuse("a variable that nothing binds: " + program_.variables[unbound_[0]]);
  }

 private:
  using Node = const ffi::Object*;

  [[noreturn]] static void Refuse(const std::string& what) {
    TVM_FFI_THROW(ValueError) << "the interpreter cannot run this function: it has " << what;
    std::abort();
  }

  static Type TypeOf(DLDataType dtype) {
    Type type;
    type.code = dtype.code;
    type.bits = dtype.bits;
    type.lanes = static_cast<int16_t>(dtype.lanes);
    if (type.code == kDLUInt && type.bits == 64) Refuse("a value of type uint64");
    if (type.lanes < 1 || type.lanes > kMostLanes) Refuse("a value of " + std::to_string(type.lanes) + " lanes");
    return type;
  }

  // -- buffers and variables

  int Buffer(Node buffer) {
    auto [place, fresh] = buffers_.try_emplace(buffer, static_cast<int>(program_.buffers.size()));
    if (fresh) {
      Node type = Child(buffer, "ty");
      program_.buffers.push_back({TextField(buffer, "name"), TypeOf(DTypeField(type))});
    }
    return place->second;
  }

  static DLDataType DTypeField(Node buffer_type) {
    ffi::Any dtype = Field(buffer_type, "dtype");
    if (auto plain = dtype.try_cast<DLDataType>()) return *plain;
    return Field(dtype.cast<ffi::ObjectRef>().get(), "dtype").cast<DLDataType>();
  }

  std::vector<const Expr*> Shape(Node buffer_type) {
    std::vector<const Expr*> shape;
    for (Node extent : Children(buffer_type, "shape")) shape.push_back(Expression(extent));
    return shape;
  }

  int Variable(Node variable, bool binds) {
    auto [place, fresh] = variables_.try_emplace(variable, static_cast<int>(program_.variables.size()));
    if (fresh) {
      program_.variables.push_back(TextField(variable, "name"));
      if (!binds) unbound_.push_back(place->second);
    }
    return place->second;
  }

  // -- statements

  Stmt* NewStatement(Do what) {
    program_.statements.emplace_back();
    program_.statements.back().what = what;
    return &program_.statements.back();
  }

  const Stmt* Statement(Node node) {
    const std::string& kind = KindOf(node);
    if (kind == "SeqStmt") {
      Stmt* made = NewStatement(Do::kSequence);
      for (Node each : Children(node, "seq")) made->body.push_back(Statement(each));
      return made;
    }
    if (kind == "BufferStore") {
      Stmt* made = NewStatement(Do::kStore);
      made->slot = Buffer(Child(node, "buffer"));
      made->a = OnlyIndex(node);
      made->b = Expression(Child(node, "value"));
      return made;
    }
    if (kind == "Bind") {
      Stmt* made = NewStatement(Do::kBind);
      made->a = Expression(Child(node, "value"));
      made->slot = Variable(Child(node, "var"), true);
      return made;
    }
    if (kind == "For") return Loop(node);
    if (kind == "IfThenElse") {
      Stmt* made = NewStatement(Do::kIf);
      made->a = Expression(Child(node, "condition"));
      made->body.push_back(Statement(Child(node, "then_case")));
      if (Node other = Child(node, "else_case")) made->body.push_back(Statement(other));
      return made;
    }
    if (kind == "AllocBuffer" || kind == "DeclBuffer") {
      bool allocates = kind == "AllocBuffer";
      Stmt* made = NewStatement(allocates ? Do::kAlloc : Do::kDecl);
      Node buffer = Child(node, "buffer");
      made->slot = Buffer(buffer);
      made->shape = Shape(Child(buffer, "ty"));
      if (!allocates) {
        made->source = ViewedBuffer(Child(node, "data"));
      }
      return made;
    }
    if (kind == "AttrStmt") {  // of helper functions, which the interpreter knows by their names
      if (TextField(node, "attr_key") != "pragma_import_llvm") Refuse("an attribute " + TextField(node, "attr_key"));
      return Statement(Child(node, "body"));
    }
    if (kind == "AssertStmt") {
      Stmt* made = NewStatement(Do::kAssert);
      made->a = Expression(Child(node, "condition"));
      for (Node part : Children(node, "message_parts")) made->text += TextField(part, "value");
      return made;
    }
    if (kind == "Evaluate") return Evaluated(Child(node, "value"));
    Refuse("a statement " + kind);
  }

  const Stmt* Loop(Node node) {
    enum { kSerial = 0, kParallel = 1 };  // of TVM's ForKind
    int64_t kind = IntField(node, "kind");
    if (kind != kSerial && kind != kParallel) Refuse("a loop of kind " + std::to_string(kind));
    const Expr* first = Expression(Child(node, "min"));
    if (first->op != Op::kConst || first->integer != 0) Refuse("a loop that begins elsewhere than at 0");
    Stmt* made = NewStatement(kind == kParallel ? Do::kParallel : Do::kFor);
    made->slot = Variable(Child(node, "loop_var"), true);
    made->a = Expression(Child(node, "extent"));
    made->body.push_back(Statement(Child(node, "body")));
    return made;
  }

  const Stmt* Evaluated(Node value) {
    if (KindOf(value) == "IntImm") return NewStatement(Do::kNothing);
    if (KindOf(value) != "Call") Refuse("a value that nothing uses");
    if (CallName(value) == "call_extern") return TileInstruction(Children(value, "args"));
    std::string intrinsic = Intrinsic(value);
    if (intrinsic == "llvm.prefetch") return NewStatement(Do::kNothing);  // a hint, which never faults
    if (intrinsic != "llvm.masked.store") Refuse("a call of " + CallName(value) + " " + intrinsic);
    std::vector<Node> arguments = Children(value, "args");  // intrinsic, value, address, mask
    Stmt* made = NewStatement(Do::kMaskedStore);
    made->b = Expression(arguments[1]);
    std::tie(made->slot, made->a) = Address(arguments[2]);
    made->c = Expression(arguments[3]);
    return made;
  }

  /*! \brief A helper of tiles: the numbers of its registers are the end of its name. */
  const Stmt* TileInstruction(const std::vector<Node>& arguments) {
    static const auto& known = *new std::unordered_map<std::string, Do>{
        {"configure", Do::kTileConfigure}, {"release", Do::kTileRelease}, {"zero", Do::kTileZero},
        {"load", Do::kTileLoad}, {"store", Do::kTileStore}, {"dot", Do::kTileDot}, {"half", Do::kTileHalf}};
    const std::string helper = TextField(arguments[0], "value"), prefix = "convgrad_tile_";
    std::string rest = helper.rfind(prefix, 0) == 0 ? helper.substr(prefix.size()) : "";
    auto what = known.find(rest.substr(0, rest.find('_')));
    if (what == known.end()) Refuse("a call of " + helper);
    Stmt* made = NewStatement(what->second);
    for (size_t at = rest.find('_'); at != std::string::npos; at = rest.find('_', at + 1)) {
      made->tiles.push_back(std::stoi(rest.substr(at + 1)));
    }
    if (arguments.size() > 1) std::tie(made->slot, made->a) = Address(arguments[1]);
    if (arguments.size() > 2) made->b = Expression(arguments[2]);
    return made;
  }

  int ViewedBuffer(Node data) {
    if (KindOf(data) != "Call" || CallName(data) != "buffer_data") Refuse("a view of no buffer");
    Node argument = Children(data, "args")[0];
    auto found = buffers_.find(argument);
    if (found == buffers_.end()) Refuse("a view of an unknown buffer");
    return found->second;
  }

  // -- expressions

  Expr* NewExpression(Op op, Type type) {
    program_.expressions.emplace_back();
    Expr* made = &program_.expressions.back();
    made->op = op;
    made->type = type;
    return made;
  }

  const Expr* Expression(Node node) {
    auto found = expressions_.find(node);
    if (found != expressions_.end()) return found->second;
    const Expr* made = MakeExpression(node);
    expressions_[node] = made;
    return made;
  }

  const Expr* MakeExpression(Node node) {
    static const auto& binary = *new std::unordered_map<std::string, Op>{
        {"Add", Op::kAdd}, {"Sub", Op::kSub}, {"Mul", Op::kMul}, {"Div", Op::kDiv}, {"Mod", Op::kMod},
        {"FloorDiv", Op::kFloorDiv}, {"FloorMod", Op::kFloorMod}, {"Min", Op::kMin}, {"Max", Op::kMax},
        {"EQ", Op::kEQ}, {"NE", Op::kNE}, {"LT", Op::kLT}, {"LE", Op::kLE}, {"GT", Op::kGT}, {"GE", Op::kGE},
        {"And", Op::kAnd}, {"Or", Op::kOr}, {"LShift", Op::kShiftLeft}, {"RShift", Op::kShiftRight},
        {"BitwiseAnd", Op::kBitAnd}, {"BitwiseOr", Op::kBitOr}, {"BitwiseXor", Op::kBitXor}};
    const std::string& kind = KindOf(node);
    Type type = TypeOf(DTypeOf(node));
    auto known = binary.find(kind);
    if (known != binary.end()) {
      Expr* made = NewExpression(known->second, type);
      made->a = Expression(Child(node, "a"));
      made->b = Expression(Child(node, "b"));
      CheckArithmetic(*made);
      return made;
    }
    if (kind == "IntImm") {
      Expr* made = NewExpression(Op::kConst, type);
      made->integer = IntField(node, "value");
      return made;
    }
    if (kind == "FloatImm") {
      Expr* made = NewExpression(Op::kConst, type);
      made->real = Field(node, "value").cast<double>();
      return made;
    }
    if (kind == "Var") {
      Expr* made = NewExpression(Op::kVar, type);
      made->slot = Variable(node, false);
      return made;
    }
    if (kind == "TensorLoad" || kind == "BufferLoad") {
      Expr* made = NewExpression(Op::kLoad, type);
      made->slot = Buffer(Child(node, kind == "TensorLoad" ? "source" : "buffer"));
      made->a = OnlyIndex(node);
      return made;
    }
    if (kind == "Not") return Unary(Op::kNot, type, Child(node, "a"));
    if (kind == "Cast") {
      const Expr* made = Unary(Op::kCast, type, Child(node, "value"));
      bool truth = type.code == kDLBool || type.bits == 1;
      if (truth && made->a->type.held() != Held::kInt) Refuse("a float that is taken for a truth value");
      return made;
    }
    if (kind == "Broadcast") return Unary(Op::kBroadcast, type, Child(node, "value"));
    if (kind == "Select") {
      return Ternary(Op::kSelect, type, Child(node, "condition"), Child(node, "true_value"),
                     Child(node, "false_value"));
    }
    if (kind == "Ramp") {
      Expr* made = NewExpression(Op::kRamp, type);
      made->a = Expression(Child(node, "base"));
      made->b = Expression(Child(node, "stride"));
      return made;
    }
    if (kind == "Shuffle") {
      Expr* made = NewExpression(Op::kShuffle, type);
      for (Node each : Children(node, "vectors")) made->parts.push_back(Expression(each));
      for (Node each : Children(node, "indices")) made->order.push_back(static_cast<int>(IntField(each, "value")));
      return made;
    }
    if (kind == "Call") return Called(node, type);
    Refuse("an expression " + kind);
  }

  const Expr* Called(Node node, Type type) {
    std::vector<Node> arguments = Children(node, "args");
    std::string name = CallName(node);
    if (name == "if_then_else") return Ternary(Op::kIfThenElse, type, arguments[0], arguments[1], arguments[2]);
    if (name == "reinterpret") return Unary(Op::kReinterpret, type, arguments[0]);
    if (name == "call_extern") {
      std::string helper = TextField(arguments[0], "value");
      if (helper == "convgrad_tile_ready" || helper == "convgrad_tile_ready_half") {  // the interpreter has tiles
        Expr* made = NewExpression(Op::kConst, type);
        made->integer = 1;
        return made;
      }
      if (helper == "convgrad_narrow_bf16") return Unary(Op::kNarrow, type, arguments[1]);
      if (helper == "convgrad_narrow_pair_bf16") {
        Type half = type;
        half.lanes = type.lanes / 2;
        Expr* made = NewExpression(Op::kShuffle, type);
        made->parts = {Unary(Op::kNarrow, half, arguments[1]), Unary(Op::kNarrow, half, arguments[2])};
        for (int i = 0; i < type.lanes; ++i) made->order.push_back(i);
        return made;
      }
      if (helper != "convgrad_dot_bf16") Refuse("a call of " + helper);
      return Ternary(Op::kDotProduct, type, arguments[1], arguments[2], arguments[3]);
    }
    if (Intrinsic(node) != "llvm.masked.load") Refuse("a call of " + name + " " + Intrinsic(node));
    Expr* made = NewExpression(Op::kMaskedLoad, type);  // intrinsic, address, mask, what the other lanes are
    std::tie(made->slot, made->a) = Address(arguments[1]);
    made->b = Expression(arguments[2]);
    made->c = Expression(arguments[3]);
    return made;
  }

  const Expr* Unary(Op op, Type type, Node operand) {
    Expr* made = NewExpression(op, type);
    made->a = Expression(operand);
    return made;
  }

  const Expr* Ternary(Op op, Type type, Node condition, Node first, Node second) {
    Expr* made = NewExpression(op, type);
    made->a = Expression(condition);
    made->b = Expression(first);
    made->c = Expression(second);
    return made;
  }

  const Expr* OnlyIndex(Node access) {
    std::vector<Node> indices = Children(access, "indices");
    if (indices.size() != 1) Refuse("an access with " + std::to_string(indices.size()) + " indices");
    return Expression(indices[0]);
  }

  std::pair<int, const Expr*> Address(Node node) {
    if (KindOf(node) != "Call" || CallName(node) != "address_of") Refuse("an address of no element");
    Node access = Children(node, "args")[0];
    return {Buffer(Child(access, KindOf(access) == "TensorLoad" ? "source" : "buffer")), OnlyIndex(access)};
  }

  /*! \brief Sums and products of 16-bit floats are none of these kernels'. */
  static void CheckArithmetic(const Expr& made) {
    if (made.type.is_narrow() && made.op != Op::kMax && made.op != Op::kMin) Refuse("arithmetic in 16-bit floats");
  }

  /*! \brief What is called, without its dialect: "reinterpret" of "prim.reinterpret". */
  static std::string CallName(Node call) {
    Node op = Child(call, "op");
    if (FindField(op, "name") == nullptr) return KindOf(op);
    std::string name = TextField(op, "name");
    return name.substr(name.rfind('.') + 1);
  }

  /*! \brief The name of the LLVM intrinsic that a call is of, or nothing. */
  static std::string Intrinsic(Node call) {
    std::string name = CallName(call);
    if (name != "call_llvm_pure_intrin" && name != "call_llvm_intrin") return "";
    Node first = Children(call, "args")[0];
    if (KindOf(first) == "StringImm") return TextField(first, "value");
    static const ffi::Function name_of = ffi::Function::GetGlobalRequired("target.llvm_get_intrinsic_name");
    return std::string(name_of(IntField(first, "value")).cast<ffi::String>());
  }

  Program& program_;
  std::unordered_map<Node, int> buffers_, variables_;
  std::unordered_map<Node, const Expr*> expressions_;
  std::vector<int> unbound_;
};

}  // namespace convgrad

#endif  // CONVGRAD_INTERPRETER_LOWER_H_
