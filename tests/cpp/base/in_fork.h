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

// The exit status of a fork that runs `body`: 1 if that says false, a signal if it throws or does
// not end.
inline int in_fork(const std::function<bool()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    const auto ends = [&]() noexcept { return body(); };
    // Not _exit(): the sanitizers look there for threads that were not joined, the parent's.
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
