//! The input of a layout: the sizes of the parameters and the rules for buckets.

use super::BufferKey;
use crate::comm::DType;
use crate::mesh::Grid;

/// Bucket sizes are padded to multiples of this number of elements. A bucket of 16-bit elements then starts at a
/// multiple of 256 bytes, as GEMMs require.
const BUCKET_MULTIPLE: usize = 128;

/// Ring collectives reach full bandwidth if the number of elements is a multiple of this number.
const BANDWIDTH_MULTIPLE: usize = 1 << 16;

/// Shards of FP8 codes start at multiples of this number of codes: four codes are packed in a word, and devices move
/// four words at once.
const FP8_CODES_MULTIPLE: usize = 16;

/// The parameters of sharded buckets start at multiples of this number of elements. With 16-bit elements, this is 128
/// bytes.
const PARAMETER_MULTIPLE: usize = 64;

/// The size and the dtypes of one parameter of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterSize {
    /// The number of elements of the rank's part of the parameter, which may be 0.
    pub elements: usize,
    /// The dtype in which the parameter is gathered. It is also the storage dtype, except for FP8 weights. It is
    /// [`DType::U8`] for a weight whose FP8 codes are gathered.
    pub parameter: DType,
    /// The dtype in which the gradient of the parameter is summed.
    pub gradient: DType,
    /// The grid of the parameter, which determines the ranks over which its gradient is summed.
    pub grid: Grid,
    /// Whether the first and the last pipeline stage share the parameter. A shared parameter gets its own bucket.
    pub shared: bool,
    /// The unit of the model that contains the parameter: a pipeline stage, or with ZeRO-3 an FSDP unit. Only
    /// parameters of the same unit may share a bucket.
    pub unit: usize,
    /// The number of bytes of both copies of an FP8 weight and their scales. `None` for other parameters.
    pub quantized_bytes: Option<usize>,
}

/// The rules for dividing parameters into buckets and for padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketRules {
    /// The number of elements at which a bucket is closed. The size of the bucket is checked after each parameter, so a
    /// bucket may be larger. `None`: the size is not limited.
    pub size: Option<usize>,
    /// The number of ranks over which a bucket of dense parameters is sharded.
    pub ranks: usize,
    /// The number of ranks over which a bucket of expert parameters is sharded. `None`: the same number as in `ranks`.
    pub expert_ranks: Option<usize>,
    /// Whether bucket sizes are also padded to multiples of 65,536 elements.
    pub pad_for_bandwidth: bool,
    /// The alignment of parameters and buckets, in elements. With 1, parameters are packed without gaps.
    pub align: usize,
}

impl BucketRules {
    /// Returns the rules for buckets that have the default size and are sharded over `ranks` ranks. Parameters start at
    /// multiples of 64 elements.
    pub fn sharded(ranks: usize) -> Self {
        Self {
            size: Some(Self::default_size(ranks)),
            ranks,
            expert_ranks: None,
            pad_for_bandwidth: false,
            align: PARAMETER_MULTIPLE,
        }
    }

    /// Returns the default size of buckets, in elements: `max(40,000,000, 1,000,000 x ranks)`. Each shard is then large
    /// enough for efficient communication, even in a large group.
    pub fn default_size(ranks: usize) -> usize {
        ranks.saturating_mul(1_000_000).max(40_000_000)
    }

    /// Returns the value of [`align`](Self::align) for sharded buckets on a device whose tensor views must start at
    /// multiples of `bytes`. The result is in elements of `dtype`. It is the least common multiple of 64 and the
    /// alignment of the device. If both are powers of two, the result is `max(64, bytes / size)`, where `size` is the
    /// number of bytes of an element.
    ///
    /// Parameters and gradients have the same layout. Therefore `dtype` must be the smaller of their two dtypes.
    ///
    /// # Errors
    ///
    /// [`LayoutError::ZeroAlign`] if `bytes` is 0, [`LayoutError::PaddingOverflow`] if the result overflows.
    pub fn alignment(bytes: usize, dtype: DType) -> Result<usize, LayoutError> {
        if bytes == 0 {
            return Err(LayoutError::ZeroAlign);
        }
        let elements = bytes / gcd(bytes, dtype.size_of());
        lcm(PARAMETER_MULTIPLE, elements).ok_or(LayoutError::PaddingOverflow {
            ranks: 1,
            align: elements,
        })
    }

