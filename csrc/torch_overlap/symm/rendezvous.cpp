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

// Memory whose pointer threads of this process are about to use: from before the others can read of
// it until they all have.
class Lent {
 public:
  explicit Lent(std::shared_ptr<void> keeper) {
    const std::lock_guard lock(table().mutex);
    number_ = ++table().last;
    table().lent[number_] = std::move(keeper);
  }
  ~Lent() {
    std::shared_ptr<void> last;  // dies after the lock
    const std::lock_guard lock(table().mutex);
    last = std::move(table().lent[number_]);
    table().lent.erase(number_);
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  uint64_t number() const { return number_; }
  // Null if it is gone already.
  static std::shared_ptr<void> borrow(uint64_t number) {
    const std::lock_guard lock(table().mutex);
    const auto found = table().lent.find(number);
    return found == table().lent.end() ? nullptr : found->second;
  }

 private:
  struct Table {
    ForkSafeMutex mutex;
    std::map<uint64_t, std::shared_ptr<void>> lent;
    uint64_t last = 0;
  };
  static Table& table() { return ProcessWide<Table>::get(); }
  uint64_t number_ = 0;
};

// One of the things that a rank shares: the memory, and its signals.
struct Segment {
  at::Tensor tensor;
  SymmetricAllocator::Export shared;
  std::unique_ptr<Lent> lent;
};

uint64_t to_number(const std::string& text) {
  return static_cast<uint64_t>(parse_int(text, "a number of another rank"));
}

// What a rank says of one of its segments.
struct Offer {
  std::string only_here;
  uint64_t allocation_bytes;
  uint64_t offset;
  std::string device;
  uint64_t lent;
  uint64_t address;

  static constexpr size_t kFields = 6;
  static void write(std::vector<std::string>& fields, const Segment& segment) {
    const auto& shared = segment.shared;
    fields.push_back(shared.only_here);
    fields.push_back(concat(shared.allocation_bytes));
    fields.push_back(concat(shared.offset));
    fields.push_back(shared.device);
    fields.push_back(concat(segment.lent->number()));
    fields.push_back(concat(reinterpret_cast<uint64_t>(segment.tensor.const_data_ptr())));
  }
  static Offer read(const std::string* fields) {
    return {fields[0], to_number(fields[1]), to_number(fields[2]),
            fields[3], to_number(fields[4]), to_number(fields[5])};
  }
};

// What a rank says of itself.
struct Card {
  Fault fault;
  uint64_t bytes = 0;
  std::string digest;
  Place place;
  std::string socket;
  bool apart = false;
  std::vector<Offer> offers;

  static constexpr size_t kHead = 9;
  static Card read(const std::string& message) {
    const auto fields = unpack(message);
    TORCH_OVERLAP_CHECK(fields.size() >= kHead && (fields.size() - kHead) % Offer::kFields == 0,
                        kRuntime, "expected a rank's part of a rendezvous, got ", fields.size(),
                        " fields; do all ranks run the same version?");
    Card card{.fault = {static_cast<ErrorKind>(to_number(fields[0])), fields[1]},
              .bytes = to_number(fields[2]),
              .digest = fields[3],
              .place = {fields[4], fields[5], fields[6]},
              .socket = fields[7],
              .apart = !fields[8].empty(),
              .offers = {}};
    for (size_t at = kHead; at < fields.size(); at += Offer::kFields) {
      card.offers.push_back(Offer::read(&fields[at]));
    }
    return card;
  }
};

std::string write_card(const Fault& fault, size_t bytes, const std::string& digest,
                       const std::string& socket, bool apart,
                       const std::vector<Segment>& segments) {
  const Place& here = Place::here();
  std::vector<std::string> fields{concat(static_cast<int>(fault.told_kind())),
                                  fault.text,
                                  concat(bytes),
                                  digest,
                                  here.system,
                                  here.network,
                                  here.process,
                                  socket,
                                  apart ? "apart" : ""};
  for (const auto& segment : segments) Offer::write(fields, segment);
  return pack(fields);
}

}  // namespace symm

using symm::Card;
using symm::Lent;
using symm::Offer;
using symm::Segment;

// One rendezvous, step by step.
class Rendezvous {
 public:
  using Request = SymmetricMemory::Request;
  Rendezvous(Bootstrap& bootstrap, const Request& request)
      : bootstrap_(bootstrap),
        request_(request),
        me_(bootstrap.rank()),
        size_(bootstrap.size()),
        obstacles_(size_) {}

  std::shared_ptr<SymmetricMemory> run() {
    const Fault fault = prepare();
    exchange_cards(fault);
    check_cards();
    find_obstacles();
    auto memory = map();
    conclude(*memory);
    return memory;
  }

