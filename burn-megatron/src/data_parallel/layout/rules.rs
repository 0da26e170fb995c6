//! What a layout is made from: the sizes of the parameters, and the rules of the buckets.

use super::BufferKey;
use crate::comm::DType;

/// Bucket ends are padded to a multiple of this many elements, so that a bucket of 16-bit elements
/// starts on 256 bytes, which matrix products ask for.
const BUCKET_MULTIPLE: usize = 128;

/// The multiple, in elements, at which ring collectives reach their full bandwidth.
const BANDWIDTH_MULTIPLE: usize = 1 << 16;

/// The multiple, in codes of 8 bits, at which shards start: four are packed in a word, and devices move
/// four words at once.
const CODES_MULTIPLE: usize = 16;

/// The multiple, in elements, at which parameters of sharded buckets start: 128 bytes in 16 bits.
const PARAMETER_MULTIPLE: usize = 64;

/// One parameter of a rank, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterSize {
    /// Elements of the rank's own part; 0 is legal.
    pub elements: usize,
    /// The type in which the parameter is gathered, and kept where it is not in 8 bits:
    /// [`DType::U8`] for a weight whose codes are gathered.
    pub parameter: DType,
    /// The type in which its gradient is summed.
    pub gradient: DType,
    /// Whether it belongs to an expert, whose gradients are summed over fewer ranks.
    pub expert: bool,
    /// Whether the first and the last stage hold it: it gets a bucket of its own.
    pub shared: bool,
    /// The part of the model whose parameters may share a bucket: a pipeline stage, or a block
    /// under full sharding.
    pub part: usize,
    /// Bytes of both copies of a weight in 8 bits and of their scales, where it is kept so.
    pub quantized_bytes: Option<usize>,
}

/// When a bucket closes, and what its parameters and its end are padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketRules {
    /// Elements at which a bucket closes, looked at after each parameter, so that a bucket may be
    /// larger. `None`: never.
    pub size: Option<usize>,
    /// Ranks over which a bucket of dense parameters is cut.
    pub ranks: usize,
    /// Ranks over which a bucket of expert parameters is cut. `None`: as many as for dense ones.
    pub expert_ranks: Option<usize>,
    /// Whether buckets are cut at all, as for a sharded optimizer. Without, a bucket is one shard
    /// and nothing is padded beyond `align`.
    pub sharded: bool,
    /// Whether bucket ends are padded to 65,536 elements besides. Only for `sharded`.
    pub pad_for_bandwidth: bool,
    /// The multiple, in elements, at which parameters and buckets start. 1: packed.
    pub align: usize,
}

impl BucketRules {
    /// Packed buckets of the default size for ranks that all hold everything.
    pub fn replicated(ranks: usize) -> Self {
        Self {
            size: Some(Self::default_size(ranks)),
            ranks,
            expert_ranks: None,
            sharded: false,
            pad_for_bandwidth: false,
            align: 1,
        }
    }

    /// Buckets of the default size that are cut over the ranks; parameters start at multiples of
    /// 64 elements.
    pub fn sharded(ranks: usize) -> Self {
        Self {
            sharded: true,
            align: PARAMETER_MULTIPLE,
            ..Self::replicated(ranks)
        }
    }

    /// The size at which buckets close by default: `max(40,000,000, 1,000,000 x ranks)` elements,
    /// so that the shards of a large group stay worth a message.
    pub fn default_size(ranks: usize) -> usize {
        ranks.saturating_mul(1_000_000).max(40_000_000)
    }

    /// `align` for sharded buckets on a device whose views must start at multiples of `bytes`, in
    /// elements of `dtype`: the least common multiple of 64 and what the device asks for, which for
    /// powers of two is `max(64, bytes / size)`.
    ///
    /// Parameters and gradients lie alike, so the smaller of their types decides.
    ///
    /// # Errors
    ///
    /// [`LayoutError::ZeroAlign`] for 0 bytes, [`LayoutError::Multiple`] if the result is too large
    /// for a `usize`.
    pub fn alignment(bytes: usize, dtype: DType) -> Result<usize, LayoutError> {
        if bytes == 0 {
            return Err(LayoutError::ZeroAlign);
        }
        let elements = bytes / gcd(bytes, dtype.size_of());
        lcm(PARAMETER_MULTIPLE, elements).ok_or(LayoutError::Multiple {
            ranks: 1,
            align: elements,
        })
    }

