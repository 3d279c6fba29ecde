// Selects the instruction set, once.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace trtspec {

namespace portable { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
namespace avx2_vnni { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
namespace avx512_vnni { extern const Kernels table; }
namespace avx512_bf16 { extern const Kernels table; }
namespace amx { extern const Kernels table; }
#endif

#if defined(__x86_64__)
// g++ 11 and 12 and clang++ 14 do not know __builtin_cpu_supports("avxvnni").
static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 4) != 0;
}
#endif

// Return whether the CPU has tiles for bf16 and int8, and the system lets this process use them on request.
static bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, WANTED = BF16 | TILE | INT8;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & WANTED) == WANTED &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}

// Return the tables that this machine supports, best first.
static std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512cd");
  const bool has_avx512_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  const bool has_avx512_bf16 = has_avx512_vnni && __builtin_cpu_supports("avx512bf16");
  if (has_avx512_bf16 && has_amx()) tables.push_back(&amx::table);
  if (has_avx512_bf16) tables.push_back(&avx512_bf16::table);
  if (has_avx512_vnni) tables.push_back(&avx512_vnni::table);
  if (has_avx512) tables.push_back(&avx512::table);
  if (has_avx2 && has_avx_vnni()) tables.push_back(&avx2_vnni::table);
  if (has_avx2) tables.push_back(&avx2::table);
#endif
  tables.push_back(&portable::table);
  return tables;
}

static const Kernels& pick() {
  const auto tables = supported();
  const char* wanted = std::getenv("TRTSPEC_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return *tables.front();
  std::string names;
  for (const Kernels* table : tables) {
    if (table->name == std::string(wanted)) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::runtime_error("TRTSPEC_CPU_ISA=" + std::string(wanted) + " is not among what this machine runs: " + names);
}

const Kernels& kernels() {
  static const Kernels& table = pick();
  return table;
}

// Return whether AMD made the CPU. On Zen 4, products of few rows took up to twice as long if they prefetched memory.
// On Intel's Sapphire Rapids they took less time with prefetches.
static bool made_by_amd() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Distance at which few rows prefetch on a machine that reads ahead. On Zen 5 one row took 6 to 11 % less time if it
// prefetched a page ahead.
static int64_t stream_ahead() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned ZEN_5 = 0x1a, PAGE = 4096;
  if (made_by_amd() && __get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
    const unsigned family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
    return family >= ZEN_5 ? PAGE : 0;
  }
#endif
  return 0;
}

int64_t machine_stream_ahead() {
  static const int64_t bytes = stream_ahead();
  return bytes;
}

static std::atomic<bool> reads_ahead = made_by_amd();

bool machine_reads_ahead() { return reads_ahead.load(std::memory_order_relaxed); }
bool set_machine_reads_ahead(bool value) { return reads_ahead.exchange(value); }

bool usable() noexcept {
  try {
    kernels();
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace trtspec

// For Python (__init__.py): name of the instruction set in use, or "!" and the reason why there is none.
extern "C" __attribute__((visibility("default"))) const char* trtspec_cpu_isa() {
  try {
    return trtspec::kernels().name;
  } catch (const std::exception& error) {
    static std::string message;
    message = std::string("!") + error.what();
    return message.c_str();
  }
}
