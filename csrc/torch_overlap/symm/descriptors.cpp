#include "torch_overlap/symm/descriptors.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/base/process.h"

namespace torch_overlap {
namespace {

using TimePoint = std::chrono::steady_clock::time_point;

// Maximum number of segments of one rendezvous, which uses two: the memory itself and its signals.
constexpr size_t kMaxDescriptors = 8;
constexpr size_t kNameBytes = 32;
constexpr int kBacklog = 4096;  // limited by the kernel (somaxconn)

std::string errno_text() { return std::strerror(errno); }

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> random(bytes);
  TORCH_OVERLAP_CHECK(getrandom(random.data(), bytes, 0) == static_cast<ssize_t>(bytes), kRuntime,
                      "getrandom: expected ", bytes, " bytes, got: ", errno_text());
  std::string text;
  for (const unsigned char byte : random) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string first_line(const char* file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
}

std::string namespace_of(const char* link) {
  struct stat found{};
  if (stat(link, &found) != 0) return "unknown";
  return concat(found.st_dev, ":", found.st_ino);
}

struct Address {
  sockaddr_un address{};
  socklen_t length;

  explicit Address(const std::string& name) {
    address.sun_family = AF_UNIX;
    const std::string path = concat("torch_overlap-", name);  // sun_path[0] stays 0: abstract
    const size_t bytes = std::min(path.size(), sizeof(address.sun_path) - 1);
    std::memcpy(address.sun_path + 1, path.data(), bytes);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// Message of a connection: the sender's rank, the number of descriptors, and the receiver's name,
// which only the ranks that were sent it know.
struct Greeting {
  int32_t rank;
  int32_t count;
  std::array<char, kNameBytes> receiver;
};

union Control {
  cmsghdr align;
  char bytes[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
};

msghdr header_of(iovec& part, Control& control, size_t control_bytes) {
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control_bytes == 0 ? nullptr : control.bytes;
  header.msg_controllen = control_bytes;
  return header;
}

// Fault of a send, if any. A receiver that does not listen any more has exited, and sends nothing
// either.
struct SendResult {
  std::string fault;
  bool is_gone = false;
};

// Sends without waiting: the receiver need not have accepted yet.
SendResult send_to(const std::string& name, int rank, const std::vector<int>& mine,
                   TimePoint deadline) {
  const Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {concat("no socket: ", errno_text())};
  const Address address(name);
  while (connect(socket.get(), address.get(), address.length) != 0) {
    // EAGAIN: the backlog is full until the receiver accepts a connection.
    if ((errno != EAGAIN && errno != EINTR) || std::chrono::steady_clock::now() >= deadline) {
      const bool is_gone = errno == ECONNREFUSED;
      return {concat("cannot connect to it: ", errno_text()), is_gone};
    }
    usleep(1000);
  }
  Greeting greeting{.rank = rank, .count = static_cast<int32_t>(mine.size()), .receiver = {}};
  std::memcpy(greeting.receiver.data(), name.data(), std::min(name.size(), kNameBytes));
  iovec part{&greeting, sizeof(greeting)};
  Control control{};
  msghdr header =
      header_of(part, control, mine.empty() ? 0 : CMSG_SPACE(mine.size() * sizeof(int)));
  if (!mine.empty()) {
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(mine.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), mine.data(), mine.size() * sizeof(int));
  }
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket.get(), &header, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent == sizeof(greeting)) return {};
  return {concat("cannot send to it: ", errno_text())};
}

bool is_readable(const Descriptor& socket, TimePoint deadline) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto slice = std::clamp(left, std::chrono::milliseconds(0), kInterruptPeriod);
    pollfd wanted{.fd = socket.get(), .events = POLLIN, .revents = 0};
    const int ready = poll(&wanted, 1, static_cast<int>(slice.count()));
    if (ready > 0) return true;
    if (ready == 0 && left <= slice) return false;
    check_interrupt();
    if (ready < 0 && errno != EINTR) return false;
  }
}

bool is_of_this_user(const Descriptor& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == geteuid();
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) (void)close(number_);
}

