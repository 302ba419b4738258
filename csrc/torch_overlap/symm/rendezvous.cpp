#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "torch_overlap/base/process.h"
#include "torch_overlap/symm/allocator.h"
#include "torch_overlap/symm/pretend_unreachable.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {
namespace symm {

// Keeps memory alive whose pointer threads of this process are about to use: from before the other
// ranks can read the pointer until they all have mapped it.
class InProcessExport {
 public:
  explicit InProcessExport(std::shared_ptr<void> keep_alive) {
    const std::lock_guard lock(table().mutex);
    number_ = ++table().last;
    table().in_process_export[number_] = std::move(keep_alive);
  }
  ~InProcessExport() {
    std::shared_ptr<void> last;  // destroyed after the lock is released
    const std::lock_guard lock(table().mutex);
    last = std::move(table().in_process_export[number_]);
    table().in_process_export.erase(number_);
  }
  InProcessExport(const InProcessExport&) = delete;
  InProcessExport& operator=(const InProcessExport&) = delete;

  uint64_t number() const { return number_; }
  // Returns null if the export does not exist any more.
  static std::shared_ptr<void> borrow(uint64_t number) {
    const std::lock_guard lock(table().mutex);
    const auto found = table().in_process_export.find(number);
    return found == table().in_process_export.end() ? nullptr : found->second;
  }

 private:
  struct Table {
    ForkSafeMutex mutex;
    std::map<uint64_t, std::shared_ptr<void>> in_process_export;
    uint64_t last = 0;
  };
  static Table& table() { return LeakySingleton<Table>::get(); }
  uint64_t number_ = 0;
};

// One segment that a rank shares: the memory, or its signals.
struct Segment {
  at::Tensor tensor;
  SymmetricAllocator::Export shared;
  std::unique_ptr<InProcessExport> in_process_export;
};

uint64_t to_number(const std::string& text) {
  return static_cast<uint64_t>(parse_int(text, "a number of another rank"));
}

// Description of one segment that a rank sends to the others.
struct SegmentInfo {
  std::string not_exportable_reason;
  uint64_t allocation_bytes;
  uint64_t offset;
  std::string device;
  uint64_t in_process_export;
  uint64_t address;

  static constexpr size_t kFields = 6;
  static void write(std::vector<std::string>& fields, const Segment& segment) {
    const auto& shared = segment.shared;
    fields.push_back(shared.not_exportable_reason);
    fields.push_back(concat(shared.allocation_bytes));
    fields.push_back(concat(shared.offset));
    fields.push_back(shared.device);
    fields.push_back(concat(segment.in_process_export->number()));
    fields.push_back(concat(reinterpret_cast<uint64_t>(segment.tensor.const_data_ptr())));
  }
  static SegmentInfo read(const std::string* fields) {
    return {fields[0], to_number(fields[1]), to_number(fields[2]),
            fields[3], to_number(fields[4]), to_number(fields[5])};
  }
};

// Description of a rank that it sends to the others.
struct PeerInfo {
  Fault fault;
  uint64_t bytes = 0;
  std::string digest;
  ProcessIdentity identity;
  std::string socket;
  bool pretend_unreachable = false;
  std::vector<SegmentInfo> segment_infos;

  static constexpr size_t kHeaderFields = 9;
  static PeerInfo read(const std::string& message) {
    const auto fields = unpack(message);
    TORCH_OVERLAP_CHECK(fields.size() >= kHeaderFields &&
                            (fields.size() - kHeaderFields) % SegmentInfo::kFields == 0,
                        kRuntime, "expected a rank's part of a rendezvous, got ", fields.size(),
                        " fields; do all ranks run the same version?");
    PeerInfo info{.fault = {static_cast<ErrorKind>(to_number(fields[0])), fields[1]},
                  .bytes = to_number(fields[2]),
                  .digest = fields[3],
                  .identity = {fields[4], fields[5], fields[6]},
                  .socket = fields[7],
                  .pretend_unreachable = !fields[8].empty(),
                  .segment_infos = {}};
    for (size_t at = kHeaderFields; at < fields.size(); at += SegmentInfo::kFields) {
      info.segment_infos.push_back(SegmentInfo::read(&fields[at]));
    }
    return info;
  }
};

std::string write_peer_info(const Fault& fault, size_t bytes, const std::string& digest,
                            const std::string& socket, bool pretend_unreachable,
                            const std::vector<Segment>& segments) {
  const ProcessIdentity& here = ProcessIdentity::current();
  std::vector<std::string> fields{concat(static_cast<int>(fault.kind_for_peers())),
                                  fault.text,
                                  concat(bytes),
                                  digest,
                                  here.system,
                                  here.network,
                                  here.process,
                                  socket,
                                  pretend_unreachable ? "pretend_unreachable" : ""};
  for (const auto& segment : segments) SegmentInfo::write(fields, segment);
  return pack(fields);
}

}  // namespace symm