    /// The first thing that is wrong with these rules.
    pub(super) fn check(&self) -> Result<(), LayoutError> {
        match (self.ranks, self.expert_ranks, self.size, self.align) {
            (0, ..) => Err(LayoutError::NoRanks { of: "dense" }),
            (_, Some(0), ..) => Err(LayoutError::NoRanks { of: "expert" }),
            (_, _, Some(0), _) => Err(LayoutError::ZeroSize {
                default: Self::default_size(self.ranks),
            }),
            (.., 0) => Err(LayoutError::ZeroAlign),
            _ if self.pad_for_bandwidth && !self.sharded => Err(LayoutError::IdlePadding),
            _ => Ok(()),
        }
    }

    /// The shards of a bucket: 1 where buckets are not cut.
    pub(super) fn shards(&self, expert: bool) -> usize {
        match (self.sharded, expert) {
            (false, _) => 1,
            (true, false) => self.ranks,
            (true, true) => self.expert_ranks.unwrap_or(self.ranks),
        }
    }

    /// What the end of a bucket is padded to a multiple of, in elements.
    pub(super) fn bucket_multiple(&self, key: &BufferKey) -> Result<usize, LayoutError> {
        let ranks = self.shards(key.expert);
        let codes = match (key.quantized, key.parameter) {
            (true, DType::U8) => CODES_MULTIPLE,
            _ => 1,
        };
        let bandwidth = if self.pad_for_bandwidth {
            BANDWIDTH_MULTIPLE
        } else {
            1
        };
        let multiple = if self.sharded {
            let shards = ranks.checked_mul(codes);
            [shards, Some(BUCKET_MULTIPLE), Some(bandwidth)]
                .into_iter()
                .try_fold(self.align, |multiple, other| lcm(multiple, other?))
        } else {
            Some(self.align)
        };
        multiple.ok_or(LayoutError::Multiple {
            ranks,
            align: self.align,
        })
    }
}

/// Why no layout can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Nobody is there to share a bucket.
    #[error("buckets of {of} parameters cannot be cut over 0 ranks; give at least 1")]
    NoRanks {
        /// `dense` or `expert`.
        of: &'static str,
    },
    /// Buckets would close before they hold anything.
    #[error(
        "a bucket cannot close at 0 elements; give at least 1 (the default is {default}), or no \
         size for one bucket"
    )]
    ZeroSize {
        /// The size by default.
        default: usize,
    },
    /// Nothing starts at a multiple of 0.
    #[error("parameters cannot start at multiples of 0; give 1 to pack them")]
    ZeroAlign,
    /// Padding was asked for where no bucket is cut.
    #[error(
        "buckets are padded for bandwidth only where they are cut over the ranks; shard the \
         optimizer, or leave the padding out"
    )]
    IdlePadding,
    /// The padding itself is too large.
    #[error(
        "no size is a multiple of {ranks} ranks and of {align} elements and fits into {} bits; \
         give fewer ranks or a smaller alignment",
        usize::BITS
    )]
    Multiple {
        /// Ranks over which a bucket is cut.
        ranks: usize,
        /// The multiple at which parameters start.
        align: usize,
    },
    /// A buffer is larger than memory can be.
    #[error(
        "parameter {index} of {elements} elements lets the {key} buffer grow beyond {limit} \
         elements, more than memory can hold; split the model over more ranks"
    )]
    TooLarge {
        /// The parameter's place in the table.
        index: usize,
        /// Its elements.
        elements: usize,
        /// The buffer.
        key: BufferKey,
        /// The most elements that a buffer of these types can have.
        limit: usize,
    },
    /// The buffers together have more elements than a `usize` counts.
    #[error(
        "the {buffers} buffers together have more elements than {} bits count; split the model \
         over more ranks",
        usize::BITS
    )]
    Uncountable {
        /// How many buffers there are.
        buffers: usize,
    },
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least common multiple of two numbers above 0.
fn lcm(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a, b)).checked_mul(b)
}
