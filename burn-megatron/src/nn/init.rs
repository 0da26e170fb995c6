//! Initial values that do not depend on the layout.
//!
//! Element `i` of a parameter is draw `i` of the random stream of its path. A rank computes only its own
//! part, and the whole parameter is bit-equal in every layout.

use burn_megatron_kernels::philox::{Stream, uniform};
use serde::{Deserialize, Serialize};

use super::{MeshRank, ParameterEntry};

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Init {
    /// The same value for every element.
    Constant(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// Uniform between minus this bound and the bound.
    Uniform(f64),
}

impl Init {
    /// The elements of `rank`, in row-major order; padding is zero.
    pub(super) fn values(&self, entry: &ParameterEntry, rank: &MeshRank, key: u64) -> Vec<f64> {
        let mut values = Vec::with_capacity(entry.local_shape(rank).iter().product());
        let placements = &entry.placements;
        placements.for_each_contiguous_run(&entry.shape, entry.on(rank), |run| {
            self.fill(&mut values, key, run.at.unwrap_or(0), run.len);
            values.resize(values.len() + run.padded_len - run.len, 0.0);
        });
        values
    }

    fn fill(&self, values: &mut Vec<f64>, key: u64, start: usize, len: usize) {
        match self {
            Self::Constant(value) => values.resize(values.len() + len, *value),
            Self::Normal(std) => {
                Stream::new(key, 0).normals(start as u64, len, |_, x| values.push(std * x));
            }
            Self::Uniform(bound) => {
                Stream::new(key, 0).words(start as u64, len, |_, word| {
                    values.push(bound * (2.0 * uniform(word) - 1.0));
                });
            }
        }
    }
}

/// The key of the random stream of `path` under `seed`: FNV-1a over both.
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
    fn seeds_and_paths_give_other_streams() {
        let keys = [stream_key(0, "a"), stream_key(1, "a"), stream_key(0, "b")];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }
}
