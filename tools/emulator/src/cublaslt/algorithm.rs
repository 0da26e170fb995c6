//! The algorithms that the heuristic returns. All algorithms compute the same result with different workspaces. An
//! algorithm stores the conditions under which it was returned.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::attributes::{Attributes, preference as of};
use super::rules::Product;
use super::{Refusal, invalid};

/// `cublasLtMatmulAlgo_t`.
pub(super) type Opaque = [u64; 8];

/// An algorithm, and the conditions under which the heuristic returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Algorithm {
    product: u64,
    /// The number of the algorithm.
    pub number: u64,
    /// The alignments of the addresses of `A`, `B`, `C` and `D`.
    pub alignments: [u32; 4],
    /// The size of the workspace in bytes. Nothing is computed in the workspace. It is overwritten, so that memory
    /// that the library must not use is noticed.
    pub workspace: usize,
}

/// The workspaces of the algorithms. The heuristic returns the algorithms whose workspace is allowed.
const WORKSPACES: [usize; 3] = [64 << 10, 0, 128 << 10];
const MARK: u64 = u64::from_le_bytes(*b"emulated");

impl Algorithm {
    /// Returns the algorithms for a product.
    ///
    /// # Errors
    /// Returns an error if an alignment is not a power of two.
    pub(super) fn advise(product: &Product, preference: &Attributes) -> Result<Vec<Self>, Refusal> {
        let first = of::MIN_ALIGNMENT_A_BYTES;
        let alignments = [0, 1, 2, 3].map(|matrix| preference.get(first + matrix) as u32);
        if let Some(wrong) = alignments.iter().find(|bytes| !bytes.is_power_of_two()) {
            return Err(invalid(format!("{wrong} bytes are no alignment")));
        }
        let allowed = preference.get(of::MAX_WORKSPACE_BYTES);
        let all = (0..).zip(WORKSPACES);
        let fitting = all.filter(|(_, workspace)| *workspace as u64 <= allowed);
        let algorithm = |(number, workspace)| Self {
            product: fingerprint(product),
            number,
            alignments,
            workspace,
        };
        Ok(fitting.map(algorithm).collect())
    }

    /// Returns the algorithm of a call without a heuristic. No alignment is assumed.
    pub(super) fn implicit(product: &Product) -> Self {
        Self {
            product: fingerprint(product),
            number: 1,
            alignments: [1; 4],
            workspace: 0,
        }
    }

    pub(super) fn opaque(&self) -> Opaque {
        let [a, b, c, d] = self.alignments.map(u64::from);
        let workspace = self.workspace as u64;
        [MARK, self.product, a, b, c, d, workspace, self.number]
    }

    /// Reads an algorithm.
    ///
    /// # Errors
    /// Returns an error if the value is not an algorithm, or if the algorithm belongs to another product.
    pub(super) fn of(opaque: &Opaque, product: &Product) -> Result<Self, Refusal> {
        let [mark, advised, a, b, c, d, workspace, number] = *opaque;
        if mark != MARK {
            return Err(invalid(
                "the algorithm is not one that this library advised",
            ));
        }
        if advised != fingerprint(product) {
            return Err(invalid("the algorithm was advised for another product"));
        }
        Ok(Self {
            product: advised,
            number,
            alignments: [a, b, c, d].map(|bytes| bytes as u32),
            workspace: workspace as usize,
        })
    }
}

fn fingerprint(product: &Product) -> u64 {
    let mut hasher = DefaultHasher::new();
    product.hash(&mut hasher);
    hasher.finish()
}
