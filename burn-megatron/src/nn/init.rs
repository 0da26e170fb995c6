//! Initializers whose values do not depend on the parallel layout.
//!
//! Element `i` of a parameter is computed from random number `i` of a random stream. The seed and the path of the
//! parameter determine the stream. A rank computes only its own part, and the full parameter is bit-identical in every
//! layout.

use std::mem;

use burn_megatron_kernels::philox::{Stream, uniform};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{MeshRank, ParameterEntry};

/// The number of random numbers that a thread draws at a time.
const BLOCK: usize = 1 << 14;

/// The initializer of a parameter: the distribution from which its initial values are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Init {
    /// A constant: all elements have the given value.
    Constant(f64),
    /// Normal distribution with mean 0 and the given standard deviation.
    Normal(f64),
    /// Uniform distribution between `-b` and `b`, where `b` is the given bound.
    Uniform(f64),
}

impl Init {
    /// Returns the elements of `rank`, in row-major order. Padding is zero.
    ///
    /// The threads of the current pool draw blocks of elements. A random number depends only on the index of its
    /// element, so the values do not depend on the number of threads.
    pub(super) fn values(&self, entry: &ParameterEntry, rank: &MeshRank, key: u64) -> Vec<f64> {
        let mut values = vec![0.0; entry.local_shape(rank).iter().product()];
        let mut rest = &mut values[..];
        let mut blocks = vec![];
        let placements = &entry.placements;
        placements.for_each_contiguous_run(&entry.shape, entry.on(rank), |run| {
            let (padded, after) = mem::take(&mut rest).split_at_mut(run.padded_len);
            rest = after;
            let start = run.at.unwrap_or(0);
            let own = padded[..run.len].chunks_mut(BLOCK).enumerate();
            blocks.extend(own.map(|(number, block)| (start + number * BLOCK, block)));
        });
        blocks
            .into_par_iter()
            .for_each(|(start, block)| self.fill(block, key, start));
        values
    }

    fn fill(&self, values: &mut [f64], key: u64, start: usize) {
        let (stream, start, len) = (Stream::new(key, 0), start as u64, values.len());
        match self {
            Self::Constant(value) => values.fill(*value),
            Self::Normal(std) => stream.normals(start, len, |i, x| values[i] = std * x),
            Self::Uniform(bound) => stream.words(start, len, |i, word| {
                values[i] = bound * (2.0 * uniform(word) - 1.0);
            }),
        }
    }
}

/// Returns the key of the random stream of `path` under `seed`: the FNV-1a hash of both.
pub(super) fn stream_key(seed: u64, path: &str) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let bytes = seed.to_le_bytes().into_iter().chain(path.bytes());
    bytes.fold(OFFSET, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(PRIME)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{Axis, Mesh, ParallelConfig};
    use crate::nn::{Placement, Section};

    #[test]
    fn parts_assemble_to_the_values_of_one_rank() {
        for init in [Init::Normal(0.02), Init::Uniform(0.5)] {
            check_parts(init);
        }
    }

    fn check_parts(init: Init) {
        let mut entry = ParameterEntry::replicated("weight", vec![5, 16]);
        let whole = init.values(&entry, &MeshRank::single(), 9);
        for ranks in [1, 2, 4] {
            let shared = ranks.min(2);
            let sections = [(8, ranks), (4, shared), (4, shared)];
            let sections = sections
                .map(|(size, parts)| Section { size, parts })
                .to_vec();
            entry.placements = (Axis::Tensor, Placement::Split { dim: 1, sections }).into();
            let mesh = Mesh::new(&ParallelConfig::new().with_tensor(ranks), ranks).unwrap();
            let mesh = std::sync::Arc::new(mesh);
            let ranks = (0..ranks).map(|rank| MeshRank::new(mesh.clone(), rank));
            let parts: Vec<_> = ranks
                .map(|rank| (init.values(&entry, &rank, 9), rank))
                .collect();
            let parts = parts.iter().map(|(part, rank)| (rank.clone(), &part[..]));
            assert_eq!(entry.assemble(parts), whole);
        }
    }

    #[test]
    fn values_are_the_draws_of_one_thread_with_any_number_of_threads() {
        let mut entry = ParameterEntry::replicated("weight", vec![3, 2 * BLOCK + 6]);
        let sections = vec![Section {
            size: 2 * BLOCK + 6,
            parts: 2,
        }];
        entry.placements = (Axis::Tensor, Placement::Split { dim: 1, sections }).into();
        let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2), 2).unwrap();
        let rank = MeshRank::new(std::sync::Arc::new(mesh), 1);
        let mut normals = vec![];
        let mut uniforms = vec![];
        for row in 0..3 {
            // The second half of the row starts at an index that is not a multiple of four.
            let (start, len) = ((row * (2 * BLOCK + 6) + BLOCK + 3) as u64, BLOCK + 3);
            Stream::new(9, 0).normals(start, len, |_, x| normals.push(0.02 * x));
            Stream::new(9, 0).words(start, len, |_, word| {
                uniforms.push(0.5 * (2.0 * uniform(word) - 1.0));
            });
        }
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.unwrap().install(|| {
                assert!(Init::Normal(0.02).values(&entry, &rank, 9) == normals);
                assert!(Init::Uniform(0.5).values(&entry, &rank, 9) == uniforms);
                let ones = Init::Constant(1.0).values(&entry, &rank, 9);
                assert!(ones == vec![1.0; normals.len()]);
            });
        }
    }

    #[test]
    fn seeds_and_paths_give_other_streams() {
        let keys = [stream_key(0, "a"), stream_key(1, "a"), stream_key(0, "b")];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }
}
