//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
//!
//! The features of a head are grouped into pairs `(a, b)`. Pair `i` is rotated by the angle
//! `t = position * frequency_i`:
//!
//! ```text
//! a' = a cos t - b sin t
//! b' = b cos t + a sin t
//! ```
//!
//! [`RopeTable`] holds the cosines and sines. The frequencies depend on the [`Scaling`]. [`rotate`] rotates the heads
//! of queries and keys in one pass over memory. [`rotate_mla`] is for multi-head latent attention (MLA), in which all
//! heads share one part of the key that is rotated. The backward pass of a rotation is the rotation by the negative
//! angle, so the table is the only tensor that is saved for the backward pass. A tensor is rotated in place if no other
//! tensor shares its memory.
//!
//! For 16-bit types, the table is f32 and the rotation is computed in f32.

use burn::tensor::{Int, Tensor};

use crate::error::accept;

mod backward;
mod check;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod ops;
mod table;
#[cfg(test)]
mod tests;

pub use table::{RopeConfig, RopeTable, Scaling};

/// The grouping of the features of a head into pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Feature `i` is paired with feature `i + width / 2`, as in GPT-NeoX and the published weights of Llama.
    #[default]
    Halves,
    /// Feature `2i` is paired with feature `2i + 1`, as in the paper (RoFormer). The order of the features does not
    /// change.
    Interleaved,
}

/// The positions of the tokens, given as rows of a [`RopeTable`]. The row of a token is [`RopeTable::first_row`] plus
/// the position of the token in its sequence.
#[derive(Clone, Debug)]
pub enum Positions {
    /// The row of the first token, which is the same for every sequence. The following tokens use the following rows.
    From(usize),
    /// The row of each token, `[batch, seq]`.
    ///
    /// The rows are not validated, because a check would synchronize with the device. Rows outside the table are
    /// clamped to the first or the last row.
    Each(Tensor<2, Int>),
}

/// Options of [`rotate`]. By default, [`rotate`] rotates all heads, starting at the first feature of a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RopeOptions {
    /// The grouping of features into pairs that are rotated together.
    pub pairing: Pairing,
    /// The index of the first rotated feature of a head. The number of rotated features is the width of the table. All
    /// other features are copied unchanged.
    pub first: usize,
    /// The number of rotated heads, `n`. Only the first `n` heads are rotated. The other heads are copied unchanged.
    /// With this option, one kernel launch rotates the queries and keys of a joint projection of queries, keys and
    /// values. `None` rotates all heads.
    pub heads: Option<usize>,
}

/// The heads of a tensor, and the part of these heads that is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RotaryHeads {
    /// The number of heads.
    pub heads: usize,
    /// The number of features per head.
    pub features: usize,
    /// The number of rotated heads, which come first.
    pub rotated: usize,
    /// The first rotated feature.
    pub first: usize,
    /// The number of rotated features.
    pub width: usize,
    /// The pairing of features.
    pub pairing: Pairing,
}

/// The widths of a head of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MlaDims {
    /// The number of features of a query or key head without a position.
    pub nope: usize,
    /// The number of features of a value head.
    pub value: usize,
}

/// Applies rotary position embedding to `x`, `[batch, seq, heads, features]`. Features and heads that are not rotated
/// are copied unchanged.
///
/// The function is differentiable in `x`. A joint projection of queries, keys and values can be rotated without
/// splitting it. See [`RopeOptions::heads`].
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if
/// - a head has fewer features than [`RopeOptions::first`] plus the width of the table,
/// - there are fewer heads than [`RopeOptions::heads`],
/// - the rows of [`Positions::From`] extend beyond the end of the table, or the shape of [`Positions::Each`] is not
///   `[batch, seq]`,
/// - the table is on a different device, or has a wrong type (f64 is required for f64, otherwise f32).
///
/// # Example
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Tensor};
/// use burn_megatron_kernels::rope::{
///     Positions, RopeConfig, RopeOptions, RopeTable, Scaling, rotate,
/// };
///
/// let device = Device::flex();
/// let config = RopeConfig { width: 8, max_positions: 32, base: 1e4, scaling: Scaling::None };
/// let table = RopeTable::new(&config, &device, DType::F32).unwrap();
/// let q = Tensor::<4>::random([2, 5, 3, 8], Distribution::Default, &device);
/// let rotated = rotate(q.clone(), &table, &Positions::From(0), &RopeOptions::default());
/// // The first token is at position 0 and is not rotated.
/// let first = |x: Tensor<4>| x.narrow(1, 0, 1).into_data();
/// assert_eq!(first(rotated), first(q));
/// ```
pub fn rotate(
    x: Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    options: &RopeOptions,
) -> Tensor<4> {
    let heads = accept(check::rotate(&x, table, positions, options));
    if heads.rotated == 0 {
        return x;
    }
    backward::rotate(x, table, positions, heads)
}

/// Applies rotary position embedding in multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.3).
///
/// In the shapes of the inputs, `rotary` is the width of the table, and `nope` is the number of features without a
/// rotation:
///
/// - `q`: `[batch, seq, heads, nope + rotary]`. The last `rotary` features of each head are rotated.
/// - `kv`: `[batch, seq, heads, nope + value]`. For each head, it holds the part of the key that is not rotated,
///   followed by the value.
/// - `k_rope`: `[batch, seq, rotary]`. The part of the key that is rotated, which all heads share. It is rotated once
///   and copied to every head. Its gradient is the sum over the heads in a fixed order, rotated by the negative angle.
///
/// Returns the rotated `q`, the keys `[batch, seq, heads, nope + rotary]`, and the values `[batch, seq, heads, value]`,
/// which are a slice of `kv`. One kernel launch computes the queries and the keys.
///
/// [`Pairing::Interleaved`] keeps the order of the features. The fused operation of Megatron-LM instead moves the even
/// features to the first half and the odd features to the second half. Megatron-LM reorders both queries and keys, so
/// the results of attention are equal up to rounding.
///
/// # Panics
///
/// Panics in the same cases as [`rotate`]. Also panics with a [`KernelError`](crate::KernelError) if the shapes do not
/// match the list above, if `nope` or `value` is 0, or if the types of the tensors differ.
#[allow(clippy::too_many_arguments)]
pub fn rotate_mla(
    q: Tensor<4>,
    kv: Tensor<4>,
    k_rope: Tensor<3>,
    nope: usize,
    value: usize,
    table: &RopeTable,
    positions: &Positions,
    pairing: Pairing,
) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
    let mla = MlaDims { nope, value };
    let inputs = (&q, &kv, &k_rope);
    let heads = accept(check::mla(inputs, mla, table, positions, pairing));
    let v = kv.clone().narrow(3, nope, value);
    let (q, k) = backward::rotate_mla((q, kv, k_rope), mla, table, positions, heads);
    (q, k, v)
}