const ProcessIdentity& ProcessIdentity::current() {
  // A forked child is a different process with its own memory.
  thread_local pid_t cached_pid = 0;
  thread_local ProcessIdentity place;
  if (cached_pid == getpid()) return place;
  const auto& [system, random] = lazy_leaky_singleton(
      [] { return std::pair(first_line("/proc/sys/kernel/random/boot_id"), random_hex(16)); });
  cached_pid = getpid();
  place = {system, namespace_of("/proc/self/ns/net"),
           concat(random, "-", namespace_of("/proc/self/ns/pid"), "-", cached_pid)};
  return place;
}

std::string ProcessIdentity::unreachable_reason(const ProcessIdentity& other) const {
  if (system != other.system) {
    return concat("they run on different hosts (boot ids ", system, " and ", other.system, ")");
  }
  if (network != other.network) {
    return concat("they are in different network namespaces of one host (", network, " and ",
                  other.network,
                  "), where descriptors cannot be passed; let the containers share "
                  "one");
  }
  return {};
}

DescriptorExchange::DescriptorExchange()
    : name_(random_hex(kNameBytes / 2)),
      listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  TORCH_OVERLAP_CHECK(listener_, kRuntime,
                      "expected a socket to pass descriptors on, got: ", errno_text());
  const Address address(name_);
  TORCH_OVERLAP_CHECK(bind(listener_.get(), address.get(), address.length) == 0 &&
                          listen(listener_.get(), kBacklog) == 0,
                      kRuntime, "expected to listen for descriptors, got: ", errno_text());
}

std::vector<DescriptorExchange::Received> DescriptorExchange::run(
    int rank, const std::vector<std::string>& names, const std::vector<int>& mine,
    TimePoint deadline) {
  const int size = static_cast<int>(names.size());
  std::vector<Received> received(size);
  int awaited = 0;
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || names[peer].empty()) continue;
    ++awaited;
    // Overwritten when they arrive.
    received[peer] = {{}, "its descriptors did not arrive", /*is_late=*/true};
    if (auto sent = send_to(names[peer], rank, mine, deadline); !sent.fault.empty()) {
      // The peer does not know that nothing was sent. Its own descriptors may still arrive.
      received[peer] = {{}, std::move(sent.fault), sent.is_gone};
    }
  }
  std::vector<bool> done(size);
  while (awaited > 0 && is_readable(listener_, deadline)) {
    Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection) continue;
    const auto from = take(std::move(connection), received, deadline);
    if (!from || *from == rank || names[*from].empty() || done[*from]) continue;
    done[*from] = true;
    --awaited;
  }
  return received;
}

std::optional<int> DescriptorExchange::take(Descriptor connection, std::vector<Received>& received,
                                            TimePoint deadline) const {
  if (!is_of_this_user(connection) || !is_readable(connection, deadline)) return std::nullopt;
  Greeting greeting{};
  iovec part{&greeting, sizeof(greeting)};
  Control control{};
  msghdr header = header_of(part, control, sizeof(control.bytes));
  const ssize_t got = recvmsg(connection.get(), &header, MSG_CMSG_CLOEXEC);
  std::vector<Descriptor> descriptors;
  for (cmsghdr* one = CMSG_FIRSTHDR(&header); got >= 0 && one != nullptr;
       one = CMSG_NXTHDR(&header, one)) {
    if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
    std::vector<int> numbers((one->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(numbers.data(), CMSG_DATA(one), numbers.size() * sizeof(int));
    for (const int number : numbers) descriptors.emplace_back(number);
  }
  const bool is_ours =
      got == sizeof(greeting) && greeting.rank >= 0 &&
      greeting.rank < static_cast<int>(received.size()) &&
      std::equal(name_.begin(), name_.end(), greeting.receiver.begin(), greeting.receiver.end());
  if (!is_ours) return std::nullopt;
  Received& from = received[greeting.rank];
  from.is_late = false;
  if (static_cast<int>(descriptors.size()) != greeting.count) {
    // The receiver's limit of open files truncates the descriptors.
    from.fault = concat("expected ", greeting.count, " descriptors, got ", descriptors.size(),
                        "; raise the limit of open files (ulimit -n)");
  } else {
    from.fault.clear();
    from.descriptors = std::move(descriptors);
  }
  return greeting.rank;
}

}  // namespace torch_overlap