    /// Returns an error for the first invalid rule.
    pub(super) fn check(&self) -> Result<(), LayoutError> {
        match (self.ranks, self.expert_ranks, self.size, self.align) {
            (0, ..) => Err(LayoutError::NoRanks { of: "dense" }),
            (_, Some(0), ..) => Err(LayoutError::NoRanks { of: "expert" }),
            (_, _, Some(0), _) => Err(LayoutError::ZeroSize {
                default: Self::default_size(self.ranks),
            }),
            (.., 0) => Err(LayoutError::ZeroAlign),
            _ => Ok(()),
        }
    }

    /// Returns the number of shards of a bucket.
    pub(super) fn shards(&self, grid: Grid) -> usize {
        match grid {
            Grid::Dense => self.ranks,
            Grid::Expert => self.expert_ranks.unwrap_or(self.ranks),
        }
    }

    /// Returns the multiple to which bucket sizes are padded, in elements.
    pub(super) fn bucket_multiple(&self, key: &BufferKey) -> Result<usize, LayoutError> {
        let ranks = self.shards(key.grid);
        let codes = match (key.quantized, key.parameter) {
            (true, DType::U8) => FP8_CODES_MULTIPLE,
            _ => 1,
        };
        let bandwidth = if self.pad_for_bandwidth {
            BANDWIDTH_MULTIPLE
        } else {
            1
        };
        let shards = ranks.checked_mul(codes);
        let multiple = [shards, Some(BUCKET_MULTIPLE), Some(bandwidth)]
            .into_iter()
            .try_fold(self.align, |multiple, other| lcm(multiple, other?));
        multiple.ok_or(LayoutError::PaddingOverflow {
            ranks,
            align: self.align,
        })
    }
}

/// The error that is returned if a layout cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The number of ranks is 0.
    #[error("invalid number of ranks = 0 for the buckets of {of} parameters: expected at least 1")]
    NoRanks {
        /// The kind of parameters: `dense` or `expert`.
        of: &'static str,
    },
    /// The bucket size is 0.
    #[error(
        "invalid bucket size: 0 elements, expected at least 1 (the default is {default}), or no size for \
         one bucket"
    )]
    ZeroSize {
        /// The default bucket size, in elements.
        default: usize,
    },
    /// The alignment is 0.
    #[error("invalid alignment: 0 elements, expected at least 1 (packed)")]
    ZeroAlign,
    /// Buckets are padded to a common multiple of the number of ranks and the alignment, and this multiple overflows.
    #[error(
        "the least common multiple of {ranks} ranks and {align} elements overflows {} bits; use fewer ranks or a \
         smaller alignment",
        usize::BITS
    )]
    PaddingOverflow {
        /// The number of ranks over which a bucket is sharded.
        ranks: usize,
        /// The alignment of parameters, in elements.
        align: usize,
    },
    /// A buffer is too large to allocate.
    #[error(
        "with parameter {index} of {elements} elements the {key} buffer exceeds {limit} elements, the maximum that can \
         be allocated; split the model over more ranks"
    )]
    BufferTooLarge {
        /// The index of the parameter in the parameter table.
        index: usize,
        /// The number of elements of the parameter.
        elements: usize,
        /// The key of the buffer.
        key: BufferKey,
        /// The maximum number of elements of a buffer with these dtypes.
        limit: usize,
    },
    /// The number of elements overflows a `usize`.
    #[error(
        "the number of elements of the {buffers} buffers overflows {} bits; split the model over more ranks",
        usize::BITS
    )]
    ElementCountOverflow {
        /// The number of buffers.
        buffers: usize,
    },
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the least common multiple of two positive numbers, or `None` if it overflows.
fn lcm(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a, b)).checked_mul(b)
}
