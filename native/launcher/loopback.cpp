// Preloaded into mpirun when all ranks are on this host. Makes sockets that would listen on every address listen on the
// loopback interface. Open MPI's out-of-band messaging (4.1 and 5.0) binds to INADDR_ANY whatever its interface
// parameters say, and does not start without a listener. On a single host, nothing connects to it.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

extern "C" __attribute__((visibility("default"))) int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  static const auto next = reinterpret_cast<int (*)(int, const sockaddr*, socklen_t)>(dlsym(RTLD_NEXT, "bind"));
  sockaddr_in v4;
  sockaddr_in6 v6;
  if (length >= sizeof v4 && address->sa_family == AF_INET) {
    memcpy(&v4, address, sizeof v4);
    if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
      v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return next(fd, reinterpret_cast<sockaddr*>(&v4), sizeof v4);
    }
  } else if (length >= sizeof v6 && address->sa_family == AF_INET6) {
    memcpy(&v6, address, sizeof v6);
    if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) {
      v6.sin6_addr = in6addr_loopback;
      const int done = next(fd, reinterpret_cast<sockaddr*>(&v6), sizeof v6);
      if (done == 0 || errno != EADDRNOTAVAIL) return done;
      const int only = 0;  // this host has no IPv6: IPv4's loopback as an IPv6 address
      if (setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only) != 0) return -1;
      inet_pton(AF_INET6, "::ffff:127.0.0.1", &v6.sin6_addr);
      return next(fd, reinterpret_cast<sockaddr*>(&v6), sizeof v6);
    }
  }
  return next(fd, address, length);
}
