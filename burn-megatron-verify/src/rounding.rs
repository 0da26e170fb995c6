//! Bounds on the differences that rounding errors can cause between a parallel layout and one rank.

use burn_megatron_kernels::fp8::{BLOCK, Format, MX_BLOCK};

use super::Layout;
use burn_megatron::mesh::{ScheduleKind, ScheduleSource};
use burn_megatron::model::RoundingSizes;
use burn_megatron::nn::fp8::{Fp8Config, Fp8Recipe};

/// A bound on the differences for a layout that rounds other values than a run on one rank does.
#[derive(Clone, Debug, PartialEq)]
pub struct Rounding {
    /// The largest relative difference that passes the check.
    pub bound: f64,
    /// An explanation of the bound: the values that are rounded differently, and how the bound depends on the dtype.
    pub why: String,
}

impl Rounding {
    /// Creates the bound `2 sqrt(sum of n u^2)` from pairs `(n, u)` in `roundings`. Each pair describes `n` successive
    /// roundings to a dtype with unit roundoff `u`. `what` describes the rounded values in the explanation of the
    /// bound. The unit roundoff is half the distance between two adjacent numbers, divided by the smaller number.
    ///
    /// The roundings in the layout and on one rank are independent, and their root mean square is 0.4 `u`. The bound is
    /// therefore about three standard deviations of the largest value.
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

