//! Bounds on the rounding differences between a layout of a transformer and one rank.

use burn::tensor::DType;
use burn_megatron::verify::{Layout, Rounding};

use crate::{TransformerConfig, TransformerSubject};

/// See [`Subject::rounding`](burn_megatron::verify::Subject::rounding).
pub(crate) fn of(subject: &TransformerSubject, layout: &Layout) -> Option<Rounding> {
    let (model, fp8) = (&subject.config, &subject.fp8);
    let in_8_bits = match subject.dtype {
        DType::F64 => Rounding::in_8_bits(fp8, layout, model.groups(), &widths(model)),
        _ => Rounding::at_ties(fp8),
    };
    in_8_bits
        .into_iter()
        .chain(of_type(subject))
        .reduce(Rounding::or)
}

/// The widths that the tensor axis splits: queries, keys/values, and the inside of the MLP.
fn widths(model: &TransformerConfig) -> [usize; 3] {
    let head = model
        .head_width
        .unwrap_or(model.hidden / model.heads.max(1));
    [head * model.heads, head * model.groups(), model.mlp_width()]
}

/// Values between operations in each block, forwards and backwards: norm, projection, rotary positions, scores,
/// probabilities, heads, projection, dropout, sum; norm, projection, activation, projection, dropout, sum.
const VALUES: usize = 2 * 15;

/// The bound for a type narrower than f64.
fn of_type(subject: &TransformerSubject) -> Option<Rounding> {
    let model = &subject.config;
    let values = VALUES * model.layers;
    let narrow = |bits: i32, name: &str| {
        let what = format!("each value between operations rounded to {name}");
        Some(Rounding::new(&[(values, 2f64.powi(-bits))], &what))
    };
    match subject.dtype {
        DType::F64 => None,
        DType::BF16 => narrow(8, "bf16"),
        DType::F16 => narrow(11, "f16"),
        _ => {
            // The longest sums: over features, tokens of a step, or classes.
            let tokens = subject.samples * subject.sequence();
            let longest = model.mlp_width().max(model.vocabulary).max(tokens);
            let what = format!("sums of up to {longest} in another order in f32");
            Some(Rounding::new(&[(values * longest, 2f64.powi(-24))], &what))
        }
    }
}
