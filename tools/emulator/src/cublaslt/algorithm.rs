//! The algorithm that the library advises: there is one, which remembers what it was advised for.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::attributes::{Attributes, preference as of};
use super::rules::Product;
use super::{Refusal, invalid};

/// `cublasLtMatmulAlgo_t`.
pub(super) type Opaque = [u64; 8];

/// An algorithm, and the promises that it was advised under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Algorithm {
    product: u64,
    /// What the addresses of `A`, `B`, `C` and `D` are multiples of.
    pub alignments: [u32; 4],
    /// Bytes that it works in. Nothing is computed there: they are overwritten, so that memory that is
    /// not the library's to use shows.
    pub workspace: usize,
}

/// The workspace, where so much is allowed.
const WORKSPACE: usize = 64 << 10;
const MARK: u64 = u64::from_le_bytes(*b"emulated");

impl Algorithm {
    /// That for a product.
    ///
    /// # Errors
    /// An alignment that is none.
    pub(super) fn advise(product: &Product, preference: &Attributes) -> Result<Self, Refusal> {
        let first = of::MIN_ALIGNMENT_A_BYTES;
        let alignments = [0, 1, 2, 3].map(|matrix| preference.get(first + matrix) as u32);
        if let Some(wrong) = alignments.iter().find(|bytes| !bytes.is_power_of_two()) {
            return Err(invalid(format!("{wrong} bytes are no alignment")));
        }
        let allowed = preference.get(of::MAX_WORKSPACE_BYTES);
        Ok(Self {
            product: fingerprint(product),
            alignments,
            workspace: if allowed < WORKSPACE as u64 {
                0
            } else {
                WORKSPACE
            },
        })
    }

    /// What a call without advice uses, which knows no alignment.
    pub(super) fn implicit(product: &Product) -> Self {
        Self {
            product: fingerprint(product),
            alignments: [1; 4],
            workspace: 0,
        }
    }

    pub(super) fn opaque(&self) -> Opaque {
        let [a, b, c, d] = self.alignments.map(u64::from);
        let workspace = self.workspace as u64;
        [MARK, self.product, a, b, c, d, workspace, 0]
    }

    /// # Errors
    /// That it is none, or was advised for another product.
    pub(super) fn of(opaque: &Opaque, product: &Product) -> Result<Self, Refusal> {
        let [mark, advised, a, b, c, d, workspace, _] = *opaque;
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
