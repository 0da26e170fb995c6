//! The losses of a step or an evaluation: sums over tokens, and their means.

use burn::tensor::{DType, Tensor};

use super::metrics::{Minimised, bits_per_byte};
use crate::nn::{LossTerm, Losses};

/// Sums over tokens: the objective and, if it has terms, the cross-entropy and each term.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LossSums(pub Vec<f64>);

impl LossSums {
    /// Zeros, for an objective with these terms.
    pub fn new(terms: &[LossTerm]) -> Self {
        let parts = if terms.is_empty() { 0 } else { 1 + terms.len() };
        Self(vec![0.0; 1 + parts])
    }

    /// Adds the losses of some tokens, times `weight`.
    pub fn add_losses(&mut self, losses: Losses, weight: f64) {
        let parts = losses.sums_of_parts();
        let objective = losses.objective.sum().into_scalar::<f64>();
        self.add(objective, parts, weight);
    }

    /// Adds the sum of an objective and those of its [parts](Losses::sums_of_parts).
    pub fn add(&mut self, objective: f64, parts: Option<Tensor<1>>, weight: f64) {
        self.0[0] += weight * objective;
        self.add_parts(parts, weight);
    }

    /// Adds only the sums of the parts.
    pub fn add_parts(&mut self, parts: Option<Tensor<1>>, weight: f64) {
        let parts = parts.map_or(vec![], values);
        assert_eq!(
            1 + parts.len(),
            self.0.len(),
            "a model must return the loss terms that `loss_terms` names"
        );
        for (sum, part) in self.0[1..].iter_mut().zip(parts) {
            *sum += weight * part;
        }
    }

    /// The means over `tokens` tokens; NaN for 0 tokens.
    pub fn over(self, tokens: f64, terms: &[LossTerm]) -> MeanLoss {
        if tokens == 0.0 {
            return MeanLoss::NONE;
        }
        let mut means = self.0.into_iter().map(|sum| sum / tokens);
        let mut next = || means.next().unwrap_or(f64::NAN);
        let objective = next();
        if terms.is_empty() {
            return MeanLoss {
                loss: objective,
                minimised: Minimised::default(),
            };
        }
        let loss = next();
        let mut minimised = Minimised {
            objective: Some(objective),
            ..Minimised::default()
        };
        for term in terms {
            let mean = Some(next());
            match term {
                LossTerm::LabelSmoothing => minimised.label_smoothing = mean,
                LossTerm::ZLoss => minimised.z_loss = mean,
            }
        }
        MeanLoss { loss, minimised }
    }
}

/// The means over the tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MeanLoss {
    /// The cross-entropy.
    pub loss: f64,
    /// The objective, if it is not the cross-entropy alone.
    pub minimised: Minimised,
}

impl MeanLoss {
    const NONE: Self = Self {
        loss: f64::NAN,
        minimised: Minimised {
            objective: None,
            label_smoothing: None,
            z_loss: None,
        },
    };

    /// Whether the cross-entropy and the objective are finite.
    pub fn is_finite(&self) -> bool {
        let objective = self.minimised.objective.unwrap_or(self.loss);
        self.loss.is_finite() && objective.is_finite()
    }

    pub fn bits_per_byte(&self, bytes_per_token: f64) -> f64 {
        bits_per_byte(self.loss, bytes_per_token)
    }
}

fn values(tensor: Tensor<1>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    match data.try_into_vec() {
        Ok(values) => values,
        Err(error) => unreachable!("converted to f64: {error:?}"),
    }
}
