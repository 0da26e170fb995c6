//! The losses of a step or an evaluation: sums and means over tokens.

use burn::tensor::Tensor;

use super::metrics::{Minimised, bits_per_byte};
use burn_megatron::collective::to_f64;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::{LossTerm, SummedLosses};
use burn_megatron::optim::StepReading;
use burn_megatron::pipeline::schedule::Schedule;

/// Sums over tokens: the objective and, if it has additional terms, the cross-entropy and each term.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LossSums(pub Vec<f64>);

impl LossSums {
    /// Creates sums of zero for an objective with these terms.
    pub fn new(terms: &[LossTerm]) -> Self {
        Self(vec![0.0; 1 + parts_of(terms)])
    }

    /// Returns the sums of the losses of a rank in a step. `values` holds the objectives of the micro-batches, then the
    /// parts of each micro-batch.
    pub fn of_rank(values: &[f64], micro_batches: usize, terms: &[LossTerm]) -> Self {
        let mut sums = Self::new(terms);
        let (objectives, parts) = values.split_at(micro_batches);
        sums.0[0] = objectives.iter().sum();
        let (_, of_parts) = sums.0.split_at_mut(1);
        for parts in parts.chunks(of_parts.len().max(1)) {
            for (sum, part) in of_parts.iter_mut().zip(parts) {
                *sum += part;
            }
        }
        sums
    }

    /// Adds the summed losses, multiplied by `weight`.
    pub fn add_losses(&mut self, losses: SummedLosses, weight: f64) {
        let SummedLosses { objective, parts } = losses;
        check_parts(parts.as_ref(), self.0.len() - 1);
        self.0[0] += weight * objective.into_scalar::<f64>();
        for (sum, part) in self.0[1..].iter_mut().zip(parts.map_or(vec![], to_f64)) {
            *sum += weight * part;
        }
    }

    /// Returns the means over `tokens` tokens; NaN for 0 tokens.
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
                LossTerm::FurtherTokens => minimised.further_tokens = mean,
            }
        }
        MeanLoss { loss, minimised }
    }
}

/// Returns the number of [parts](SummedLosses::parts) of an objective with these terms.
pub(super) fn parts_of(terms: &[LossTerm]) -> usize {
    if terms.is_empty() { 0 } else { 1 + terms.len() }
}

/// Returns the number of loss values of a step: for each micro-batch the objective and its parts.
pub(super) fn losses_of_step(schedule: &Schedule, terms: &[LossTerm]) -> usize {
    schedule.micro_batches() * (1 + parts_of(terms))
}

/// Checks that a model returned the number of parts that it names.
pub(super) fn check_parts(parts: Option<&Tensor<1>>, expected: usize) {
    assert_eq!(
        parts.map_or(0, |parts| parts.dims()[0]),
        expected,
        "a model must return the loss terms that `loss_terms` names"
    );
}

/// Mean losses over tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MeanLoss {
    /// The cross-entropy.
    pub loss: f64,
    /// The objective, if it differs from the cross-entropy.
    pub minimised: Minimised,
}

impl MeanLoss {
    const NONE: Self = Self {
        loss: f64::NAN,
        minimised: Minimised {
            objective: None,
            label_smoothing: None,
            z_loss: None,
            further_tokens: None,
        },
    };

    /// Returns the mean losses of a step over all ranks.
    pub fn of_step<M: LanguageModel>(
        ddp: &DistributedDataParallel<M>,
        micro_batches: usize,
        reading: &StepReading,
    ) -> Self {
        let terms = ddp.module().loss_terms();
        let of_rank = |losses: &[f64]| LossSums::of_rank(losses, micro_batches, terms).0;
        let sums = reading.losses(ddp.groups(), of_rank);
        LossSums(sums).over(reading.tokens as f64, terms)
    }

    /// Returns whether the cross-entropy and the objective are finite.
    pub fn is_finite(&self) -> bool {
        let objective = self.minimised.objective.unwrap_or(self.loss);
        self.loss.is_finite() && objective.is_finite()
    }

    pub fn bits_per_byte(&self, bytes_per_token: f64) -> f64 {
        bits_per_byte(self.loss, bytes_per_token)
    }
}
