//! How far rounding alone may take a layout from one rank.

use burn_megatron_kernels::fp8::{BLOCK, Format, MX_BLOCK};

use super::Layout;
use crate::nn::fp8::{Fp8Config, Fp8Recipe};

/// A bound on the differences of a layout whose values are rounded otherwise than those of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Rounding {
    /// The largest relative difference that passes.
    pub bound: f64,
    /// What is rounded otherwise, and how the bound follows from the type.
    pub why: String,
}

impl Rounding {
    /// The bound `2 sqrt(sum of n u^2)` of values that pass through `n` roundings to a type of the unit `u`,
    /// as `(n, u)`, one after the other. `u` is the most that one can be off, half the distance of neighbours
    /// over the smaller of them. On both sides of the comparison they are independent, and off by 0.4 `u` in the
    /// mean square, so that the bound is some three standard deviations of the largest value.
    pub fn new(roundings: &[(usize, f64)], what: &str) -> Self {
        let squares = roundings.iter().map(|(n, unit)| *n as f64 * unit * unit);
        let bound = 2.0 * squares.sum::<f64>().sqrt();
        let terms = roundings.iter().map(|(n, unit)| {
            let exponent = 2.0 * unit.log2();
            format!("{n} x 2^{exponent}")
        });
        let terms: Vec<_> = terms.collect();
        Self {
            bound,
            why: format!("{what}: 2 sqrt({})", terms.join(" + ")),
        }
    }

    /// What the 8-bit layers of a model round otherwise in a layout, if anything. `groups` are the groups of keys
    /// and values, `widths` the features that the ranks of the tensor axis share.
    ///
    /// In f64 products in 8 bits are the same whatever the order of their sums, so that each value has the code
    /// that it has on one rank, but where ranks round parts of a sum, or blocks of scales end elsewhere.
    pub fn in_8_bits(
        fp8: &Fp8Config,
        layout: &Layout,
        groups: usize,
        widths: &[usize],
    ) -> Option<Self> {
        let cut = |block: usize| {
            let mut parts = widths.iter().map(|width| width / layout.tensor);
            layout.tensor > 1 && parts.any(|part| !part.is_multiple_of(block))
        };
        let of = |recipe: &Fp8Recipe| {
            let what = match recipe {
                _ if layout.tensor > groups => {
                    "8 bits, ranks that share keys and values round their parts of a gradient"
                        .into()
                }
                Fp8Recipe::Blockwise(_) if cut(BLOCK) => cut_blocks(BLOCK),
                Fp8Recipe::MxFp8 if cut(MX_BLOCK) => cut_blocks(MX_BLOCK),
                _ => return None,
            };
            Some(Self::of_codes(fp8.format.of(recipe), &what))
        };
        recipes(fp8)
            .filter_map(|recipe| of(&recipe))
            .reduce(Self::or)
    }

    /// What all 8-bit layers of a model round otherwise where sums that are rounded before, or added up in f32,
    /// come in another order: values at a tie get one code or the other. Nothing where there are no such layers.
    pub fn at_ties(fp8: &Fp8Config) -> Option<Self> {
        let of = |recipe| Self::of_codes(fp8.format.of(&recipe), "8 bits, values at a tie");
        recipes(fp8).map(of).reduce(Self::or)
    }

    /// The larger of two.
    pub fn or(self, other: Self) -> Self {
        match other.bound > self.bound {
            true => other,
            false => self,
        }
    }

    /// A branch of a block has two products in a row, each of a rounded input and a rounded weight, and backwards
    /// two of a rounded gradient. Branches are added to the residual stream, which is not rounded to 8 bits, so
    /// that their errors do not follow from each other.
    fn of_codes([value, gradient]: [Format; 2], what: &str) -> Self {
        match value == gradient {
            true => Self::new(&[(6, unit(value))], what),
            false => Self::new(&[(4, unit(value)), (2, unit(gradient))], what),
        }
    }
}

fn cut_blocks(block: usize) -> String {
    format!("8 bits, blocks of {block} end where a rank's part ends")
}

fn recipes(config: &Fp8Config) -> impl Iterator<Item = Fp8Recipe> {
    let of_layers = config.layers.iter().filter_map(|layers| layers.recipe);
    config.recipe.into_iter().chain(of_layers)
}

/// Half the distance of neighbours over the smaller one.
fn unit(format: Format) -> f64 {
    2f64.powi(-1 - format.mantissa_bits() as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_follows_from_the_units() {
        let rounding = Rounding::new(&[(4, 0.0625), (2, 0.125)], "8 bits");
        assert_eq!(rounding.bound, 2.0 * (4.0 / 256.0 + 2.0 / 64.0f64).sqrt());
        assert_eq!(rounding.why, "8 bits: 2 sqrt(4 x 2^-8 + 2 x 2^-6)");
    }

    #[test]
    fn only_what_is_rounded_otherwise_has_a_bound() {
        let bound = |recipe: &str, layout: &str| {
            let fp8 = Fp8Config {
                recipe: Some(recipe.parse().unwrap()),
                ..Fp8Config::default()
            };
            let layout = layout.parse().unwrap();
            Rounding::in_8_bits(&fp8, &layout, 2, &[64, 96]).map(|rounding| rounding.bound)
        };
        let (hybrid, e4m3) = (2.0 * (3.0 / 64.0f64).sqrt(), 2.0 * (6.0 / 256.0f64).sqrt());
        for (recipe, layout, expected) in [
            ("delayed", "tp2-sp-dp2", None),
            ("current", "tp2-pp2", None),
            ("current", "tp4", Some(hybrid)),
            ("mxfp8", "pp2-dp4-z3", None),
            // 64 / 2 is a block of 32; 96 / 2 is none.
            ("mxfp8", "tp2", Some(e4m3)),
            ("blockwise", "tp2", Some(e4m3)),
            ("blockwise", "dp2", None),
        ] {
            assert_eq!(bound(recipe, layout), expected, "{recipe} {layout}");
        }
        assert_eq!(Rounding::at_ties(&Fp8Config::default()), None);
    }
}