    /// Returns the bound for a model with FP8 layers, if the layout rounds other values than a run on one rank does.
    /// Returns `None` otherwise.
    ///
    /// In f64, the results of FP8 matrix multiplications do not depend on the order of additions. Each value is
    /// therefore rounded to the same FP8 number as on one rank. There are two exceptions. Ranks may round partial sums.
    /// Scales may be computed from other values, for example if an expert receives tokens of several micro-batches at
    /// once.
    ///
    /// The FP8 dispatch of tokens to experts needs no bound, because each token is rounded in the same way for every
    /// destination. Rounding with [`Fp8DispatchScales`](burn_megatron::nn::moe::Fp8DispatchScales) does not change a
    /// token that is already rounded.
    pub fn in_8_bits(fp8: &Fp8Config, layout: &Layout, sizes: &RoundingSizes) -> Option<Self> {
        let parallel = &layout.parallel;
        let cut = |block: usize| {
            let mut parts = sizes
                .split_widths
                .iter()
                .map(|width| width / parallel.tensor);
            parallel.tensor > 1 && parts.any(|part| !part.is_multiple_of(block))
        };
        let senders = parallel.expert * parallel.expert_tensor_size();
        // An expert has the same tokens as on one rank if its tokens come from exactly the ranks of one micro-batch.
        let other_rows = sizes.experts && senders != parallel.tensor * parallel.context;
        let other_order = sizes.experts && senders > 1;
        let of = |recipe: &Fp8Recipe| {
            let what = match recipe {
                _ if parallel.tensor > sizes.kv_groups => {
                    "FP8, ranks that replicate keys and values round their partial gradients".into()
                }
                _ if sizes.latents && parallel.context > 1 => {
                    "FP8, context ranks round their partial gradients of all keys and values".into()
                }
                Fp8Recipe::Delayed(_) => return None,
                _ if layout.parallel.context > 1 => {
                    "FP8, ranks of the context axis scale the tokens that they have".into()
                }
                Fp8Recipe::Current(_) if other_rows => EXPERTS.into(),
                Fp8Recipe::Blockwise(_) | Fp8Recipe::MxFp8 if other_rows || other_order => {
                    EXPERTS.into()
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

    /// Returns the bound for a layout that sends activations between pipeline stages in FP8, or `None` for other
    /// layouts. Activations and their gradients are rounded between two stages, but not on a single rank.
    pub fn of_transfers(layout: &Layout) -> Option<Self> {
        let parallel = &layout.parallel;
        let kind = match parallel.schedule.clone().unwrap_or_default() {
            ScheduleSource::Kind(kind) => kind,
            ScheduleSource::File(_) => ScheduleKind::OneFOneB,
        };
        let stages = parallel
            .virtual_stages
            .unwrap_or(kind.default_virtual_stages());
        let ways = (stages * parallel.pipeline).saturating_sub(1);
        let unit = unit(Format::E4M3);
        let what = "FP8, what passes between two stages";
        (parallel.fp8_transfers && ways > 0).then(|| Self::new(&[(2 * ways, unit)], what))
    }

    /// Returns the bound for a model with FP8 layers that computes in a narrower dtype than f64, or `None` without FP8
    /// layers. The order of additions then changes the values slightly. A value halfway between two FP8 numbers may be
    /// rounded in either direction.
    pub fn at_ties(fp8: &Fp8Config) -> Option<Self> {
        let of = |recipe| Self::of_codes(fp8.format.of(&recipe), "FP8, values at a tie");
        recipes(fp8).map(of).reduce(Self::or)
    }

    /// Returns the larger of two bounds, with its explanation.
    pub fn or(self, other: Self) -> Self {
        if other.bound > self.bound {
            other
        } else {
            self
        }
    }

    /// Returns the bound for FP8 formats. A branch of a block has two successive matrix multiplications. Each of them
    /// rounds its input and its weight, and a gradient in the backward. The residual stream is not rounded to FP8, so
    /// the errors of the branches are independent.
    fn of_codes([value, gradient]: [Format; 2], what: &str) -> Self {
        if value == gradient {
            Self::new(&[(6, unit(value))], what)
        } else {
            Self::new(&[(4, unit(value)), (2, unit(gradient))], what)
        }
    }
}

const EXPERTS: &str = "FP8, experts have the rows of several ranks at once";

fn cut_blocks(block: usize) -> String {
    format!("FP8, blocks of {block} end at shard borders")
}

fn recipes(config: &Fp8Config) -> impl Iterator<Item = Fp8Recipe> {
    let of_layers = config.layers.iter().filter_map(|layers| layers.recipe);
    config.recipe.into_iter().chain(of_layers)
}

/// Returns the unit roundoff: half the distance between two adjacent numbers, divided by the smaller number.
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
        insta::assert_snapshot!(rounding.why, @"8 bits: 2 sqrt(4 x 2^-8 + 2 x 2^-6)");
    }

    #[test]
    fn a_transfer_rounds_twice() {
        let bound = |layout: &str, fp8| {
            let mut layout: Layout = layout.parse().unwrap();
            layout.parallel.fp8_transfers = fp8;
            Rounding::of_transfers(&layout).map(|rounding| rounding.bound)
        };
        assert_eq!(bound("pp2", false), None);
        assert_eq!(bound("tp2", true), None);
        assert_eq!(bound("pp2", true), Some(2.0 * (2.0 / 256.0f64).sqrt()));
        let of_eight_stages = Some(2.0 * (14.0 / 256.0f64).sqrt());
        assert_eq!(bound("pp4/interleaved/v2", true), of_eight_stages);
        assert_eq!(bound("pp4/zb-v", true), of_eight_stages);
    }

    #[test]
    fn only_what_is_rounded_otherwise_has_a_bound() {
        let bound = |recipe: &str, layout: &str, experts| {
            let fp8 = Fp8Config {
                recipe: Some(recipe.parse().unwrap()),
                ..Fp8Config::default()
            };
            let layout = layout.parse().unwrap();
            let sizes = RoundingSizes {
                kv_groups: 2,
                split_widths: vec![64, 96],
                experts,
                ..RoundingSizes::default()
            };
            Rounding::in_8_bits(&fp8, &layout, &sizes).map(|rounding| rounding.bound)
        };
        let (hybrid, e4m3) = (2.0 * (3.0 / 64.0f64).sqrt(), 2.0 * (6.0 / 256.0f64).sqrt());
        for (recipe, layout, expected) in [
            ("delayed", "tp2-sp-dp2", None),
            ("current", "tp2-pp2", None),
            ("current", "tp4", Some(hybrid)),
            ("mxfp8", "pp2-dp4-z3", None),
            // 64 / 2 is a multiple of the block size 32, but 96 / 2 is not.
            ("mxfp8", "tp2", Some(e4m3)),
            ("blockwise", "tp2", Some(e4m3)),
            ("blockwise", "dp2", None),
            ("delayed", "cp2", None),
            ("current", "cp2", Some(hybrid)),
        ] {
            assert_eq!(bound(recipe, layout, false), expected, "{recipe} {layout}");
        }
        for (recipe, layout, expected) in [
            ("delayed", "tp2-sp-ep2-etp2-dp2", None),
            ("current", "ep2-dp2", Some(hybrid)),
            ("blockwise", "dp2", None),
            // With `ep2`, the senders are the two ranks of one micro-batch. With `ep1`, an expert has only the tokens
            // of one rank.
            ("current", "tp2-sp-ep2-etp1", None),
            ("current", "tp2-sp-ep1-etp1", Some(hybrid)),
            ("mxfp8", "tp2-sp-ep2-etp1", Some(e4m3)),
        ] {
            assert_eq!(bound(recipe, layout, true), expected, "{recipe} {layout}");
        }
        let latents = RoundingSizes {
            latents: true,
            ..RoundingSizes::default()
        };
        let fp8 = Fp8Config {
            recipe: Some("delayed".parse().unwrap()),
            ..Fp8Config::default()
        };
        let bound = |layout: &str| {
            let layout = layout.parse().unwrap();
            Rounding::in_8_bits(&fp8, &layout, &latents).map(|rounding| rounding.bound)
        };
        assert_eq!([bound("tp2"), bound("cp2")], [None, Some(hybrid)]);
        assert_eq!(Rounding::at_ties(&Fp8Config::default()), None);
    }
}
