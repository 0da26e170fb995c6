//! Initial values that do not depend on the layout.
//!
//! Element `i` of a parameter is draw `i` of the random stream of its path. A rank computes only its own
//! part, and the whole parameter is bit-equal in every layout.

use burn_megatron_kernels::philox::Stream;
use serde::{Deserialize, Serialize};

use super::placement::for_each_contiguous_run;
use super::{AxisRank, ParameterEntry, Placement};

/// The distribution of a parameter's initial values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Init {
    /// The same value for every element.
    Constant(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
}

impl Init {
    /// The elements of the rank at `place`, in row-major order; padding is zero.
    pub(super) fn values(&self, entry: &ParameterEntry, place: AxisRank, key: u64) -> Vec<f64> {
        let mut values = Vec::with_capacity(entry.local_shape(place).iter().product());
        match &entry.placement {
            Placement::Replicated => self.fill(&mut values, key, 0, entry.len()),
            Placement::Split { dim, .. } => {
                for_each_contiguous_run(
                    &entry.shape,
                    *dim,
                    &entry.placement.ranges(place),
                    |run| {
                        self.fill(&mut values, key, run.at.unwrap_or(0), run.len);
                        values.resize(values.len() + run.padded_len - run.len, 0.0);
                    },
                );
            }
        }
        values
    }

    fn fill(&self, values: &mut Vec<f64>, key: u64, start: usize, len: usize) {
        match self {
            Self::Constant(value) => values.resize(values.len() + len, *value),
            Self::Normal(std) => {
                Stream::new(key, 0).normals(start as u64, len, |_, x| values.push(std * x));
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
    use crate::nn::Section;

    fn entry(placement: Placement) -> ParameterEntry {
        ParameterEntry {
            path: "weight".into(),
            shape: vec![5, 16],
            placement,
            sum_over_tensor: false,
            tied_across_pipeline: false,
            stage: 0,
            decay: true,
        }
    }

    #[test]
    fn parts_assemble_to_the_values_of_one_rank() {
        let init = Init::Normal(0.02);
        let one = AxisRank { index: 0, size: 1 };
        let whole = init.values(&entry(Placement::Replicated), one, 9);
        for ranks in [1, 2, 4] {
            let shared = ranks.min(2);
            let sections = [(8, ranks), (4, shared), (4, shared)];
            let sections = sections
                .map(|(size, parts)| Section { size, parts })
                .to_vec();
            let entry = entry(Placement::Split { dim: 1, sections });
            let parts: Vec<_> = (0..ranks)
                .map(|index| init.values(&entry, AxisRank { index, size: ranks }, 9))
                .collect();
            assert_eq!(entry.placement.assemble(&entry.shape, &parts), whole);
        }
    }

    #[test]
    fn seeds_and_paths_give_other_streams() {
        let keys = [stream_key(0, "a"), stream_key(1, "a"), stream_key(0, "b")];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }
}