using symm::InProcessExport;
using symm::PeerInfo;
using symm::Segment;
using symm::SegmentInfo;

// One rendezvous, step by step.
class Rendezvous {
 public:
  using Request = SymmetricMemory::Request;
  Rendezvous(Bootstrap& bootstrap, const Request& request)
      : bootstrap_(bootstrap),
        request_(request),
        me_(bootstrap.rank()),
        size_(bootstrap.size()),
        unreachable_reasons_(size_) {}

  std::shared_ptr<SymmetricMemory> run() {
    const Fault fault = prepare();
    exchange_peer_info(fault);
    check_peer_info();
    find_unreachable_peers();
    auto memory = map();
    conclude(*memory);
    return memory;
  }

 private:
  // Collects what this rank shares. An error is returned, since the other ranks must know it, too.
  Fault prepare() {
    if (request_.fault) return request_.fault;
    try {
      const c10::Device device = request_.tensor.device();
      allocator_ = &symmetric_allocator(request_.op, device.type());
      add(allocator_->allocate(static_cast<int64_t>(SignalPad::bytes(size_)), device));
      if (request_.tensor.nbytes() > 0) add(request_.tensor);
      exchange_.emplace();
      return {};
    } catch (...) {
      segments_.clear();
      return Fault::current();
    }
  }

  void add(at::Tensor tensor) {
    Segment segment;
    segment.shared = allocator_->share(request_.op, tensor);
    segment.in_process_export = std::make_unique<InProcessExport>(segment.shared.keep_alive);
    segment.tensor = std::move(tensor);
    segments_.push_back(std::move(segment));
  }

  void exchange_peer_info(const Fault& fault) {
    const auto mine = symm::write_peer_info(
        fault, fault ? 0 : request_.tensor.nbytes(), request_.digest,
        exchange_ ? exchange_->name() : std::string(), request_.pretend_unreachable, segments_);
    const auto messages = all_gather_or_throw(bootstrap_, mine, fault);
    for (const auto& message : messages) peer_infos_.push_back(PeerInfo::read(message));
  }

  // Every rank sees the same descriptions, so all ranks throw the same error.
  void check_peer_info() const {
    for (int rank = 0; rank < size_; ++rank) {
      const Fault& fault = peer_infos_[rank].fault;
      if (fault) {
        throw Error(fault.kind,
                    concat(request_.op, ": rank ", rank, " could not take part: ", fault.text));
      }
    }
    for (int rank = 1; rank < size_; ++rank) {
      TORCH_OVERLAP_CHECK(peer_infos_[rank].digest == peer_infos_[0].digest, kValue, request_.op,
                          ": expected the same on all ranks, got ", peer_infos_[0].digest,
                          " on rank 0 and ", peer_infos_[rank].digest, " on rank ", rank);
      TORCH_OVERLAP_CHECK(peer_infos_[rank].bytes == peer_infos_[0].bytes, kValue, request_.op,
                          ": expected memory of the same size on all ranks, got ",
                          peer_infos_[0].bytes, " bytes on rank 0 and ", peer_infos_[rank].bytes,
                          " on rank ", rank);
    }
  }

  bool is_peer_mapped(int rank) const {
    return allocator_->has_shared_address_space() &&
           peer_infos_[rank].identity.process == ProcessIdentity::current().process;
  }

