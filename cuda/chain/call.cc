#include "cuda/chain/call.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "cuda/chain/decode.h"
#include "cuda/dense_conv/plan/wgmma_plan.h"
#include "cuda/sparse/matvec/row_limits.h"
#include "native/layer.h"

namespace jsc {
namespace {

ffi::Unexpected<ffi::Error> Invalid(const std::string& sentence) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument, sentence));
}

struct Buffer {
  void* data;
  DataType dtype;
  std::vector<int64_t> size;
};

Buffer Read(ffi::AnyBuffer buffer) {
  return {buffer.untyped_data(), TypeOf(buffer), {buffer.dimensions().begin(), buffer.dimensions().end()}};
}

int64_t ElementBytes(DataType dtype) { return dtype == DataType::F32 ? 4 : 2; }

// The buffers of a call, and its values as they are made out of them.
class Reader {
 public:
  std::string Collect(ffi::RemainingArgs operands, ffi::RemainingRets results) {
    for (size_t i = 0; i < operands.size(); ++i) {
      auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return "operand " + std::to_string(i) + " is not a buffer";
      operands_.push_back(Read(*buffer));
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return "result " + std::to_string(i) + " is not a buffer";
      results_.push_back(Read(**buffer));
    }
    if (operands_.empty() || results_.size() < 2) return "a chain has an operand, a result and a workspace at least";
    return "";
  }
  // Replaces the last operand by those that it holds, kPackedFields for each.
  std::string TakeApart(ffi::Span<const int64_t> fields) {
    const Buffer whole = operands_.back();
    operands_.pop_back();
    if (whole.dtype != dtype() || whole.size.size() != 1) return "the last operand must be [size], of x's dtype";
    for (const int64_t* f = fields.begin(); f != fields.end(); f += kPackedFields) {
      const int64_t offset = f[0], axes = f[1];
      if (axes < 1 || axes > kPackedFields - 2) return "an operand in the last one has too many axes or none";
      Buffer part{nullptr, whole.dtype, {f + 2, f + 2 + axes}};
      int64_t elements = 1;
      for (const int64_t n : part.size) {
        if (n < 1 || n > kMaxElements / elements) return "an operand in the last one has a size out of range";
        elements *= n;
      }
      if (offset < 0 || offset % kPackedAlignment != 0 || elements > whole.size[0] - offset) {
        return "offset " + std::to_string(offset) + " is no place in the last operand, of " +
               std::to_string(whole.size[0]) + " elements";
      }
      part.data = static_cast<char*>(whole.data) + offset * ElementBytes(whole.dtype);
      operands_.push_back(part);
    }
    return "";
  }
  const Buffer& workspace() const { return results_.back(); }
  DataType dtype() const { return operands_[0].dtype; }

  std::string ReadValue(const int64_t* fields, bool precise) {
    const int64_t where = fields[0], index = fields[1];
    constexpr int64_t kNowhere = 3;
    ChainValue value{nullptr, {fields[2], fields[3], fields[4], fields[5]}, nullptr};
    int64_t elements = 1;
    for (int64_t n : value.size) {
      if (n < 1 || n > kMaxElements / elements) return "sizes must be at least 1 and have at most 2^31 - 1 elements";
      elements *= n;
    }
    if (where == 2) {
      if (std::string wrong = Place(index, elements, &value.data); !wrong.empty()) return wrong;
    } else if (where != kNowhere) {
      const std::vector<Buffer>& buffers = where == 0 ? operands_ : results_;
      const int64_t count = static_cast<int64_t>(buffers.size()) - (where == 0 ? 0 : 1);
      if (where < 0 || where > 2 || index < 0 || index >= count) return "there is no such operand or result";
      const Buffer& buffer = buffers[index];
      if (buffer.dtype != dtype() || !std::equal(buffer.size.begin(), buffer.size.end(), value.size, value.size + 4)) {
        return "the operand or result has another shape or dtype";
      }
      value.data = buffer.data;
    }
    if (fields[6] >= 0) {
      if (dtype() != DataType::F32 || !precise || !value.data || where == 0) {
        return "only what a layer of float32 at HIGHEST writes has low parts";
      }
      if (std::string wrong = Place(fields[6], elements, &value.low); !wrong.empty()) return wrong;
    }
    values_.push_back(value);
    return "";
  }

