//! Selection of the layers and micro-batches whose activations are recomputed.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{RecomputeConfig, RecomputeGranularity};

/// The method that selects the layers that are recomputed with granularity `full`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RecomputeMethod {
    /// Recomputes all layers of a stage, in runs of `layers` consecutive layers. The last run may be shorter. Only the
    /// input of each run is kept. The backward pass recomputes one run at a time.
    #[default]
    Uniform,
    /// Recomputes the first `layers` layers of each stage, one layer at a time. The other layers keep all activations.
    Block,
}

/// A number of layers, given either once for all pipeline stages, or separately for each stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum RecomputeLayers {
    /// The number of layers is the same in every stage.
    Each(usize),
    /// The number of layers is given for each stage of the schedule, including virtual stages. If the number is 0, no
    /// layer of the stage is recomputed.
    PerStage(Vec<usize>),
}

impl Default for RecomputeLayers {
    fn default() -> Self {
        Self::Each(1)
    }
}

impl RecomputeLayers {
    fn of(&self, stage: usize) -> usize {
        match self {
            Self::Each(layers) => *layers,
            Self::PerStage(stages) => stages.get(stage).copied().unwrap_or(0),
        }
    }
}

/// A run of consecutive layers of a stage. The layers are either all recomputed together, or not recomputed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRun {
    /// The indices of the layers in the stage.
    pub layers: Range<usize>,
    /// Whether the layers are recomputed in the backward pass.
    pub is_recomputed: bool,
}

impl RecomputeConfig {
    /// Returns the number of layers that are recomputed together. Returns 1 if whole layers are not recomputed, and
    /// `None` if the number differs between the layers of a stage.
    pub fn layers_per_run(&self) -> Option<usize> {
        match (self.granularity, self.method, &self.layers) {
            (RecomputeGranularity::None | RecomputeGranularity::Selective, ..) => Some(1),
            (_, Some(RecomputeMethod::Block), _) => None,
            (_, _, None) => Some(1),
            (_, _, Some(RecomputeLayers::Each(layers))) => Some(*layers),
            (_, _, Some(RecomputeLayers::PerStage(_))) => None,
        }
    }

    /// Returns whether this micro-batch is recomputed in a stage with up to `in_flight` micro-batches in flight.
    pub(crate) fn recomputes(&self, micro_batch: usize, in_flight: usize) -> bool {
        let kept = self.micro_batches.unwrap_or(0);
        kept == 0 || micro_batch % in_flight.max(1) >= kept
    }

    /// Returns the runs of the layers of a stage. `matches` has one flag per layer, which is true if the layer matches
    /// a [pattern](Self::patterns).
    pub(crate) fn runs(&self, stage: usize, matches: &[bool]) -> Vec<LayerRun> {
        let layers = matches.len();
        let n = self.layers.clone().unwrap_or_default().of(stage);
        // The layers that are recomputed, and the number of layers per run.
        let (recomputed, at_once): (Vec<bool>, usize) =
            match (self.granularity, self.method.unwrap_or_default()) {
                (RecomputeGranularity::Full, RecomputeMethod::Uniform) => {
                    (vec![n > 0; layers], n.max(1))
                }
                (RecomputeGranularity::Full, RecomputeMethod::Block) => {
                    ((0..layers).map(|layer| layer < n).collect(), 1)
                }
                _ => (matches.to_vec(), 1),
            };
        let mut runs: Vec<LayerRun> = vec![];
        for (layer, is_recomputed) in recomputed.into_iter().enumerate() {
            let joins = |run: &LayerRun| {
                run.is_recomputed == is_recomputed && (!is_recomputed || run.layers.len() < at_once)
            };
            match runs.last_mut().filter(|run| joins(run)) {
                Some(run) => run.layers.end += 1,
                None => runs.push(LayerRun {
                    layers: layer..layer + 1,
                    is_recomputed,
                }),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(config: &RecomputeConfig, stage: usize, layers: usize) -> Vec<(usize, bool)> {
        let runs = config.runs(stage, &vec![false; layers]).into_iter();
        runs.map(|run| (run.layers.len(), run.is_recomputed))
            .collect()
    }

    #[test]
    fn layers_are_recomputed_in_runs() {
        let uniform = |n| RecomputeConfig::full(RecomputeMethod::Uniform, n);
        let block = |n| RecomputeConfig::full(RecomputeMethod::Block, n);
        assert_eq!(runs(&RecomputeConfig::default(), 0, 5), [(5, false)]);
        assert_eq!(runs(&uniform(2), 0, 5), [(2, true), (2, true), (1, true)]);
        assert_eq!(runs(&uniform(7), 0, 5), [(5, true)]);
        assert_eq!(runs(&block(2), 1, 5), [(1, true), (1, true), (3, false)]);
        assert_eq!(runs(&block(9), 1, 2), [(1, true), (1, true)]);
        assert_eq!(runs(&block(2), 0, 0), []);
        let per_stage = RecomputeConfig {
            layers: Some(RecomputeLayers::PerStage(vec![3, 0])),
            ..uniform(1)
        };
        assert_eq!(runs(&per_stage, 0, 4), [(3, true), (1, true)]);
        assert_eq!(runs(&per_stage, 1, 4), [(4, false)]);
        let pattern = RecomputeConfig {
            patterns: vec!["blocks.1".into()],
            ..RecomputeConfig::selective([])
        };
        let found = pattern.runs(0, &[false, true, true, false]);
        let found: Vec<_> = found
            .into_iter()
            .map(|run| (run.layers, run.is_recomputed))
            .collect();
        assert_eq!(
            found,
            [(0..1, false), (1..2, true), (2..3, true), (3..4, false)]
        );
    }

    #[test]
    fn of_those_in_flight_some_keep_everything() {
        let config = RecomputeConfig {
            micro_batches: Some(2),
            ..RecomputeConfig::full(RecomputeMethod::Uniform, 1)
        };
        let recomputed: Vec<_> = (0..7).filter(|i| config.recomputes(*i, 3)).collect();
        assert_eq!(recomputed, [2, 5]);
        // A stage with fewer micro-batches in flight keeps all of them.
        assert!((0..7).all(|i| !config.recomputes(i, 2)));
        assert!(config.check_in_flight(&[3, 2, 1]).is_ok());
        let error = config.check_in_flight(&[2, 1]).unwrap_err().to_string();
        insta::assert_snapshot!(
            error,
            @"invalid micro_batches = 2: expected fewer than 2, the maximum number of micro-batches that a stage has \
              in flight, so that at least one is recomputed"
        );
        let all = RecomputeConfig::full(RecomputeMethod::Uniform, 1);
        assert!((0..7).all(|i| all.recomputes(i, 3)));
    }
}
