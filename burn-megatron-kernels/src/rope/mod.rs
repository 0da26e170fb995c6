//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
//!
//! The pair `(a, b)` number `i` of a head turns by `t = position * frequency_i`:
//!
//! ```text
//! a' = a cos t - b sin t
//! b' = b cos t + a sin t
//! ```
//!
//! [`RopeTable`] holds the cosines and sines, with the frequencies of [`Scaling`]. [`rotate`] turns
//! the heads of queries and keys in one pass over memory; [`rotate_mla`] does it for multi-head
//! latent attention, where all heads share one positional key. The backward of a rotation is the
//! rotation by the negative angle, so nothing is saved for it but the table. A tensor that nobody
//! else holds is turned in place.
//!
//! 16-bit types are computed in f32 with a table in f32.

use burn::tensor::{Int, Tensor};

use crate::error::accept;

mod backward;
mod check;
pub mod composed;
mod cpu;
mod forms;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod table;
#[cfg(test)]
mod tests;

pub use table::{RopeConfig, RopeTable, Scaling};

/// Which features of a head turn together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Pairing {
    /// Feature `i` with feature `i + width / 2`, as in GPT-NeoX and Llama's released weights.
    #[default]
    Halves,
    /// Feature `2i` with feature `2i + 1`, as in the paper. They stay where they are.
    Interleaved,
}

/// Where the tokens stand.
#[derive(Clone, Debug)]
pub enum Positions {
    /// The position of the first token of every sequence; the others follow.
    From(usize),
    /// `[batch, seq]`: the position of each token.
    ///
    /// Reading them to check them would wait for the device, so a position outside of the table is
    /// taken as the nearest one inside.
    Each(Tensor<2, Int>),
}

/// What [`rotate`] turns of its input. The default turns the first features of every head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RopeOptions {
    /// Which features turn together.
    pub pairing: Pairing,
    /// The first turned feature of a head; the features before it, and those after the width of the
    /// table, pass unchanged.
    pub first: usize,
    /// Turns the first so many heads only and passes the others: queries and keys of a joint
    /// projection `q|k|v` turn in one launch. `None` turns all.
    pub heads: Option<usize>,
}

/// The heads of one tensor, and what turns of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// How many there are.
    pub heads: usize,
    /// Features of each.
    pub features: usize,
    /// How many of them turn, from the first on.
    pub turned: usize,
    /// The first turned feature.
    pub first: usize,
    /// Turned features.
    pub width: usize,
    /// Which of them turn together.
    pub pairing: Pairing,
}

/// The widths of a head of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Latent {
    /// Features of a query or key without a position.
    pub nope: usize,
    /// Features of a value.
    pub value: usize,
}

/// Turns `x`, `[batch, seq, heads, features]`; features and heads that do not turn pass unchanged.
///
/// Differentiable in `x`. A joint projection needs no split before: see [`RopeOptions::heads`].
///
/// # Panics
///
/// With a [`KernelError`](crate::KernelError): fewer features than [`RopeOptions::first`] and the
/// width of the table need, fewer heads than [`RopeOptions::heads`], positions past the table or
/// of another shape than `[batch, seq]`, a table on another device or of another type (f64 for f64,
/// f32 for all others).
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
/// let turned = rotate(q.clone(), &table, &Positions::From(0), &RopeOptions::default());
/// // The first token stands at position 0 and does not turn.
/// let first = |x: Tensor<4>| x.narrow(1, 0, 1).into_data();
/// assert_eq!(first(turned), first(q));
/// ```
pub fn rotate(
    x: Tensor<4>,
    table: &RopeTable,
    positions: &Positions,
    options: &RopeOptions,
) -> Tensor<4> {
    let heads = accept(check::rotate(&x, table, positions, options));
    if heads.turned == 0 {
        return x;
    }
    backward::rotate(x, table, positions, heads)
}

/// Positions of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1.3).
///
/// With `turned` the width of the table:
///
/// - `q`: `[batch, seq, heads, nope + turned]`; its last `turned` features turn.
/// - `kv`: `[batch, seq, heads, nope + value]`; a head's key without position, then its value.
/// - `k_turned`: `[batch, seq, turned]`; the positional key, turned once and given to every head.
///   Its gradient is the sum over the heads from the first to the last, turned back.
///
/// Returns `q`, the keys `[batch, seq, heads, nope + turned]`, and the values
/// `[batch, seq, heads, value]`, which are a slice of `kv`. Queries and keys are made in one launch.
///
/// [`Pairing::Interleaved`] leaves the features in their places. Megatron-LM's fused operation
/// instead moves the even features to the first half and the odd ones to the second while it turns
/// them. As it does so to queries and keys alike, their products, and with them attention, are the
/// same up to rounding; only the order of the turned features differs.
///
/// # Panics
///
/// With a [`KernelError`](crate::KernelError): shapes that do not agree with the above, `nope` or
/// `value` of 0, tensors of different types, and as [`rotate`] does.
#[allow(clippy::too_many_arguments)]
pub fn rotate_mla(
    q: Tensor<4>,
    kv: Tensor<4>,
    k_turned: Tensor<3>,
    nope: usize,
    value: usize,
    table: &RopeTable,
    positions: &Positions,
    pairing: Pairing,
) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
    let latent = Latent { nope, value };
    let inputs = (&q, &kv, &k_turned);
    let heads = accept(check::mla(inputs, latent, table, positions, pairing));
    let v = kv.clone().narrow(3, nope, value);
    let (q, k) = backward::rotate_mla((q, kv, k_turned), latent, table, positions, heads);
    (q, k, v)
}
