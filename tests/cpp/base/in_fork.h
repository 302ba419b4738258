#pragma once

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>

namespace torch_overlap::testing {

// Returns the exit status of a fork that runs `body`: 1 if `body` returns false, a signal if it
// throws or does not end.
inline int in_fork(const std::function<bool()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    const auto ends = [&]() noexcept { return body(); };
    // Not _exit(): the sanitizers check there for threads that were not joined, and find the
    // parent's.
    syscall(SYS_exit_group, ends() ? 0 : 1);
  }
  EXPECT_GT(pid, 0) << std::strerror(errno);
  int status = -1;
  if (pid > 0) {
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
  }
  EXPECT_FALSE(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) << "the fork did not end";
  return status;
}

}  // namespace torch_overlap::testing