  const ChainValue* Value(int64_t index) const {
    return index >= 0 && index < static_cast<int64_t>(values_.size()) ? &values_[index] : nullptr;
  }
  // An operand of these sizes, or null.
  const void* Operand(int64_t index, std::initializer_list<int64_t> size) const {
    if (index < 0 || index >= static_cast<int64_t>(operands_.size())) return nullptr;
    const Buffer& buffer = operands_[index];
    const bool fits = buffer.dtype == dtype() && buffer.size.size() == size.size() &&
                      std::equal(size.begin(), size.end(), buffer.size.begin());
    return fits ? buffer.data : nullptr;
  }

 private:
  // So many elements from a byte of the workspace on.
  std::string Place(int64_t byte, int64_t elements, void** data) const {
    const int64_t bytes = workspace().size.empty() ? 0 : workspace().size[0];
    if (byte < 0 || byte % 256 != 0 || byte > bytes - elements * ElementBytes(dtype())) {
      return "byte " + std::to_string(byte) + " is no place in a workspace of " + std::to_string(bytes) + " bytes";
    }
    *data = static_cast<char*>(workspace().data) + byte;
    return "";
  }

  std::vector<Buffer> operands_, results_;
  std::vector<ChainValue> values_;
};

// Whether only a convolution's result is nowhere, and only the pool behind it reads that. `in_front`, `behind`: the
// fields of the steps beside f's, or null.
bool HasPlaces(const int64_t* f, const int64_t* in_front, const int64_t* behind, const Reader& reader) {
  const auto is_nowhere = [&](int64_t value) { return value >= 0 && !reader.Value(value)->data; };
  const auto takes = [](const int64_t* conv, const int64_t* pool) {
    return conv && pool && conv[0] == static_cast<int64_t>(ChainKind::kConv) && conv[4] < 0 &&
           pool[0] == static_cast<int64_t>(ChainKind::kMaxPool) && pool[1] == conv[5];
  };
  return !is_nowhere(f[4]) && (!is_nowhere(f[1]) || takes(in_front, f)) && (!is_nowhere(f[5]) || takes(f, behind));
}

bool SameSize(const ChainValue& a, const ChainValue& b) { return std::equal(a.size, a.size + 4, b.size); }

// Fills the rest of a dense layer's step.
std::string ReadDense(const int64_t* f, const Reader& reader, ChainStep* step) {
  const ChainValue &x = step->x, &out = step->out;
  const int64_t pixels = x.size[1] * x.size[2], out_channels = out.size[3];
  if (x.size[0] != 1 || out.size[0] != 1 || out.size[1] != 1 || out.size[2] != 1) {
    return "a dense layer has an image, and results of a pixel";
  }
  std::copy(f + 6, f + 8, step->window);
  const bool averages = step->window[0] == x.size[1] && step->window[1] == x.size[2];
  if (!averages && (step->window[0] != 1 || step->window[1] != 1)) return "window must be all of x, or a pixel";
  if (f[4] >= 0 || step->groups != 1) return "a dense layer has no residual and no groups";
  const int64_t channels = averages ? x.size[3] : pixels * x.size[3];
  if (channels > kMaxElements / out_channels) return "the kernel has more than 2^31 - 1 elements";
  step->kernel = reader.Operand(f[2], {1, 1, 1, channels, out_channels});
  if (!step->kernel) return "the kernel is not [1, 1, 1, C, K]";
  if (f[3] >= 0 && !(step->bias = reader.Operand(f[3], {1, out_channels}))) return "the bias is not [1, K]";
  return HasWholePieces(x.size[3], out_channels, ElementBytes(reader.dtype()))
             ? ""
             : "channels or output channels do not come in whole 16 bytes";
}

