//! Tests the loss over a split vocabulary against its definition, computed with plain numbers.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{assemble, leaf, over, part, values, wave};
use crate::nn::*;

const BATCH: usize = 2;
const SEQ: usize = 4;

/// The inputs of one loss.
#[derive(Clone, Debug)]
struct Question {
    tokens: usize,
    divisible_by: usize,
    smoothing: f64,
    z_loss: f64,
    fused: bool,
    ignore: Option<i64>,
    targets: Vec<i64>,
    /// The logits: `[batch * seq, tokens]`.
    logits: Vec<f64>,
}

impl Question {
    fn new(tokens: usize) -> Self {
        let targets = (0..BATCH * SEQ)
            .map(|i| (5 * i + 3) % tokens)
            .map(|t| t as i64)
            .collect();
        let logits = values(wave([BATCH * SEQ, tokens], 0.7).mul_scalar(3.0));
        Self {
            tokens,
            divisible_by: 1,
            smoothing: 0.0,
            z_loss: 0.0,
            fused: true,
            ignore: None,
            targets,
            logits,
        }
    }

    /// Returns the loss of each token and the gradient of `sum(loss[i] * (i + 1))`, by definition.
    fn plain(&self) -> (Vec<f64>, Vec<f64>) {
        let k = self.tokens as f64;
        let s = self.smoothing * k / (k - 1.0);
        let (mut losses, mut gradients) = (vec![], vec![]);
        for (i, target) in self.targets.iter().enumerate() {
            let row = &self.logits[i * self.tokens..(i + 1) * self.tokens];
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let log_sum = row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            let log_p: Vec<f64> = row.iter().map(|x| x - max - log_sum).collect();
            let counts = if self.ignore == Some(*target) {
                0.0
            } else {
                1.0
            };
            let mut loss = 0.0;
            for (j, log_p) in log_p.iter().enumerate() {
                let hit = if j as i64 == *target { 1.0 } else { 0.0 };
                let share = (1.0 - s) * hit + s / k;
                loss -= share * log_p;
                let lse = max + log_sum;
                let slope = (1.0 + 2.0 * self.z_loss * lse) * log_p.exp() - share;
                gradients.push(counts * slope * (i + 1) as f64);
            }
            loss += self.z_loss * (max + log_sum).powi(2);
            losses.push(if counts == 0.0 { 0.0 } else { loss });
        }
        (losses, gradients)
    }

    /// Returns the cross-entropy, smoothing term and z-loss of each token, by definition.
    fn plain_parts(&self) -> [Vec<f64>; 3] {
        let k = self.tokens as f64;
        let s = self.smoothing * k / (k - 1.0);
        let mut parts = [vec![], vec![], vec![]];
        for (i, target) in self.targets.iter().enumerate() {
            let row = &self.logits[i * self.tokens..(i + 1) * self.tokens];
            let lse = row.iter().map(|x| x.exp()).sum::<f64>().ln();
            let own = if self.ignore == Some(*target) {
                [0.0; 3]
            } else {
                let log_p = row[*target as usize] - lse;
                let mean = row.iter().map(|x| x - lse).sum::<f64>() / k;
                [-log_p, s * (log_p - mean), self.z_loss * lse * lse]
            };
            for (part, own) in parts.iter_mut().zip(own) {
                part.push(own);
            }
        }
        parts
    }

    /// Returns the losses and the gradient on `ranks` ranks.
    fn on(&self, ranks: usize) -> (Vec<f64>, Vec<f64>) {
        let (losses, gradient) = self.with_parts_on(ranks);
        (losses[0].clone(), gradient)
    }

