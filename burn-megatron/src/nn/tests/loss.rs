//! The loss over a split vocabulary against its definition, written out in plain numbers.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{leaf, over, part, values, wave};
use crate::nn::*;

const BATCH: usize = 2;
const SEQ: usize = 4;

/// What one loss is asked.
#[derive(Clone, Debug)]
struct Question {
    tokens: usize,
    divisible_by: usize,
    smoothing: f64,
    ignore: Option<i64>,
    targets: Vec<i64>,
    /// `[batch * seq, tokens]`
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
            ignore: None,
            targets,
            logits,
        }
    }

    /// Loss of each token and gradient of `sum(loss[i] * (i + 1))`, by the definition.
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
                gradients.push(counts * (log_p.exp() - share) * (i + 1) as f64);
            }
            losses.push(if counts == 0.0 { 0.0 } else { loss });
        }
        (losses, gradients)
    }

    /// The same on `ranks` ranks.
    fn on(&self, ranks: usize) -> (Vec<f64>, Vec<f64>) {
        let vocabulary = Vocabulary::padded(self.tokens, self.divisible_by, ranks);
        let placement = Placement::split(2, vocabulary.padded, ranks);
        let shape = [BATCH, SEQ, self.tokens];
        let all = over(ranks, |groups| {
            let place = groups.place();
            let data = TensorData::new(self.logits.clone(), shape);
            let logits = Tensor::<3>::from_data(data, (&Device::flex(), DType::F64));
            let local = part(logits, &placement, place);
            // Padding is to have no say, whatever stands in it.
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
            let loss = VocabParallelCrossEntropy::new(vocabulary, groups.tensor())
                .with_label_smoothing(self.smoothing)
                .with_ignore(self.ignore)
                .forward(x.clone(), targets);
            let weight = Tensor::<1, Int>::arange(1..(BATCH * SEQ) as i64 + 1, &super::autodiff());
            let weight = weight.float().cast(DType::F64).reshape([BATCH, SEQ]);
            let gradients = (loss.clone() * weight).sum().backward();
            let gradient = x.grad(&gradients).unwrap();
            (values(loss.inner()), values(gradient))
        });
        let bits = |loss: &[f64]| loss.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let same = all.iter().all(|(loss, _)| bits(loss) == bits(&all[0].0));
        assert!(same, "one loss on every rank");
        let gradients: Vec<_> = all.iter().map(|(_, gradient)| gradient.clone()).collect();
        // With the padding, which comes last.
        let padded = [BATCH, SEQ, vocabulary.padded];
        (all[0].0.clone(), placement.assemble(&padded, &gradients))
    }

    /// The gradients of the tokens, and those of the padding.
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
        // Padded to 12, 12 and 16 entries: the last of four ranks has 2 of 4 real ones.
        let question = Question {
            smoothing,
            divisible_by: 4,
            ..Question::new(10)
        };
        question.check(&[1, 2, 4]);
        // Padded to 8, 8 and 16: the last two of four ranks have none.
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

/// A rank that holds nothing but padding must not set the maximum, however low the real logits are.
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
    // With 12 entries of which 10 are tokens: below all, padding, and beyond the padding.
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
