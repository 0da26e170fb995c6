//! Where the parameters of a rank lie in flat buffers, and how the buffers are cut into buckets.
//!
//! Sizes go in and ranges come out; nothing is allocated. Parameters are walked in reverse order of
//! the table, which is about the order in which backward ends with them. Those of the same types
//! lie in one buffer, and a buffer is a row of buckets, which are what collectives take:
//!
//! ```text
//! buffer bf16/f32   |------------ bucket 0 ------------|------ bucket 1 ------|-- bucket 2 --|
//!                   | head | norm | block 1 ...|padding| block 0 ... |padding | tied  |pad.  |
//! shards            |  rank 0  |  rank 1  |  rank 2    | ...
//! ```
//!
//! A rank owns the same slice of every bucket, wherever the parameters begin and end, so a
//! parameter may lie in several shards.
//!
//! The rules follow Megatron-LM: `_ParamAndGradBuffer` and `compute_full_param_layout`. Two differ:
//! buckets of shared parameters come last, whether or not buckets are cut, and a bucket ends where
//! the part of the model does.

use std::fmt;
use std::ops::Range;

use crate::comm::DType;

mod bucket;
mod fill;
mod rules;
mod table;
#[cfg(test)]
mod tests;

pub use bucket::{Bucket, Piece, Placed};
use fill::{Member, fill};
pub use rules::{BucketRules, LayoutError, ParameterSize};
pub(super) use table::aligned;

/// The flat buffers of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLayout {
    /// One buffer per key, in the order in which the walk meets the keys.
    pub buffers: Vec<FlatBuffer>,
    rules: BucketRules,
    /// Buffer, and bucket in that buffer, by number.
    numbered: Vec<(usize, usize)>,
    /// By place in the table.
    locations: Vec<Location>,
}

/// What the parameters of one buffer have in common.
///
/// Printed as the type of the parameters, that of the gradients, and the kind: `bf16/f32 dense`, and
/// `u8/f32 dense in 8 bits` for weights that are kept so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferKey {
    /// The type in which the parameters are gathered, and kept where they are not in 8 bits.
    pub parameter: DType,
    /// The type in which their gradients are summed.
    pub gradient: DType,
    /// Whether they belong to experts.
    pub expert: bool,
    /// Whether they are kept in 8 bits, in two copies with their scales. What is gathered are codes
    /// where [`parameter`](Self::parameter) is [`DType::U8`], and values that are quantised then
    /// where it is a float.
    pub quantized: bool,
}

/// A row of buckets without gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatBuffer {
    /// What its parameters have in common.
    pub key: BufferKey,
    /// Its elements, padding included.
    pub elements: usize,
    /// Bytes of its parameters where they are kept in 8 bits: both copies and their scales. 0 for
    /// others.
    pub quantized_bytes: usize,
    /// Its buckets, in the order of launch.
    pub buckets: Vec<Bucket>,
}

/// Where a parameter lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The number of the bucket.
    pub bucket: usize,
    /// Its elements, from the start of the bucket.
    pub range: Range<usize>,
}

impl BufferLayout {
    /// Lays out the parameters of a table.
    ///
    /// Every rank of a data-parallel group must come to the same layout, so the sizes must be those
    /// of all of them.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] if the rules make no sense or a buffer is larger than memory can be.
    pub fn new(parameters: &[ParameterSize], rules: &BucketRules) -> Result<Self, LayoutError> {
        rules.check()?;
        let mut members: Vec<(BufferKey, Vec<Member>)> = vec![];
        for (index, size) in parameters.iter().enumerate().rev() {
            let key = BufferKey::of(size);
            match members.iter_mut().find(|(other, _)| *other == key) {
                Some((_, members)) => members.push((index, size)),
                None => members.push((key, vec![(index, size)])),
            }
        }
        let buffers = members
            .iter()
            .map(|(key, members)| fill(*key, members, rules))
            .collect::<Result<Vec<FlatBuffer>, _>>()?;
        let mut total = buffers.iter().map(|buffer| buffer.elements);
        let total = total.try_fold(0, usize::checked_add);
        total.ok_or(LayoutError::Uncountable {
            buffers: buffers.len(),
        })?;
        Ok(Self::index(buffers, parameters.len(), *rules))
    }

    /// Numbers the buckets in the order in which backward ends with them, and looks up every parameter.
    fn index(buffers: Vec<FlatBuffer>, parameters: usize, rules: BucketRules) -> Self {
        let places = buffers.iter().enumerate().flat_map(|(place, buffer)| {
            let bucket = move |(bucket, of): (usize, &Bucket)| (place, bucket, of.order());
            buffer.buckets.iter().enumerate().map(bucket)
        });
        let mut places: Vec<_> = places.collect();
        places.sort_by_key(|(.., order)| *order);
        let mut numbered = vec![];
        let nowhere = Location {
            bucket: 0,
            range: 0..0,
        };
        let mut locations = vec![nowhere; parameters];
        for (place, bucket, _) in places {
            for Placed { index, range } in &buffers[place].buckets[bucket].parameters {
                locations[*index] = Location {
                    bucket: numbered.len(),
                    range: range.clone(),
                };
            }
            numbered.push((place, bucket));
        }
        Self {
            buffers,
            rules,
            numbered,
            locations,
        }
    }

    /// The rules that it was made by.
    pub fn rules(&self) -> &BucketRules {
        &self.rules
    }

    /// Elements of all buffers, padding included.
    pub fn elements(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.elements).sum()
    }

    /// Elements of all parameters, without padding.
    pub fn parameter_elements(&self) -> usize {
        self.locations.iter().map(|place| place.range.len()).sum()
    }

    /// The number of buckets in all buffers.
    pub fn bucket_count(&self) -> usize {
        self.numbered.len()
    }

    /// All buckets with their numbers and buffers, in the order of launch: that in which backward ends
    /// with them, whatever their buffers; those of shared parameters last.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, &FlatBuffer, &Bucket)> {
        let number = |number| (number, self.buffer_of(number), self.bucket(number));
        (0..self.bucket_count()).map(number)
    }

    /// A bucket by its number.
    ///
    /// # Panics
    ///
    /// If there is no such bucket, as for an index into a slice.
    pub fn bucket(&self, number: usize) -> &Bucket {
        let (buffer, bucket) = self.numbered[number];
        &self.buffers[buffer].buckets[bucket]
    }

    /// The buffer in which a bucket lies.
    ///
    /// # Panics
    ///
    /// If there is no such bucket, as for an index into a slice.
    pub fn buffer_of(&self, number: usize) -> &FlatBuffer {
        &self.buffers[self.numbered[number].0]
    }

    /// Where the parameter at `index` of the table lies; `None` beyond the table.
    pub fn find(&self, index: usize) -> Option<&Location> {
        self.locations.get(index)
    }
}

impl BufferKey {
    fn of(size: &ParameterSize) -> Self {
        Self {
            parameter: size.parameter,
            gradient: size.gradient,
            expert: size.expert,
            quantized: size.quantized_bytes.is_some(),
        }
    }
}

impl fmt::Display for BufferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.expert { "expert" } else { "dense" };
        let bits = if self.quantized { " in 8 bits" } else { "" };
        write!(f, "{}/{} {kind}{bits}", self.parameter, self.gradient)
    }
}

impl FlatBuffer {
    /// Elements that one rank owns, padding included: its shards of all buckets.
    pub fn shard_elements(&self) -> usize {
        let shards = self.buckets.iter().map(Bucket::shard_elements);
        shards.sum()
    }
}