    /// Returns the losses followed by their parts, and the gradient.
    fn with_parts_on(&self, ranks: usize) -> (Vec<Vec<f64>>, Vec<f64>) {
        let vocabulary = Vocabulary::padded(self.tokens, self.divisible_by, ranks);
        let placement = Placement::split(2, vocabulary.padded, ranks);
        let shape = [BATCH, SEQ, self.tokens];
        let all = over(ranks, |groups| {
            let place = groups.place();
            let data = TensorData::new(self.logits.clone(), shape);
            let logits = Tensor::<3>::from_data(data, (&Device::flex(), DType::F64));
            let local = part(logits, &placement, place);
            // The values of padded logits must not affect the result.
            let (first, len) = vocabulary.part(place);
            let real = self.tokens.saturating_sub(first).min(len);
            let noise = local.zeros_like().add_scalar(1e6);
            let local = match real {
                0 => noise,
                _ if real == len => local,
                _ => Tensor::cat(
                    vec![local.narrow(2, 0, real), noise.narrow(2, real, len - real)],
                    2,
                ),
            };
            let x = leaf(local);
            let targets = TensorData::new(self.targets.clone(), [BATCH, SEQ]);
            let targets = Tensor::<2, Int>::from_data(targets, &super::autodiff());
            let layer = VocabParallelCrossEntropy::new(vocabulary, groups.tensor())
                .with_label_smoothing(self.smoothing)
                .with_z_loss(self.z_loss)
                .with_fused(self.fused)
                .with_ignore(self.ignore);
            let losses = layer.losses(x.clone(), targets);
            let parts = layer.terms().len();
            let parts = if parts == 0 { 0 } else { 1 + parts };
            assert_eq!(losses.parts.len(), parts);
            let (loss, parts) = (losses.objective, losses.parts);
            let weight = Tensor::<1, Int>::arange(1..(BATCH * SEQ) as i64 + 1, &super::autodiff());
            let weight = weight.float().cast(DType::F64).reshape([BATCH, SEQ]);
            let gradients = (loss.clone() * weight).sum().backward();
            let gradient = x.grad(&gradients).unwrap();
            let all = std::iter::once(loss.inner()).chain(parts);
            (all.map(values).collect::<Vec<_>>(), values(gradient))
        });
        let bits = |loss: &[Vec<f64>]| {
            let all = loss.iter().flatten();
            all.map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let same = all.iter().all(|(loss, _)| bits(loss) == bits(&all[0].0));
        assert!(same, "one loss on every rank");
        let gradients: Vec<_> = all.iter().map(|(_, gradient)| gradient.clone()).collect();
        // The padding comes last.
        let padded = [BATCH, SEQ, vocabulary.padded];
        (all[0].0.clone(), assemble(&placement, &padded, &gradients))
    }

    /// Splits a gradient into the gradients of the tokens and of the padding.
    fn without_padding(&self, gradient: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let rows = gradient.chunks(gradient.len() / (BATCH * SEQ));
        let cut: Vec<_> = rows.map(|row| row.split_at(self.tokens)).collect();
        let join = |parts: Vec<&[f64]>| parts.concat();
        (
            join(cut.iter().map(|(tokens, _)| *tokens).collect()),
            join(cut.iter().map(|(_, padding)| *padding).collect()),
        )
    }

    fn check(&self, ranks: &[usize]) {
        let (loss, gradient) = self.plain();
        for ranks in ranks {
            let (found, with_padding) = self.on(*ranks);
            let (found_gradient, padding) = self.without_padding(&with_padding);
            assert!(
                padding.iter().all(|x| *x == 0.0),
                "a gradient of padding: {padding:?}"
            );
            let what = format!("{} tokens on {ranks} ranks", self.tokens);
            super::assert_close(&format!("loss of {what}"), &found, &loss);
            super::assert_close(&format!("gradient of {what}"), &found_gradient, &gradient);
        }
    }
}

#[test]
fn loss_and_gradient_follow_the_definition() {
    for smoothing in [0.0, 0.1] {
        Question {
            smoothing,
            ..Question::new(12)
        }
        .check(&[1, 2, 4]);
    }
}

#[test]
fn padding_has_no_probability() {
    for smoothing in [0.0, 0.1] {
        // The vocabulary is padded to 12, 12 and 16 entries. The last of four ranks has 4 entries, 2 of them real.
        let question = Question {
            smoothing,
            divisible_by: 4,
            ..Question::new(10)
        };
        question.check(&[1, 2, 4]);
        // The vocabulary is padded to 8, 8 and 16 entries. The last two of four ranks have no real entries.
        Question {
            smoothing,
            divisible_by: 4,
            ..Question::new(7)
        }
        .check(&[1, 2, 4]);
    }
}

#[test]
fn ignored_targets_have_no_loss_and_no_gradient() {
    for (ignore, smoothing) in [(-100, 0.0), (-100, 0.1), (0, 0.1), (11, 0.0)] {
        let mut question = Question {
            ignore: Some(ignore),
            smoothing,
            ..Question::new(12)
        };
        question.targets[1] = ignore;
        question.targets[6] = ignore;
        question.check(&[1, 2, 4]);
        let (loss, gradient) = question.on(2);
        assert_eq!((loss[1], loss[6]), (0.0, 0.0));
        assert!(gradient[12..24].iter().all(|x| *x == 0.0));
        assert!(loss[0] != 0.0 && loss[2] != 0.0);
    }
}

#[test]
fn huge_logits_give_finite_losses() {
    for smoothing in [0.0, 0.1] {
        for (at, value) in [(0, 1e4), (11, 1e4), (5, -1e4)] {
            let mut question = Question {
                smoothing,
                ..Question::new(12)
            };
            for row in 0..BATCH * SEQ {
                question.logits[row * 12 + at] = value;
            }
            question.check(&[1, 2, 4]);
        }
        let mut question = Question {
            smoothing,
            ..Question::new(12)
        };
        for logit in &mut question.logits {
            *logit = logit.signum() * 1e4;
        }
        question.check(&[1, 2, 4]);
    }
}

/// A rank with only padding must not determine the maximum, even if the real logits are very low.
#[test]
fn low_logits_beside_a_rank_of_padding() {
    let mut question = Question {
        divisible_by: 4,
        ..Question::new(7)
    };
    for logit in &mut question.logits {
        *logit -= 1e6;
    }
    let shifted = question.on(4);
    for (shifted, plain) in shifted.0.iter().zip(Question::new(7).plain().0) {
        assert!((shifted - plain).abs() < 1e-9, "{shifted} {plain}");
    }
}

#[test]
fn a_target_that_is_no_token_cannot_pass_unseen() {
    // 10 of the 12 entries are tokens. The targets are below the range, in the padding, and beyond the padding.
    for target in [-1, 10, 12] {
        let mut question = Question {
            divisible_by: 4,
            ..Question::new(10)
        };
        question.targets[2] = target;
        for ranks in [1, 2, 4] {
            let (loss, gradient) = question.on(ranks);
            let (gradient, _) = question.without_padding(&gradient);
            let faults = |values: &[f64]| values.iter().filter(|x| x.is_nan()).count();
            assert_eq!(
                (faults(&loss), faults(&gradient)),
                (1, 10),
                "target {target}"
            );
            assert!(loss[2].is_nan() && gradient[20..30].iter().all(|x| x.is_nan()));
        }
    }
}

/// The cross-entropy is bit-identical to the loss without terms, and each term follows its formula.
#[test]
fn the_parts_of_a_loss_follow_their_definitions() {
    for fused in [true, false] {
        for divisible_by in [1, 4] {
            let plain = Question {
                fused,
                divisible_by,
                ignore: Some(-1),
                ..Question::new(10)
            };
            for (smoothing, z_loss) in [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.3, 0.02)] {
                let mut with = Question {
                    smoothing,
                    z_loss,
                    ..plain.clone()
                };
                with.targets[4] = -1;
                with.check(&[1, 2, 4]);
                let [cross_entropy, smoothed, squares] = with.plain_parts();
                let mut expected = vec![];
                if smoothing > 0.0 || z_loss > 0.0 {
                    expected.push(cross_entropy);
                }
                if smoothing > 0.0 {
                    expected.push(smoothed);
                }
                if z_loss > 0.0 {
                    expected.push(squares);
                }
                for ranks in [1, 2, 4] {
                    let (found, _) = with.with_parts_on(ranks);
                    assert_eq!(found.len(), 1 + expected.len());
                    for (found, expected) in found[1..].iter().zip(&expected) {
                        super::assert_close("part", found, expected);
                    }
                    let mut without = plain.clone();
                    without.targets[4] = -1;
                    let (without, _) = without.on(ranks);
                    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    let cross_entropy = found.get(1).unwrap_or(&found[0]);
                    assert_eq!(bits(cross_entropy), bits(&without));
                }
            }
        }
    }
}
