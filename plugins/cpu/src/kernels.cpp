// Everything that needs vector instructions. It is compiled once per instruction set (build.py).
#include "attention_tiles.h"
#include "elementwise.h"
#include "kernels.h"
#include "linear.h"
#include "logits.h"
#include "probe.h"
#include "sample.h"
#include "vec.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace trtspec::TRTSPEC_ISA {

extern const Kernels table;
const Kernels table = {
    .name = STRING(TRTSPEC_ISA),
    .attend = attend,
    .spec_sample = spec_sample,
    .process_logits = process_logits,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .rotate_heads = rotate_heads,
    .linear_row_bytes = linear_row_bytes,
    .linear_takes_x = linear_takes_x,
    .linear_prepare = linear_prepare,
    .linear_block_rows = linear_block_rows,
    .linear_chunk_bytes = linear_chunk_bytes,
    .linear_block = linear_block,
    .read_memory = read_memory,
    .multiply = multiply,
};

}  // namespace trtspec::TRTSPEC_ISA