// Fills a step from its fields; a sentence where they do not fit.
std::string ReadStep(const int64_t* f, const Reader& reader, ChainStep* step) {
  const ChainValue *x = reader.Value(f[1]), *out = reader.Value(f[5]), *residual = reader.Value(f[4]);
  if (f[0] < 0 || f[0] > 2) return "kind must be 0, 1 or 2";
  if (!x || !out || (f[4] >= 0 && !residual)) return "there is no such value";
  step->kind = static_cast<ChainKind>(f[0]);
  step->x = *x;
  step->out = *out;
  step->relu = f[16] != 0;
  step->groups = f[17];
  if (step->kind == ChainKind::kDense) return ReadDense(f, reader, step);
  if (x->size[0] != out->size[0]) return "x and out have different numbers of images";
  for (int i = 0; i < 2; ++i) {
    step->window[i] = f[6 + i];
    step->stride[i] = f[8 + i];
    step->pad_low[i] = f[10 + 2 * i];
    step->pad_high[i] = f[11 + 2 * i];
    step->dilation[i] = f[14 + i];
    const auto sizes = {step->window[i], step->stride[i], step->dilation[i]};
    const auto padding = {step->pad_low[i], step->pad_high[i]};
    if (std::min(sizes) < 1 || std::max(sizes) > kFar || std::min(padding) < -kFar || std::max(padding) > kFar) {
      return "sizes of windows are 1 to " + std::to_string(kFar) + " and padding is at most that";
    }
    const int64_t span =
        x->size[1 + i] + step->pad_low[i] + step->pad_high[i] - (step->window[i] - 1) * step->dilation[i] - 1;
    if (span < 0 || span / step->stride[i] + 1 != out->size[1 + i]) return "out has another size than the windows of x";
  }
  const int64_t channels = x->size[3], out_channels = out->size[3];
  if (step->kind == ChainKind::kMaxPool) {
    if (channels != out_channels || f[2] >= 0 || f[3] >= 0 || residual || step->relu || step->groups != 1) {
      return "a pool has x and out of the same channels and nothing else";
    }
    return channels * ElementBytes(reader.dtype()) % 16 ? "a pool's channels do not come in whole 16 bytes" : "";
  }
  if (step->groups < 1 || channels % step->groups != 0 || out_channels % step->groups != 0) {
    return "groups do not divide the channels of x and out";
  }
  if (step->window[0] * step->window[1] > kMaxElements / (channels / step->groups) / out_channels) {
    return "the kernel has more than 2^31 - 1 elements";
  }
  step->kernel = reader.Operand(f[2], {1, step->window[0], step->window[1], channels / step->groups, out_channels});
  if (!step->kernel) return "the kernel is not [1, kh, kw, C / groups, K]";
  if (f[3] >= 0 && !(step->bias = reader.Operand(f[3], {1, out_channels}))) return "the bias is not [1, K]";
  if (residual && !SameSize(*residual, *out)) return "the residual has another shape than out";
  if (residual) step->residual = residual->data;
  return "";
}

// Fills a step's tile from its fields; a sentence where there is no such tile.
std::string ReadStepTile(const int64_t* f, ChainStep* step) {
  const std::optional<Candidate> tile = ReadTile(f);
  if (!tile) {
    std::string fields = std::to_string(f[0]);
    for (int i = 1; i < kTileFields; ++i) fields += ", " + std::to_string(f[i]);
    return "there is no tile of (" + fields + ") as output channels, pixels, patch, splits";
  }
  if (tile->family != Family::kByModel && step->kind != ChainKind::kConv) return "only a convolution has a tile";
  step->tile = *tile;
  return "";
}

}  // namespace