 private:
  // What this rank has. Whatever goes wrong is for the others too.
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
    segment.lent = std::make_unique<Lent>(segment.shared.keeper);
    segment.tensor = std::move(tensor);
    segments_.push_back(std::move(segment));
  }

  void exchange_cards(const Fault& fault) {
    const auto mine =
        symm::write_card(fault, fault ? 0 : request_.tensor.nbytes(), request_.digest,
                         exchange_ ? exchange_->name() : std::string(), request_.apart, segments_);
    const auto messages = tell_all(bootstrap_, mine, fault);
    for (const auto& message : messages) cards_.push_back(Card::read(message));
  }

  // Every rank sees the same cards, so all of them throw, and the same.
  void check_cards() const {
    for (int rank = 0; rank < size_; ++rank) {
      const Fault& fault = cards_[rank].fault;
      if (fault) {
        throw Error(fault.kind,
                    concat(request_.op, ": rank ", rank, " could not take part: ", fault.text));
      }
    }
    for (int rank = 1; rank < size_; ++rank) {
      TORCH_OVERLAP_CHECK(cards_[rank].digest == cards_[0].digest, kValue, request_.op,
                          ": expected the same on all ranks, got ", cards_[0].digest,
                          " on rank 0 and ", cards_[rank].digest, " on rank ", rank);
      TORCH_OVERLAP_CHECK(cards_[rank].bytes == cards_[0].bytes, kValue, request_.op,
                          ": expected memory of the same size on all ranks, got ", cards_[0].bytes,
                          " bytes on rank 0 and ", cards_[rank].bytes, " on rank ", rank);
    }
  }

  bool is_direct(int rank) const {
    return allocator_->shares_pointers() && cards_[rank].place.process == Place::here().process;
  }

  // Both sides of a pair decide alike, so nobody waits for descriptors that do not come.
  void find_obstacles() {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == me_) continue;
      if (request_.apart || cards_[rank].apart) {
        obstacles_[rank] = PretendUnreachable::kReason;
        continue;
      }
      obstacles_[rank] = Place::here().obstacle_to(cards_[rank].place);
      if (is_direct(rank)) continue;
      for (const int owner : {me_, rank}) {
        for (const Offer& offer : cards_[owner].offers) {
          if (!obstacles_[rank].empty() || offer.only_here.empty()) continue;
          obstacles_[rank] = concat("the memory of rank ", owner, " is ", offer.only_here);
        }
      }
    }
  }

  std::vector<DescriptorExchange::Received> exchange_descriptors() {
    std::vector<std::string> sockets(size_);
    for (int rank = 0; rank < size_; ++rank) {
      const bool takes_part = rank != me_ && obstacles_[rank].empty() && !is_direct(rank);
      if (takes_part) sockets[rank] = cards_[rank].socket;
    }
    std::vector<int> mine;
    for (const auto& segment : segments_) mine.push_back(segment.shared.descriptor.get());
    auto received =
        exchange_->run(me_, sockets, mine, std::chrono::steady_clock::now() + bootstrap_.timeout());
    // Who has gone since it said its part would be waited for once more in conclude().
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
    for (const auto& segment : segments_) memory->keepers_.push_back(segment.shared.keeper);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == me_ || !obstacles_[rank].empty()) continue;
      try {
        obstacles_[rank] = allocator_->obstacle(memory->device_, cards_[rank].offers[0].device);
        for (size_t i = 0; obstacles_[rank].empty() && i < segments_.size(); ++i) {
          auto mapping = map(rank, i, received[rank], memory->device_);
          memory->keepers_.push_back(std::move(mapping.keeper));
          (i == 0 ? pads[rank] : memory->pointers_[rank]) = mapping.pointer;
        }
      } catch (...) {
        obstacles_[rank] = Fault::current().text;
        if (failed_pair_.empty()) failed_pair_ = pair(me_, rank, obstacles_[rank]);
      }
      if (!obstacles_[rank].empty()) pads[rank] = memory->pointers_[rank] = nullptr;
    }
    memory->signals_ = SignalPad(me_, std::move(pads));
    try {
      sees_all_ = std::all_of(cards_.begin(), cards_.end(), [&](const Card& card) {
        return allocator_->sees(card.offers[0].device);
      });
    } catch (...) {  // the others are told that it does not
      sees_all_ = false;
    }
    std::set<std::string> devices;
    for (const auto& card : cards_) {
      const std::string& device = card.offers.at(0).device;
      if (!device.empty() && !devices.insert(device).second) memory->shares_devices_ = true;
    }
    return memory;
  }

  SymmetricAllocator::Mapping map(int rank, size_t segment,
                                  const DescriptorExchange::Received& received,
                                  c10::Device device) const {
    const Offer& offer = cards_[rank].offers.at(segment);
    if (is_direct(rank)) {
      auto keeper = Lent::borrow(offer.lent);
      TORCH_OVERLAP_CHECK(keeper, kRuntime, "its thread has gone");
      return {reinterpret_cast<void*>(offer.address), std::move(keeper)};
    }
    TORCH_OVERLAP_CHECK(received.fault.empty(), kRuntime, received.fault);
    return allocator_->map(device, received.descriptors.at(segment), offer.allocation_bytes,
                           offer.offset);
  }

  // What one rank could not reach is an error of all, or taken by all: every rank sees the same
  // verdicts. And nobody is past this before all have what was lent.
  void conclude(SymmetricMemory& memory) {
    std::vector<std::string> mine = obstacles_;
    mine.push_back(request_.partial ? "partial" : "");
    mine.push_back(request_.whole_because);
    mine.push_back(sees_all_ ? "" : "blind");
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
        memory.obstacles_ = obstacles_;
        memory.unreachable_pair_ = pair(rank, peer, why);
        return warn_of_failures(all);
      }
    }
  }

  static std::string pair(int rank, int peer, const std::string& why) {
    return concat("rank ", rank, " cannot reach the memory of rank ", peer, ": ", why);
  }

  // Ranks that should have mapped each other's memory: slower for a reason that nobody sees.
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
  std::vector<Card> cards_;             // by rank
  std::vector<std::string> obstacles_;  // by rank; empty: none
  bool sees_all_ = false;               // the devices of all ranks, and the links to them
  std::string failed_pair_;             // of which mapping should have worked; empty: none
};

std::shared_ptr<SymmetricMemory> SymmetricMemory::rendezvous(Bootstrap& bootstrap,
                                                             const Request& request) {
  return Rendezvous(bootstrap, request).run();
}

}  // namespace torch_overlap
