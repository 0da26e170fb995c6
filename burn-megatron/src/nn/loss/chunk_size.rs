//! The number of tokens whose logits are in memory at the same time.

use burn_megatron_kernels::MAX_ELEMENTS;

/// The maximum size of a default chunk of logits, in bytes.
///
/// Each chunk reads and writes the f32 weight gradient of the output layer. For a chunk of `T` tokens this takes
/// `290 / T` of the time of the three matmuls of the chunk. The estimate assumes 8 bytes and 6 `T` floating-point
/// operations per weight, and 2.85 TB/s and 620 TFLOP/s in bf16 on an H100. 1 GiB holds the 16-bit logits of 10,672
/// tokens of GPT-2 (2.7 % of the time), or of 3,533 tokens with a vocabulary of 151,936 (8.2 %).
const DEFAULT_BYTES: usize = 1 << 30;

/// The alignment of the chunk size in tokens, for the tiles of a matmul.
const ALIGNMENT: usize = 128;

/// The shape of the logits of a micro-batch on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsShape {
    /// The number of tokens of the micro-batch.
    pub tokens: usize,
    /// The number of entries of the padded vocabulary on this rank.
    pub width: usize,
    /// The number of features of the hidden states.
    pub hidden: usize,
    /// The number of bytes per element of the logits.
    pub size: usize,
}

impl LogitsShape {
    /// Returns the number of tokens per chunk of the [`LinearCrossEntropy`](super::LinearCrossEntropy). If there is
    /// only one chunk, returns the number of tokens of the micro-batch.
    ///
    /// `chunk_size` is the setting: a number of tokens, or 0 for all tokens. By default (`None`) chunks have equal
    /// sizes, and the logits of a chunk take at most 1 GiB. Several chunks also require a buffer for an f32 weight
    /// gradient. If the logits of all tokens take no more memory than the logits of one chunk plus this buffer, there
    /// is a single chunk.
    ///
    /// A chunk never has more logits than the kernels can index ([`MAX_ELEMENTS`]).
    pub fn tokens_per_chunk(&self, chunk_size: Option<usize>) -> usize {
        let (tokens, width) = (self.tokens, self.width.max(1));
        let requested = match chunk_size {
            None => self.default_chunk(),
            Some(0) => tokens,
            Some(chunk_size) => chunk_size,
        };
        let most = requested.min(MAX_ELEMENTS / width).max(1);
        if tokens <= most {
            return tokens;
        }
        if chunk_size == Some(most) {
            return most;
        }
        let equal = tokens.div_ceil(tokens.div_ceil(most));
        let aligned = equal.next_multiple_of(ALIGNMENT);
        if aligned <= most { aligned } else { equal }
    }

    fn default_chunk(&self) -> usize {
        let row = self.width.saturating_mul(self.size).max(1);
        let weight_gradient = self.width.saturating_mul(self.hidden).saturating_mul(4);
        let chunked = DEFAULT_BYTES.saturating_add(weight_gradient);
        if self.tokens.saturating_mul(row) <= chunked {
            self.tokens
        } else {
            DEFAULT_BYTES / row
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPT2: LogitsShape = LogitsShape {
        tokens: 64 << 10,
        width: 50_304,
        hidden: 768,
        size: 2,
    };

    const QWEN: LogitsShape = LogitsShape {
        tokens: 16 << 10,
        width: 151_936,
        hidden: 1536,
        size: 2,
    };

    /// Returns the number of tokens of a chunk, and the number of chunks.
    fn chunks(shape: LogitsShape, setting: Option<usize>) -> (usize, usize) {
        let chunk = shape.tokens_per_chunk(setting);
        assert!(chunk * shape.width <= MAX_ELEMENTS, "{chunk} of {shape:?}");
        (chunk, shape.tokens.div_ceil(chunk))
    }

    #[test]
    fn every_micro_batch_fits_into_indices_and_the_default_memory() {
        let gpt2 = |samples: usize| LogitsShape {
            tokens: samples << 10,
            ..GPT2
        };
        assert_eq!(chunks(gpt2(16), None), (8192, 2));
        assert_eq!(chunks(gpt2(64), None), (9472, 7));
        // A single tensor would exceed the index range.
        assert!(gpt2(96).tokens * GPT2.width > MAX_ELEMENTS);
        assert_eq!(chunks(gpt2(96), None), (9856, 10));
        assert_eq!(chunks(gpt2(96), Some(0)), (49_152, 2));
        assert_eq!(chunks(QWEN, None), (3328, 5));
        let half = QWEN.width / 2;
        assert_eq!(
            chunks(
                LogitsShape {
                    width: half,
                    ..QWEN
                },
                None
            ),
            (5504, 3)
        );
        let huge = LogitsShape {
            tokens: 7,
            width: 1 << 30,
            hidden: 0,
            size: 8,
        };
        assert_eq!(chunks(huge, None), (1, 7));
    }

    /// 1 GiB holds the logits of 3533 tokens, and the weight gradient takes the memory of the logits of 2000 tokens.
    #[test]
    fn the_default_takes_no_more_memory_than_one_chunk() {
        let of = |tokens| LogitsShape {
            tokens,
            hidden: 1000,
            ..QWEN
        };
        assert_eq!(chunks(of(5533), None), (5533, 1));
        assert_eq!(chunks(of(5534), None), (2816, 2));
    }

    #[test]
    fn a_small_micro_batch_is_one_chunk_and_a_set_size_is_kept() {
        let small = LogitsShape {
            tokens: 512,
            width: 256,
            hidden: 128,
            size: 4,
        };
        assert_eq!(chunks(small, None), (512, 1));
        assert_eq!(chunks(small, Some(0)), (512, 1));
        assert_eq!(chunks(small, Some(100)), (100, 6));
        assert_eq!(chunks(small, Some(1)), (1, 512));
        assert_eq!(chunks(small, Some(513)), (512, 1));
    }
}
