// An operation as XLA calls it: a plain function of arrays and numbers, found under a name of C.
//
// This reads XLA's C interface, which is stable. Its C++ headers do the same for every type there is, with templates that
// take a compiler two seconds a file: three quarters of the time that building this library took.

#ifndef QUIRE_OPERATION_H_
#define QUIRE_OPERATION_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <tuple>

#include "xla/ffi/api/c_api.h"

namespace quire {

// What is wrong with a call; nullptr: nothing.
using Fault = const char*;

template <typename T>
constexpr XLA_FFI_DataType kType = XLA_FFI_DataType_INVALID;
template <>
constexpr XLA_FFI_DataType kType<float> = XLA_FFI_DataType_F32;
template <>
constexpr XLA_FFI_DataType kType<int8_t> = XLA_FFI_DataType_S8;
template <>
constexpr XLA_FFI_DataType kType<int32_t> = XLA_FFI_DataType_S32;
template <>
constexpr XLA_FFI_DataType kType<int64_t> = XLA_FFI_DataType_S64;
template <>
constexpr XLA_FFI_DataType kType<bool> = XLA_FFI_DataType_PRED;

// An array. Of `void` it has any type.
template <typename T>
struct Array {
  T* data = nullptr;
  const int64_t* sizes = nullptr;
  int64_t rank = 0;
  XLA_FFI_DataType type = XLA_FFI_DataType_INVALID;

  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < rank; ++i) product *= sizes[i];
    return product;
  }
};

template <typename T>
struct In : Array<const T> {};

template <typename T>
struct Out : Array<T> {};

// How many of `all` rows count.
inline int64_t first_rows(In<int32_t> count, int64_t all) { return std::clamp<int64_t>(count.data[0], 0, all); }

struct Integers {
  const int64_t* data = nullptr;
  size_t count = 0;
};

// Reads the parts of a call in their order: arrays, results, and attributes by name.
class Call {
 public:
  Call(const XLA_FFI_CallFrame* frame, const char* const* names) : frame_(frame), names_(names) {}

  template <typename T>
  void read(In<T>& to) {
    if (arg_ >= frame_->args.size) return fail("an operation has fewer arguments than it needs");
    fill<T>(static_cast<const XLA_FFI_Buffer*>(frame_->args.args[arg_++]), to);
  }

  template <typename T>
  void read(Out<T>& to) {
    if (ret_ >= frame_->rets.size) return fail("an operation has fewer results than it needs");
    fill<T>(static_cast<const XLA_FFI_Buffer*>(frame_->rets.rets[ret_++]), to);
  }

  void read(float& to) { scalar(to); }
  void read(int64_t& to) { scalar(to); }
  void read(bool& to) { scalar(to); }

  void read(Integers& to) {
    const auto* found = static_cast<const XLA_FFI_Array*>(attribute(XLA_FFI_AttrType_ARRAY));
    if (found == nullptr) return;
    if (found->dtype != kType<int64_t>) return fail("an attribute of an operation has another type");
    to = {static_cast<const int64_t*>(found->data), found->size};
  }

  Fault fault() {
    if (fault_ == nullptr && (arg_ != frame_->args.size || ret_ != frame_->rets.size)) {
      fail("an operation has more arguments or results than it needs");
    }
    return fault_;
  }

 private:
  template <typename T, typename To>
  void fill(const XLA_FFI_Buffer* from, To& to) {
    if (kType<T> != XLA_FFI_DataType_INVALID && from->dtype != kType<T>) {
      return fail("an array of an operation has another type");
    }
    to.data = static_cast<T*>(from->data);
    to.sizes = from->dims;
    to.rank = from->rank;
    to.type = from->dtype;
  }

  template <typename T>
  void scalar(T& to) {
    const auto* found = static_cast<const XLA_FFI_Scalar*>(attribute(XLA_FFI_AttrType_SCALAR));
    if (found == nullptr) return;
    if (found->dtype != kType<T>) return fail("an attribute of an operation has another type");
    to = *static_cast<const T*>(found->value);
  }

  const void* attribute(XLA_FFI_AttrType type) {
    const char* name = *names_++;
    const XLA_FFI_Attrs& attrs = frame_->attrs;
    for (int64_t i = 0; i < attrs.size; ++i) {
      const XLA_FFI_ByteSpan* its = attrs.names[i];
      if (its->len != std::strlen(name) || std::memcmp(its->ptr, name, its->len) != 0) continue;
      if (attrs.types[i] == type) return attrs.attrs[i];
    }
    fail("an operation lacks an attribute");
    return nullptr;
  }

  void fail(Fault fault) {
    if (fault_ == nullptr) fault_ = fault;
  }

  const XLA_FFI_CallFrame* frame_;
  const char* const* names_;
  int64_t arg_ = 0, ret_ = 0;
  Fault fault_ = nullptr;
};

// Calls the function with its parts, the attributes having these names in their order.
template <typename... Parts>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, Fault (*function)(Parts...), std::initializer_list<const char*> names) {
  const auto* asked = frame->extension_start;  // the name of its type depends on the version
  if (asked != nullptr && asked->type == XLA_FFI_Extension_Metadata) {  // XLA asks for the version
    XLA_FFI_Metadata* metadata = reinterpret_cast<const XLA_FFI_Metadata_Extension*>(asked)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    // An XLA older than the headers refuses their version. All that is read here is in every version.
    const int its = frame->api == nullptr ? XLA_FFI_API_MINOR : frame->api->api_version.minor_version;
    metadata->api_version.minor_version = std::min(its, XLA_FFI_API_MINOR);
    metadata->traits = 0;
    if (metadata->struct_size >= sizeof(XLA_FFI_Metadata)) metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  Call reader(frame, names.begin());
  std::tuple<Parts...> parts;
  std::apply([&](Parts&... each) { (reader.read(each), ...); }, parts);
  Fault fault = reader.fault();
  if (fault == nullptr) fault = std::apply(function, parts);
  if (fault == nullptr) return nullptr;
  XLA_FFI_Error_Create_Args error{};
  error.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  error.message = fault;
  error.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&error);
}

}  // namespace quire

// The symbol `name` for a function, and the names of its attributes.
#define QUIRE_OPERATION(name, function, ...) \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return quire::call(frame, function, {__VA_ARGS__}); }

#endif  // QUIRE_OPERATION_H_
