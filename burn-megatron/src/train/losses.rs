//! The losses of a step or an evaluation, summed over tokens and then divided by their number.

use burn::tensor::{DType, Tensor};

use super::metrics::{Minimised, bits_per_byte};
use crate::nn::{LossTerm, Losses};

/// Sums over tokens: of the objective, and where it has terms, of the cross-entropy and each of them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LossSums(pub Vec<f64>);

impl LossSums {
    /// Nothing so far, for an objective with so many terms.
    pub fn new(terms: &[LossTerm]) -> Self {
        let parts = if terms.is_empty() { 0 } else { 1 + terms.len() };
        Self(vec![0.0; 1 + parts])
    }

    /// Adds the losses of some tokens, as often as they count.
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

    /// Adds the sums of the parts alone.
    pub fn add_parts(&mut self, parts: Option<Tensor<1>>, weight: f64) {
        let parts = parts.map_or(vec![], values);
        assert_eq!(
            1 + parts.len(),
            self.0.len(),
            "a model gives the parts of its losses that it names in `loss_terms`"
        );
        for (sum, part) in self.0[1..].iter_mut().zip(parts) {
            *sum += weight * part;
        }
    }

    /// What they are for each of `tokens` tokens. Of no token there is no loss: it is not a number then.
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
    /// What is minimised, where it is something else.
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

    /// Whether it and what is minimised are finite.
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
        Err(error) => unreachable!("they were converted to f64: {error:?}"),
    }
}
