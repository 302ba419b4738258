#pragma once

// Without, products are at most 32 wide where a tile has 176 or 224 columns.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/kernel_hardware_info.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace cutlass_gemm {

enum class Schedule { kPingpong, kCooperative, kStreamK };

// A stage has 128 bytes of k; as many stages as fit beside the epilogue's buffers, stored by tensor
// copies.
template <typename Element, Schedule kSchedule, int kRows, int kColumns, int kClusterRows,
          int kClusterColumns>
struct Kernel {
  using Out = cutlass::bfloat16_t;
  using Sum = float;
  using Tile = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<128 / sizeof(Element)>>;
  using Cluster = cute::Shape<cute::Int<kClusterRows>, cute::Int<kClusterColumns>, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  static constexpr bool kPingpong = kSchedule == Schedule::kPingpong;
  static constexpr bool kStreamK = kSchedule == Schedule::kStreamK;
  static constexpr int kAlignment = 16 / sizeof(Element);
  static constexpr int kOutAlignment = 16 / sizeof(Out);

  template <typename Pingpong, typename Cooperative>
  using Either = std::conditional_t<kPingpong, Pingpong, Cooperative>;
  // 8 bits: sums as the tensor cores keep them, as cuBLASLt's and our own.
  using MainloopSchedule =
      std::conditional_t<sizeof(Element) == 1,
                         Either<cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                                cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum>,
                         Either<cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                cutlass::gemm::KernelTmaWarpSpecializedCooperative>>;
  using EpilogueSchedule = Either<cutlass::epilogue::TmaWarpSpecialized,
                                  cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using Scheduler = std::conditional_t<kStreamK, cutlass::gemm::StreamKScheduler,
                                       cutlass::gemm::PersistentScheduler>;

  // Sums times the scales of both operands, which are read from the device.
  using Scales =
      cutlass::epilogue::fusion::Sm90ScalarBroadcast<Sum,
                                                     cute::Stride<cute::_0, cute::_0, cute::_0>, 2>;
  using Scaled = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, Out, Sum,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      Scales, cutlass::epilogue::fusion::Sm90AccFetch>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, Sum, Sum, void, RowMajor, kOutAlignment, Out,
      RowMajor, kOutAlignment, EpilogueSchedule, Scaled>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element,
      cutlass::layout::ColumnMajor, kAlignment, Sum, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>,
      MainloopSchedule>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, Scheduler>>;
  using GemmKernel = typename Gemm::GemmKernel;
  using Arguments = typename Gemm::Arguments;

  static Arguments arguments(const CutlassProduct& p) {
    // The scheduler is told how many clusters run at once.
    static const auto hardware =
        cutlass::KernelHardwareInfo::make_kernel_hardware_info<GemmKernel>();
    Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    args.problem_shape = cute::make_shape(p.m, p.n, p.k, 1);
    args.mainloop.ptr_A = static_cast<const Element*>(p.lhs);
    args.mainloop.dA = {p.k, {}, 0};
    args.mainloop.ptr_B = static_cast<const Element*>(p.rhs);
    args.mainloop.dB = {p.k, {}, 0};
    args.epilogue.thread = {
        {{1.0F, 1.0F}, {p.lhs_scale, p.rhs_scale}, {}},  // Scales: where there is no pointer, 1
        {},
        {}};
    args.epilogue.ptr_D = static_cast<Out*>(p.out);
    args.epilogue.dD = {p.n, {}, 0};
    args.hw_info = hardware;
    using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;
    args.scheduler.max_swizzle_size = p.swizzle;
    args.scheduler.raster_order = p.along_n != 0 ? Order::AlongN : Order::AlongM;
    if constexpr (kStreamK) {
      // Its own choice is plain tiles where the last wave is half full or more: what the
      // cooperative kernel does.
      using Mode = decltype(args.scheduler.decomposition_mode);
      args.scheduler.decomposition_mode = Mode::StreamK;
    }
    return args;
  }

  static cutlass::Status run(const CutlassProduct& p) {
    const Arguments args = arguments(p);
    const cutlass::Status status = Gemm::can_implement(args);
    if (status != cutlass::Status::kSuccess) return status;
    if (Gemm::get_workspace_size(args) > static_cast<size_t>(p.workspace_bytes)) {
      return cutlass::Status::kErrorWorkspaceNull;
    }
    return Gemm().run(args, p.workspace, p.stream);
  }

  static Entry entry() {
    const char* const schedules[] = {"pingpong", "cooperative", "streamk"};
    const std::string dtype = sizeof(Element) == 1 ? "fp8" : "bf16";
    const auto by = [](int a, int b) { return std::to_string(a) + "x" + std::to_string(b); };
    return {dtype + "_" + schedules[static_cast<int>(kSchedule)] + "_" + by(kRows, kColumns) + "_" +
                by(kClusterRows, kClusterColumns),
            run};
  }
};

// For products of thousands of rows: common tiles, and those whose waves fit 132 SMs better. Wide
// tiles share their columns with the tile below, tall ones their rows with the one beside; two the
// other way round for comparison.
template <typename Element>
std::vector<Entry> kernels_of() {
  return {
      Kernel<Element, Schedule::kPingpong, 64, 256, 2, 1>::entry(),
      Kernel<Element, Schedule::kPingpong, 128, 128, 2, 1>::entry(),
      Kernel<Element, Schedule::kPingpong, 128, 192, 2, 1>::entry(),
      Kernel<Element, Schedule::kCooperative, 128, 176, 2, 1>::entry(),
      Kernel<Element, Schedule::kCooperative, 128, 192, 2, 1>::entry(),
      Kernel<Element, Schedule::kCooperative, 128, 224, 2, 1>::entry(),
      Kernel<Element, Schedule::kCooperative, 128, 256, 2, 1>::entry(),
      Kernel<Element, Schedule::kCooperative, 128, 256, 1, 2>::entry(),
      Kernel<Element, Schedule::kCooperative, 256, 128, 2, 1>::entry(),
      Kernel<Element, Schedule::kCooperative, 256, 128, 1, 2>::entry(),
      Kernel<Element, Schedule::kStreamK, 128, 256, 2, 1>::entry(),
      Kernel<Element, Schedule::kStreamK, 256, 128, 1, 2>::entry(),
  };
}

}  // namespace cutlass_gemm