  // Both ranks of a pair decide alike, so neither waits for descriptors that are not sent.
  void find_unreachable_peers() {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == me_) continue;
      if (request_.pretend_unreachable || peer_infos_[rank].pretend_unreachable) {
        unreachable_reasons_[rank] = PretendUnreachable::kReason;
        continue;
      }
      unreachable_reasons_[rank] =
          ProcessIdentity::current().unreachable_reason(peer_infos_[rank].identity);
      if (is_peer_mapped(rank)) continue;
      for (const int owner : {me_, rank}) {
        for (const SegmentInfo& segment_info : peer_infos_[owner].segment_infos) {
          if (!unreachable_reasons_[rank].empty() || segment_info.not_exportable_reason.empty())
            continue;
          unreachable_reasons_[rank] =
              concat("the memory of rank ", owner, " is ", segment_info.not_exportable_reason);
        }
      }
    }
  }

  std::vector<DescriptorExchange::Received> exchange_descriptors() {
    std::vector<std::string> sockets(size_);
    for (int rank = 0; rank < size_; ++rank) {
      const bool takes_part =
          rank != me_ && unreachable_reasons_[rank].empty() && !is_peer_mapped(rank);
      if (takes_part) sockets[rank] = peer_infos_[rank].socket;
    }
    std::vector<int> mine;
    for (const auto& segment : segments_) mine.push_back(segment.shared.descriptor.get());
    auto received =
        exchange_->run(me_, sockets, mine, std::chrono::steady_clock::now() + bootstrap_.timeout());
    // Throws here, since conclude() would wait once more for a rank that has exited since it sent
    // its description.
    std::vector<int> late;
    for (int rank = 0; rank < size_; ++rank) {
      if (received[rank].is_late) late.push_back(rank);
    }
    TORCH_OVERLAP_CHECK(late.empty(), kTimeout, request_.op, ": expected the memory of ", size_,
                        " ranks for '", request_.name, "' within ", bootstrap_.timeout().count(),
                        " ms, got none of ranks ", list_string(late), "; look at what they do");
    return received;
  }

  std::shared_ptr<SymmetricMemory> map() {
    const auto received = exchange_descriptors();
    std::shared_ptr<SymmetricMemory> memory(new SymmetricMemory(me_, size_, request_));
    std::vector<void*> pads(size_);
    pads[me_] = segments_[0].tensor.mutable_data_ptr();
    for (const auto& segment : segments_) memory->keep_alives_.push_back(segment.shared.keep_alive);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == me_ || !unreachable_reasons_[rank].empty()) continue;
      try {
        unreachable_reasons_[rank] = allocator_->unreachable_reason(
            memory->device_, peer_infos_[rank].segment_infos[0].device);
        for (size_t i = 0; unreachable_reasons_[rank].empty() && i < segments_.size(); ++i) {
          auto mapping = map(rank, i, received[rank], memory->device_);
          memory->keep_alives_.push_back(std::move(mapping.keep_alive));
          (i == 0 ? pads[rank] : memory->pointers_[rank]) = mapping.pointer;
        }
      } catch (...) {
        unreachable_reasons_[rank] = Fault::current().text;
        if (failed_pair_.empty()) failed_pair_ = pair(me_, rank, unreachable_reasons_[rank]);
      }
      if (!unreachable_reasons_[rank].empty()) pads[rank] = memory->pointers_[rank] = nullptr;
    }
    memory->signals_ = SignalPad(me_, std::move(pads));
    try {
      are_all_devices_visible_ = std::all_of(
          peer_infos_.begin(), peer_infos_.end(),
          [&](const PeerInfo& info) { return allocator_->sees(info.segment_infos[0].device); });
    } catch (...) {  // the other ranks are notified of it in conclude()
      are_all_devices_visible_ = false;
    }
    std::set<std::string> devices;
    for (const auto& info : peer_infos_) {
      const std::string& device = info.segment_infos.at(0).device;
      if (!device.empty() && !devices.insert(device).second) memory->has_shared_devices_ = true;
    }
    return memory;
  }

  SymmetricAllocator::Mapping map(int rank, size_t segment,
                                  const DescriptorExchange::Received& received,
                                  c10::Device device) const {
    const SegmentInfo& segment_info = peer_infos_[rank].segment_infos.at(segment);
    if (is_peer_mapped(rank)) {
      auto keep_alive = InProcessExport::borrow(segment_info.in_process_export);
      TORCH_OVERLAP_CHECK(keep_alive, kRuntime, "its thread has gone");
      return {reinterpret_cast<void*>(segment_info.address), std::move(keep_alive)};
    }
    TORCH_OVERLAP_CHECK(received.fault.empty(), kRuntime, received.fault);
    return allocator_->map(device, received.descriptors.at(segment), segment_info.allocation_bytes,
                           segment_info.offset);
  }

  // A part that one rank could not reach is an error on all ranks, or accepted by all: every rank
  // sees the same verdicts. No rank returns before all have mapped the exported memory.
  void conclude(SymmetricMemory& memory) {
    std::vector<std::string> mine = unreachable_reasons_;
    mine.push_back(request_.partial ? "partial" : "");
    mine.push_back(request_.partial_unsupported_reason);
    mine.push_back(are_all_devices_visible_ ? "" : "blind");
    mine.push_back(failed_pair_);
    std::vector<std::vector<std::string>> all;
    for (const auto& verdict : bootstrap_.all_gather(pack(mine))) {
      all.push_back(unpack(verdict));
      TORCH_OVERLAP_CHECK(all.back().size() == mine.size(), kRuntime,
                          "expected a rank's verdict on ", size_, " ranks, got ", all.back().size(),
                          " fields; do all ranks run the same version?");
    }
    memory.has_known_links_ = std::all_of(
        all.begin(), all.end(), [&](const auto& verdict) { return verdict[size_ + 2].empty(); });
    for (int rank = 0; rank < size_; ++rank) {
      for (int peer = 0; peer < size_; ++peer) {
        const std::string& why = all[rank][peer];
        if (why.empty()) continue;
        refuse_unless_partial(all, rank, peer, why);
        memory.unreachable_reasons_ = unreachable_reasons_;
        memory.unreachable_pair_ = pair(rank, peer, why);
        return warn_of_failures(all);
      }
    }
  }

  static std::string pair(int rank, int peer, const std::string& why) {
    return concat("rank ", rank, " cannot reach the memory of rank ", peer, ": ", why);
  }

  // Warns about ranks that should have mapped each other's memory: they are slower for a reason
  // that is otherwise invisible.
  void warn_of_failures(const std::vector<std::vector<std::string>>& all) const {
    for (const auto& verdict : all) {
      if (verdict.back().empty()) continue;
      TORCH_WARN(request_.op, ": memory of '", request_.name,
                 "' could not be mapped, and is reached by other means: ", verdict.back());
      return;
    }
  }

  void refuse_unless_partial(const std::vector<std::vector<std::string>>& all, int rank, int peer,
                             const std::string& why) const {
    for (int refuser = 0; refuser < size_; ++refuser) {
      if (!all[refuser][size_].empty()) continue;
      const std::string& because = all[refuser][size_ + 1];
      fail(ErrorKind::kUnsupported, request_.op,
           ": expected ranks that can reach each other's memory, got rank ", rank,
           ", which cannot reach that of rank ", peer, ": ", why,
           because.empty()
               ? ""
               : concat("; and there is no other way: ", because, " on rank ", refuser));
    }
  }

  Bootstrap& bootstrap_;
  const Request& request_;
  const int me_;
  const int size_;
  SymmetricAllocator* allocator_ = nullptr;
  std::vector<Segment> segments_;  // the signals, then the memory if it has any bytes
  std::optional<DescriptorExchange> exchange_;
  std::vector<PeerInfo> peer_infos_;              // by rank
  std::vector<std::string> unreachable_reasons_;  // by rank; empty: reachable
  bool are_all_devices_visible_ = false;          // all ranks' devices, and the links to them
  std::string failed_pair_;  // pair of ranks for which mapping should have worked; empty: none
};

std::shared_ptr<SymmetricMemory> SymmetricMemory::rendezvous(Bootstrap& bootstrap,
                                                             const Request& request) {
  return Rendezvous(bootstrap, request).run();
}

}  // namespace torch_overlap