std::optional<Candidate> ReadTile(const int64_t* f) {
  if (std::all_of(f, f + kTileFields, [](int64_t field) { return field == 0; })) return Candidate{};
  if (std::any_of(f, f + kTileFields, [](int64_t field) { return field < 0 || field > kFar; })) return {};
  Candidate tile{Family::kWgmma, {}};
  std::copy(f, f + kTileFields, tile.tile);
  return IsWgmmaTile(tile) ? std::optional(tile) : std::nullopt;
}

ffi::ErrorOr<ChainCall> MakeChainCall(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                      ffi::Dictionary attributes) {
  const auto values = attributes.get<ffi::Span<const int64_t>>("values");
  const auto layers = attributes.get<ffi::Span<const int64_t>>("layers");
  const auto precision = attributes.get<int64_t>("precision");
  if (!values.has_value() || values->size() % kValueFields || !layers.has_value() || layers->size() % kStepFields) {
    return Invalid("attributes values and layers must be arrays of " + std::to_string(kValueFields) + " and " +
                   std::to_string(kStepFields) + " int64 for each");
  }
  const auto tiles = attributes.get<ffi::Span<const int64_t>>("tiles");
  const bool has_tiles = attributes.contains("tiles");
  if (has_tiles && (!tiles.has_value() || tiles->size() != layers->size() / kStepFields * kTileFields)) {
    return Invalid("attribute tiles must be an array of " + std::to_string(kTileFields) + " int64 for each layer");
  }
  if (!precision.has_value() || *precision < 0 || *precision > 2) {
    return Invalid("attribute precision must be 0, 1 or 2, an int64");
  }
  const auto packed = attributes.get<ffi::Span<const int64_t>>("packed");
  const bool is_packed = attributes.contains("packed");
  if (is_packed && (!packed.has_value() || packed->size() % kPackedFields)) {
    return Invalid("attribute packed must be an array of " + std::to_string(kPackedFields) + " int64 for each operand");
  }
  Reader reader;
  if (std::string wrong = reader.Collect(operands, results); !wrong.empty()) return Invalid(wrong);
  if (is_packed && operands.size() < 2) return Invalid("with attribute packed there must be another operand");
  if (is_packed) {
    if (std::string wrong = reader.TakeApart(*packed); !wrong.empty()) return Invalid(wrong);
  }
  ChainCall call{reader.dtype(), *precision == static_cast<int64_t>(Precision::kHighest), {}};
  const Buffer& workspace = reader.workspace();
  if (workspace.dtype != DataType::U8 || workspace.size.size() != 1) {
    return Invalid("the last result must be a workspace, uint8 of one axis");
  }
  for (size_t i = 0; i < values->size(); i += kValueFields) {
    if (std::string wrong = reader.ReadValue(values->begin() + i, call.precise); !wrong.empty()) {
      return Invalid("value " + std::to_string(i / kValueFields) + ": " + wrong);
    }
  }
  for (size_t i = 0; i < layers->size(); i += kStepFields) {
    ChainStep step{};
    const int64_t* fields = layers->begin() + i;
    if (std::string wrong = ReadStep(fields, reader, &step); !wrong.empty()) {
      return Invalid("layer " + std::to_string(i / kStepFields) + ": " + wrong);
    }
    const int64_t* behind = i + kStepFields < layers->size() ? fields + kStepFields : nullptr;
    if (!HasPlaces(fields, i > 0 ? fields - kStepFields : nullptr, behind, reader)) {
      return Invalid("layer " + std::to_string(i / kStepFields) +
                     ": only what the pool behind a convolution without a residual reads may be nowhere");
    }
    if (has_tiles) {
      if (std::string wrong = ReadStepTile(tiles->begin() + i / kStepFields * kTileFields, &step); !wrong.empty()) {
        return Invalid("layer " + std::to_string(i / kStepFields) + ": " + wrong);
      }
    }
    call.steps.push_back(step);
  }
  return call;
}

}  // namespace jsc
